#!/usr/bin/env python3
"""Puts small bugs into source files, one at a time, and says whether a test turns red.

    tests/tools/mutate.py --work DIR --program zg_test_store [--tests 'MoveGraph.*'] [-n 20] [--seed 1]
                          [--least 0.9] [--out FILE.md] FILE[:FIRST-LAST]...
    tests/tools/mutate.py --work DIR --program zg_test_store --since COMMIT        lines that changed since then
    tests/tools/mutate.py --self-test

A bug (a mutant) is one change of one line: another comparison, `+` for `-`, `&&` for `||`, a condition that always or
never holds, a number that is one larger, `min` for `max`, a statement that is left out. They are chosen at random from
the lines named, comments and texts left out, so no list of them has to follow the code. The tracked files are copied to
DIR, which is made, and built there once; the working tree is never touched. For each mutant the program is built, and
its tests run until the first one fails. Some mutants change nothing that can be seen (a hint, a message), so look at
those that no test sees: each is either such a one, or a test that is missing.

It takes about a minute for each mutant on two cores. The exit code is 1 where the tests saw less than --least of those
that compile.
"""
import argparse
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# What is replaced, and by what; operators stand between blanks, since templates have the same characters without.
SWAPS = [(r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
         (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "),
         (r" % ", " + "), (r" \+= ", " -= "), (r" -= ", " += "), (r"\+\+", "--"), (r"--", "++"),
         (r"\bstd::min\b", "std::max"), (r"\bstd::max\b", "std::min"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
         (r"\bcontinue;", "break;"), (r"\bbreak;", "continue;"), (r"\(!(?=\w)", "("), (r" !(?=\w)", " ")]
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
CONDITION = re.compile(r"\b(?:if|while) \(")
STATEMENT = re.compile(r"^\s+(?!return\b|using\b|case\b|break\b|continue\b|delete\b|static_assert\b|else\b|throw\b)"
                       r"[\w:.\->*\[\]()]+(?:\(.*\)| [-+|&]?= .*|\+\+|--);$")
DECLARATION = re.compile(r"^\s+(?:const |static |constexpr |auto |std::\S+ \w+|[A-Z]\w*[&*]? \w+[ =({;])")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    old: str
    new: str


def code_of(line):
    """The line with the characters of comments and texts as blanks, so that places stay what they are."""
    out, text, at = [], None, 0
    while at < len(line):
        c = line[at]
        if text is None and line.startswith("//", at):
            out.append(" " * (len(line) - at))
            break
        if text is not None:
            step = 2 if c == "\\" else 1
            out.append(" " * step)
            if c == text:
                text = None
            at += step
            continue
        if c == '"' or (c == "'" and not (at > 0 and line[at - 1].isdigit())):
            text = c
            c = " "
        out.append(c)
        at += 1
    return "".join(out)[:len(line)].ljust(len(line))


def end_of(code, at):
    """Where the parenthesis that opens before `at` closes; none: not in this line."""
    depth = 1
    for i in range(at, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i
    return None


def mutants_of_line(file, number, line):
    code = code_of(line)
    if not code.strip() or code.lstrip().startswith(("#", "template", "namespace", "static_assert")) or "ZG_ASSERT" in code:
        return []
    changed = []
    for pattern, new in SWAPS:
        changed += [line[:m.start()] + new + line[m.end():] for m in re.finditer(pattern, code)]
    for m in NUMBER.finditer(code):
        changed.append(line[:m.start()] + str(int(m.group()) + 1) + line[m.end():])
    for m in CONDITION.finditer(code):
        end = end_of(code, m.end())
        if end is not None:
            changed += [line[:m.end()] + value + line[end:] for value in ("true", "false")]
    statement = code.rstrip()
    if STATEMENT.match(statement) and statement.count("(") == statement.count(")") and not DECLARATION.match(statement):
        changed.append(line[:len(line) - len(line.lstrip())] + ";")
    return [Mutant(file, number, line.strip(), new.rstrip()) for new in dict.fromkeys(changed) if new != line]


def mutants_of(file, text, lines):
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if lines is None or number in lines:
            found += mutants_of_line(file, number, line)
    return found


def choose(mutants, count, seed):
    """At most one of each line while there are other lines, in an order that the seed decides."""
    mutants = list(mutants)
    random.Random(seed).shuffle(mutants)
    first, rest, seen = [], [], set()
    for m in mutants:
        (rest if (m.file, m.line) in seen else first).append(m)
        seen.add((m.file, m.line))
    return (first + rest)[:count]


def lines_named(names):
    """By file: the numbers of its lines, none for all."""
    out = {}
    for name in names:
        file, _, span = name.partition(":")
        if not (ROOT / file).is_file():
            sys.exit(f"mutate.py: {file} is no file of the tree")
        first, _, last = span.partition("-")
        out[file] = set(range(int(first), int(last or first) + 1)) if span else None
    return out


def lines_since(commit):
    diff = subprocess.run(["git", "diff", "-U0", commit, "--", "src", "io", "kernels", "include"], cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout
    out, file = {}, None
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line[6:] if line.startswith("+++ b/") else None
        elif line.startswith("@@") and file is not None:
            first, _, count = re.search(r"\+(\d+)(,(\d+))?", line).groups()
            out.setdefault(file, set()).update(range(int(first), int(first) + int(count or 1)))
    return {f: lines for f, lines in out.items() if f.endswith((".cpp", ".hpp"))}


def run(command, cwd, seconds):
    """Exit code and output; the code is none where it took too long."""
    try:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
                              timeout=seconds)
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace")


def prepare(tree, program, jobs):
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.splitlines()
    for name in names:
        source, target = ROOT / name, tree / name
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    for command in (["cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DZG_TESTS=ON"],
                    ["ninja", f"-j{jobs}", "-C", "build", program]):
        code, out = run(command, tree, 7200)
        if code != 0:
            sys.exit(f"{' '.join(command)} ended with {code}:\n{out[-3000:]}")


def seen_by(tree, program, tests, jobs, seconds):
    """What turned red; none: nothing did. An empty text: the mutant does not compile."""
    if run(["ninja", f"-j{jobs}", "-C", "build", program], tree, 1800)[0] != 0:
        return ""
    code, out = run([f"build/tests/{program}", f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"], tree,
                    seconds)
    if code == 0:
        return None
    failed = re.search(r"\[  FAILED  \] ([\w/.]+)", out)
    asserted = re.search(r"assertion failed: (.*)", out)
    return (failed.group(1) if failed else asserted.group(0) if asserted else "a hang" if code is None
            else f"exit code {code}")


def try_all(mutants, tree, args):
    rows = []
    for m in mutants:
        path = tree / m.file
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        lines[m.line - 1] = m.new + "\n"
        try:
            path.write_text("".join(lines))
            red = seen_by(tree, args.program, args.tests, args.jobs, args.seconds)
        finally:
            path.write_text(text)  # also where the user interrupts
        rows.append((m, red))
        verdict = "does not compile" if red == "" else "NOT SEEN" if red is None else red
        print(f"{m.file}:{m.line}: {m.old}\n    {m.new.strip()}\n    {verdict}", flush=True)
    return rows


def table(rows):
    text = "| place | line | instead | red |\n| --- | --- | --- | --- |\n"
    cell = lambda code: "`" + code.replace("|", "\\|") + "`"
    for m, red in rows:
        if red != "":
            text += f"| {m.file}:{m.line} | {cell(m.old)} | {cell(m.new.strip())} | {red or '**none**'} |\n"
    return text


def self_test():
    line = '  if (a < b && !full(c)) count += 2;  // a < b "text"'
    news = [m.new for m in mutants_of_line("x.cpp", 7, line)]
    tail = line[line.index("//"):]
    assert all(new.endswith(tail) for new in news), news
    for want in ("a <= b", "b || !full", "&& full(c)", "count -= 2", "count += 3", "if (true) count", "if (false) count"):
        assert any(want in new for new in news), (want, news)
    assert mutants_of_line("x.cpp", 1, '  fail("a < b && c");') == [Mutant("x.cpp", 1, 'fail("a < b && c");', "  ;")]
    assert mutants_of_line("x.cpp", 1, "  const std::vector<int> all(n);") == []
    assert mutants_of_line("x.cpp", 1, "// if (a < b) return;") == []
    with tempfile.TemporaryDirectory() as name:
        tree = pathlib.Path(name)
        (tree / "f.py").write_text("def larger(a, b):\n    return a if a > b else b\n")
        found = [m.new for m in mutants_of("f.py", (tree / "f.py").read_text(), {2})]
        assert found == ["    return a if a >= b else b"], found
    assert len(choose([Mutant("f", i // 2, "", str(i)) for i in range(10)], 5, 1)) == 5
    assert len({m.line for m in choose([Mutant("f", i // 2, "", str(i)) for i in range(10)], 5, 1)}) == 5
    print("mutants are as they are meant")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE[:FIRST-LAST]")
    parser.add_argument("--since", metavar="COMMIT", help="also the lines that changed since this commit")
    parser.add_argument("--work", type=pathlib.Path, help="directory of the copy and its build")
    parser.add_argument("--program", help="the test program that should see them")
    parser.add_argument("--tests", default="*", help="its tests, as --gtest_filter takes them")
    parser.add_argument("-n", type=int, default=20, dest="count", help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="of the build")
    parser.add_argument("--seconds", type=int, default=400, help="after which the tests hang")
    parser.add_argument("--least", type=float, default=0, help="share of the mutants that must be seen")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    if args.work is None or args.program is None:
        parser.error("--work and --program are needed")
    lines = lines_named(args.files)
    if args.since:
        lines.update(lines_since(args.since))
    all_of_them = [m for file, wanted in sorted(lines.items()) for m in mutants_of(file, (ROOT / file).read_text(), wanted)]
    if not all_of_them:
        parser.error("the lines named have nothing to change")
    chosen = choose(all_of_them, args.count, args.seed)
    print(f"{len(chosen)} of {len(all_of_them)} mutants of {len(lines)} files", flush=True)
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.work, args.program, args.jobs)
    rows = try_all(chosen, args.work.resolve(), args)
    tried = [red for _, red in rows if red != ""]
    seen = sum(red is not None for red in tried)
    print(f"{seen} of {len(tried)} seen; {len(rows) - len(tried)} do not compile")
    if args.out:
        args.out.write_text(table(rows))
    sys.exit(seen < args.least * len(tried))


if __name__ == "__main__":
    main()
