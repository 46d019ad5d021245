"""Plants mistakes in a small tree of documents and programs, and sees that documented_commands.py finds each."""
import contextlib
import io
import pathlib
import tempfile

import documented_commands
import documents
from documented_rows import Row

# A program that has the options --count and --fail, and says so.
PROGRAM = """#!/usr/bin/env python3
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=1)
parser.add_argument("--drive")
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()
if args.drive:
    open(args.drive + "/left", "w").close()
print("counted to", args.count)
sys.exit(7 if args.fail else 0)
"""
README = """# A program

Counts, like this, and `bench/count.py` alone does, too:

    bench/count.py --count 1000000     # takes long
    cmake --preset release -DZG_TESTS=ON && bench/count.py \\
        --count 3

```
bench/count.py [--count N]
```

- A list: `bench/count.py --count
  5`, and `--fail` is another option.

```cpp
bench/count.py --in-another-language
```
"""
FOUND = ["bench/count.py", "bench/count.py --count 1000000", "cmake --preset release -DZG_TESTS=ON",
         "bench/count.py --count 3", "bench/count.py [--count N]", "bench/count.py --count 5"]
FILES = {"README.md": README, "bench/count.py": PROGRAM, "CMakeLists.txt": "option(ZG_TESTS)\n",
         "CMakePresets.json": '{"name": "release"}\n'}
ROWS = (
    Row("usage", ("bench/count.py [*",), instead=("bench/count.py --count 2",), expect=("counted to 2",)),
    Row("count", ("bench/count.py", "bench/count.py --count *"), set={"--count": "4"}, expect=("counted to 4",),
        files={"README.md": "not the tree's", "configs/a.json": "{}"}),
    Row("build", ("cmake *",), why="builds"),
)


def check(files, rows):
    """What the check of a table says of a tree of these files; (exit code, text)."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for place, text in files.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_text(text)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = documented_commands.check_table(root, root / "build", rows)
            for row in rows:
                if code == 0 and documented_commands.is_run(row):
                    code = documented_commands.run_named(row.name, root, root / "build", rows)
        for place, text in files.items():
            assert (root / place).read_text() == text, f"a row has written to {place} of the tree"
        return code, said.getvalue()


def changed(place, old, new):
    assert old in FILES[place], old
    return FILES | {place: FILES[place].replace(old, new)}


def with_row(name, **what):
    return tuple(Row(**(vars(row) | what)) if row.name == name else row for row in ROWS)


PLANTED = [  # files, table, part of what must be said
    (changed("README.md", "--count 1000000", "--counts 1000000"), ROWS, "in no row of the table"),
    (changed("README.md", "--count 1000000", "--count 9 --fast"), ROWS, "count.py has no option --fast"),
    (changed("README.md", "[--count N]", "[--number N]"), ROWS, "count.py has no option --number"),
    (changed("README.md", "`--fail`", "`--fall`"), ROWS, "no program of this tree has the option --fall"),
    (changed("README.md", "DZG_TESTS", "DZG_TEST"), ROWS, "no CMakeLists.txt asks for ZG_TEST"),
    (changed("README.md", "preset release", "preset fast"), ROWS, "there is no preset fast"),
    (changed("README.md", "    cmake", "    tools/other.sh\n    cmake"), ROWS, "README.md:6: in no row of the table"),
    (changed("README.md", "--count 3\n", "--count N\n"), with_row("count", set={}), "placeholders are left"),
    (FILES, ROWS[1:], "README.md:10: in no row of the table"),
    (FILES, ROWS + (Row("more", ("bench/more.py",)),), "row more: no document names a command like: bench/more.py"),
    (FILES, with_row("build", commands=("cmake *", "ctest")), "row build: no document names a command like: ctest"),
    (FILES, with_row("count", replace={"WORD": "7"}), "has the word WORD"),
    (FILES, ROWS + ROWS[-1:], "there are two rows build"),
    (FILES, with_row("count", expect=("counted to 5",)), "nothing that it says matches counted to 5"),
    (FILES, with_row("count", more="--drive /mnt/nvme0"), "left behind on the drives: drives/nvme0/left"),
    (FILES, with_row("count", more="--fail"), "ended with 7, not 0; documented in README.md:"),
    (changed("bench/count.py", "args = parser", "raise OSError\nargs = parser"), ROWS,
     "count.py does not say which options it has"),
]


def main():
    documented_commands.HELPS.clear()  # of the programs that are not in the small tree
    documented_commands.HELPS.update({"count.py": "python bench/count.py --help", "cmake": "cmake --help"})
    found = [c.text for c in documents.of_text("README.md", README)]
    assert found == FOUND, found
    code, said = check(FILES, ROWS)
    assert code == 0, said
    for files, rows, expected in PLANTED:
        code, said = check(files, rows)
        assert code != 0 and expected in said, (expected, said)
    print(f"{len(PLANTED)} planted mistakes, each found")
    return 0
