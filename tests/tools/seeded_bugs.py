#!/usr/bin/env python3
"""Bugs that an engine for many ranks could have, each put into a copy of the tree: does a test turn red?

    tests/tools/seeded_bugs.py --work DIR [--only PART]... [--out FILE.md]
    tests/tools/seeded_bugs.py --work DIR --package BUILD/python [--python PYTHON] [--only PART] [--out FILE.md]
    tests/tools/seeded_bugs.py --check

A bug is a few replaced lines. The tracked files are copied to DIR, which is made, and built there once. Then each bug
is put in alone, the test programs that could see it are built, and their tests are run until the first one fails. A
table says which test turned red. With --package the bugs are those of the Python package: only its files in Python
change, its modules are taken from BUILD/python, and nothing is built; PYTHON has torch and the packages of the tests.

It takes a minute for each bug on two cores, so no test runs it; but one runs --check, which only looks whether each
text that is replaced is still there. The exit code is 1 where a bug was not seen.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import seeded_engine
import seeded_python

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def run(command, cwd, seconds=600):
    """Exit code and output; the code is none where it took too long."""
    try:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", timeout=seconds)
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace")


def must(command, cwd):
    code, out = run(command, cwd, 3600)
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {code}:\n{out[-3000:]}")


def prepare(tree, jobs, bugs):
    """The tree with a build of these bugs' test programs, which later ones only change."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        source, target = ROOT / name, tree / name
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    must(["cmake", "-S", tree, "-B", tree / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DZG_TESTS=ON"], tree)
    must(["ninja", f"-j{jobs}", "-C", "build", *sorted({bug.tests[0] for bug in bugs})], tree)


def package_in(tree, built):
    """The package, with its modules from a build, and its tests; the files in Python are those of the tree."""
    for folder in ("src/python/ziggurat", "tests/python", "tools/examples"):
        shutil.copytree(ROOT / folder, tree / folder, dirs_exist_ok=True)
    for module in built.glob("ziggurat/*.so"):
        shutil.copy2(module, tree / "src/python/ziggurat")


def seen_by_python(bug, tree, python):
    """The same as seen_by(), for a bug of the Python package."""
    program, test = bug.tests
    here = {**os.environ, "PYTHONPATH": str(tree / "src/python")}
    command = [python, "-B", str(tree / "tests/python" / program), test]
    try:
        done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired:
        return "a hang", True
    if done.returncode == 0 or "skipped" in done.stdout + done.stderr:
        return "no test", False
    return f"{program} {test}", re.search(r"^(FAIL|ERROR): ", done.stderr, re.M) is not None or done.returncode < 0


def seen_by(bug, tree, jobs):
    """Which test turned red, or what went wrong; and whether that is one."""
    program, tests = bug.tests
    code, out = run(["ninja", f"-j{jobs}", "-C", "build", program], tree, 1200)
    if code != 0:
        return f"does not compile: {out[-600:]}", False
    code, out = run([tree / "build/tests" / program, f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"], tree, 400)
    if code == 0:
        return "no test", False
    failed = re.search(r"\[  FAILED  \] ([\w/.]+)", out)
    if failed:
        return failed.group(1), True
    asserted = re.search(r"assertion failed: (.*)", out)
    return asserted.group(0) if asserted else "a hang" if code is None else f"exit code {code}", True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--work", type=pathlib.Path, help="directory of the copy and its build")
    what.add_argument("--check", action="store_true", help="only look whether every bug fits the code")
    parser.add_argument("--only", action="append", help="bugs whose name has this part; may be repeated")
    parser.add_argument("--package", type=pathlib.Path, help="the built Python package, whose bugs are tried then")
    parser.add_argument("--python", default=sys.executable, help="for the tests of the Python package")
    parser.add_argument("--jobs", type=int, default=1, help="of the build")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table")
    args = parser.parse_args()
    of_python = tuple(seeded_engine.Bug(name, ((file, old, new),), (program, test))
                      for name, file, old, new, program, test in seeded_python.BUGS)
    known = seeded_engine.BUGS + of_python if args.check else of_python if args.package else seeded_engine.BUGS
    bugs = [bug for bug in known if any(part in bug.name for part in args.only or [""])]
    misfits = []
    for bug in bugs:
        texts = {name: (ROOT / name).read_text() for name, _, _ in bug.changes}
        for name, old, new in bug.changes:
            if texts[name].count(old) != 1:
                misfits.append(f"{bug.name}: {name} has not exactly one {old!r}: adapt the bug to the code")
            texts[name] = texts[name].replace(old, new)
    if misfits:
        sys.exit("\n".join(misfits))
    if args.check:
        return print(f"{len(bugs)} bugs fit the code")
    tree = args.work.resolve()
    package_in(tree, args.package) if args.package else prepare(tree, args.jobs, bugs)
    table, missed = ["| bug | red |", "| --- | --- |"], 0
    for bug in bugs:
        begin = time.monotonic()
        before = {name: (tree / name).read_text() for name, _, _ in bug.changes}
        try:
            for name, old, new in bug.changes:
                text = (tree / name).read_text()
                (tree / name).write_text(text.replace(old, new))
            seen = seen_by_python(bug, tree, args.python) if args.package else seen_by(bug, tree, args.jobs)
        finally:
            for name, text in before.items():
                (tree / name).write_text(text)
        missed += not seen[1]
        table.append(f"| {bug.name} | {seen[0]} |")
        print(f"{table[-1]}  {time.monotonic() - begin:.0f} s", flush=True)
    if args.out:
        args.out.write_text("\n".join(table) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
