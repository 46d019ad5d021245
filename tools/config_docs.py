#!/usr/bin/env python3
"""Keeps the tables of configuration keys in the documents as the program prints them.

    tools/config_docs.py --write [--program build/ziggurat]    rewrites the tables in docs/
    tools/config_docs.py --check [--program build/ziggurat]    says which of them are stale, and which are missing
    tools/config_docs.py --self-test                           proves on planted mistakes that each kind is found

A table stands between the lines `<!-- keys: NAME -->` and `<!-- /keys -->`; NAME is one or several sections, in one
table, as in `ziggurat config keys --section NAME`. Every section that the program has must stand in exactly one table.

Exit code 0: all right; 1: mistakes, one line each.
"""
import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPEN = re.compile(r"<!-- keys: ([\w. -]+?) -->")
CLOSE = "<!-- /keys -->"


class Program:
    """What `ziggurat config keys` prints."""

    def __init__(self, program):
        self.program = program
        self.tables = {}
        name = None
        for line in self.print().split("\n"):
            if line.startswith("### "):
                name = line[4:]
                self.tables[name] = []
            elif line.startswith("| "):
                self.tables[name].append(line)

    def print(self):
        words = [str(self.program), "config", "keys", "--format", "markdown"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def table_of(names, tables):
    """The lines of one table with the rows of these sections, whose columns must be the same."""
    lines = list(tables[names[0]])
    for name in names[1:]:
        if tables[name][:2] != lines[:2]:
            raise ValueError(f"the sections {' and '.join(names)} have other columns")
        lines += tables[name][2:]
    return lines


def renew(place, text, tables, shown):
    """The text with its tables made anew; (text, mistakes that cannot be mended by that). Adds the sections that it
    shows to `shown`."""
    lines, mistakes, inside = [], [], False
    for number, line in enumerate(text.split("\n"), 1):
        match = OPEN.fullmatch(line.strip())
        if line.strip() == CLOSE:
            if not inside:
                mistakes.append(f"{place}:{number}: {CLOSE} without a beginning")
            inside = False
        if not inside:
            lines.append(line)
        if not match:
            continue
        if inside:
            mistakes.append(f"{place}:{number}: a table within a table")
        inside = True
        names = match.group(1).split()
        unknown = [name for name in names if name not in tables]
        mistakes += [f"{place}:{number}: the program has no section {name}" for name in unknown]
        mistakes += [f"{place}:{number}: section {name} has a table already" for name in names if name in shown]
        shown.update(names)
        if not unknown:
            try:
                lines += table_of(names, tables)
            except ValueError as error:
                mistakes.append(f"{place}:{number}: {error}")
    if inside:
        mistakes.append(f"{place}: the last table has no end")
    return "\n".join(lines), mistakes


def go_through(documents, tables, write):
    """All mistakes of the documents, {place: (path, text)}. Writes those that are stale, if asked to."""
    mistakes, shown = [], set()
    for place, (path, text) in documents.items():
        made, found = renew(place, text, tables, shown)
        mistakes += found
        if found or made == text:
            continue
        if write:
            path.write_text(made, encoding="utf-8")
        else:
            stale = next(i for i, (a, b) in enumerate(zip(text.split("\n") + [""], made.split("\n") + [""]), 1) if a != b)
            mistakes.append(f"{place}:{stale}: stale; tools/config_docs.py --write mends it")
    mistakes += [f"no document has a table for the section {name}" for name in tables if name not in shown]
    return mistakes


def self_test():
    tables = {"a": ["| key | type |", "| --- | --- |", "| `a.x` | size |"],
              "b": ["| key | type |", "| --- | --- |", "| `b.y` | text |"],
              "c": ["| key | why |", "| --- | --- |", "| `c` | it is |"]}
    good = "\n".join(["# A", "<!-- keys: a b -->", *tables["a"], tables["b"][2], CLOSE, "<!-- keys: c -->", *tables["c"],
                      CLOSE, "end"])
    planted = [
        (good.replace("size", "number"), "doc:5: stale"),
        (good.replace("| `b.y` | text |\n", ""), "doc:6: stale"),
        (good.replace("<!-- keys: c -->", "<!-- keys: d -->"), "the program has no section d"),
        (good.replace("<!-- keys: c -->", "<!-- keys: a -->"), "section a has a table already"),
        (good.replace("<!-- keys: c -->", "nothing"), "without a beginning"),
        (good[:good.index("<!-- keys: c")], "no document has a table for the section c"),
        (good.removesuffix(f"{CLOSE}\nend"), "the last table has no end"),
        (good.replace(f"{CLOSE}\n<!-- keys: c -->", "<!-- keys: c -->"), "a table within a table"),
        (good.replace("keys: a b", "keys: a c").replace("keys: c -->", "keys: b -->"), "have other columns"),
    ]
    assert not go_through({"doc": (None, good)}, tables, False)
    for text, expected in planted:
        mistakes = go_through({"doc": (None, text)}, tables, False)
        assert any(expected in mistake for mistake in mistakes), (expected, mistakes)
    print(f"{len(planted)} planted mistakes, each found")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="rewrite the tables")
    what.add_argument("--check", action="store_true", help="compare them")
    what.add_argument("--self-test", action="store_true", help="prove that each kind of mistake is found")
    parser.add_argument("--program", default=ROOT / "build" / "ziggurat", help="ziggurat; default: build/ziggurat")
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs", help="folder of the documents")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    documents = {path.relative_to(arguments.docs.parent).as_posix(): (path, path.read_text(encoding="utf-8"))
                 for path in sorted(arguments.docs.rglob("*.md"))}
    mistakes = go_through(documents, Program(arguments.program).tables, arguments.write)
    for mistake in mistakes:
        print(mistake)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
