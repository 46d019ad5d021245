#!/usr/bin/env python3
"""Goes through a whole matrix of ranks in parts, which run side by side, and adds up their tables.

    tests/tools/whole_matrix.py grid --tests build/tests/zg_test_engine --work DIR --parts 64 --only 1-16 --jobs 2
    tests/tools/whole_matrix.py ranks --tests build/tests/zg_test_engine --work DIR --parts 512 --only 1-32

`grid` is GridMatrix.Whole, `ranks` is RanksMatrix.Whole (tests/README.md, "Many ranks"). What each part printed is
kept in DIR; a part whose file is there and passed is not run again, so a matrix that was interrupted goes on. The
table is printed once all parts that were asked for have passed: counts are summed, differences are the largest.

Parts of the grid: 64 choices of what is trained, dropout, format, optimizer and model; the first 16 train everything
without dropout, 8 in fp64 in all tiers and 8 in fp32. The ranks have 512 choices, a part each; the first 32 are in fp64
and fp32.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

TESTS = {"grid": ("GridMatrix.Whole", "ZG_GRID_MATRIX"), "ranks": ("RanksMatrix.Whole", "ZG_RANKS_MATRIX")}


def parts_asked(text, parts):
    """The numbers in a text like 1-8,11."""
    numbers = set()
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None:
            sys.exit(f"--only {text}: {piece!r} is neither a number nor two with a dash between them, like 1-8")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= parts:
            sys.exit(f"--only {text}: the parts have the numbers 1 to {parts}; found {piece}")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def passed(file):
    return file.is_file() and "[  PASSED  ] 1 test." in file.read_text(errors="replace")


def run_part(args, part):
    """Whether the part passed, and for how many seconds it ran."""
    test, limit = TESTS[args.matrix]
    out = args.work / f"{args.matrix}-{part}-of-{args.parts}.txt"
    if passed(out):
        return True, 0.0
    begin = time.monotonic()
    env = {**os.environ, limit: "1e9", "ZG_MATRIX_PART": f"{part}/{args.parts}"}
    with open(f"{out}.partial", "wb") as file:
        subprocess.run([args.tests, f"--gtest_filter={test}"], env=env, stdout=file, stderr=subprocess.STDOUT)
    os.replace(f"{out}.partial", out)
    return passed(out), time.monotonic() - begin


def added(texts):
    """The sums of the parts' headings and tables, as text. All have the same lines but for numbers and rows."""
    heading, totals, tables = None, None, {}
    for text in texts:
        title = None
        for line in text.splitlines():
            if re.match(r"\d+ (of \d+ )?cases", line):
                numbers = [int(n) for n in re.findall(r"\d+", line)]
                heading = heading or line
                totals = numbers if totals is None else [a + b for a, b in zip(totals, numbers)]
            elif line.startswith("| --- "):
                continue
            elif line.startswith("| "):
                name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
                if not re.fullmatch(r"[\d.e+-]+", cells[-1]):
                    title = line
                    continue
                rows = tables.setdefault(title, {})
                rows[name] = [add_cells(a, b) for a, b in zip(rows[name], cells)] if name in rows else cells
    return heading, totals, tables


def add_cells(a, b):
    """The sum of counts, the larger of differences."""
    return str(int(a) + int(b)) if a.isdigit() and b.isdigit() else max(a, b, key=float)


def show(matrix, parts, texts):
    heading, totals, tables = added(texts)
    if matrix == "grid":  # cases, of, runs, 10, seconds, seed
        words = f"{totals[0]:,} of {totals[1]:,} cases, {totals[2]:,} runs of 10 steps"
    else:  # cases, of, of, runs, 10, seconds, seed
        words = f"{totals[0]:,} cases of {totals[1]:,} choices, {totals[3]:,} runs of 10 steps"
    print(f"{words}; {parts}; {totals[-2]:,} s in all, of programs side by side; {heading.split('; ')[-1]}")
    for title, rows in tables.items():
        print(f"\n{title}\n|{' --- |' * title.strip('|').count('|')} --- |")
        for name, cells in sorted(rows.items()):
            print(f"| {name} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", choices=TESTS)
    parser.add_argument("--tests", type=pathlib.Path, required=True, help="the built program zg_test_engine")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="directory for what the parts print")
    parser.add_argument("--parts", type=int, required=True, help="into how many parts the matrix is divided")
    parser.add_argument("--only", default=None, help="numbers of parts, like 1-8,11; without it all")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run side by side")
    args = parser.parse_args()
    if not args.tests.is_file():
        sys.exit(f"{args.tests}: no such file; build it with the CMake option ZG_TESTS=ON")
    asked = parts_asked(args.only or f"1-{args.parts}", args.parts)
    args.work.mkdir(parents=True, exist_ok=True)
    failed = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done, (part, (fine, seconds)) in enumerate(
                zip(asked, pool.map(lambda part: run_part(args, part), asked)), 1):
            print(f"part {part}: {'passed' if fine else 'FAILED'}, {seconds:.0f} s; {done} of {len(asked)}",
                  file=sys.stderr, flush=True)
            if not fine:
                failed.append(part)
    if failed:
        files = ", ".join(f"{args.matrix}-{part}-of-{args.parts}.txt" for part in failed)
        sys.exit(f"{len(failed)} parts failed; see {files} in {args.work}")
    texts = [(args.work / f"{args.matrix}-{part}-of-{args.parts}.txt").read_text() for part in asked]
    show(args.matrix, f"parts {args.only or 'all'} of {args.parts}", texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
