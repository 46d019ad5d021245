#!/usr/bin/env python3
"""Finds loops over what a temporary object owns, which ends before the first step of the loop:

    for (const T& one : Maker(...).all())        # C++20 keeps what all() returns, not the Maker

    check_temporaries.py [ROOT]       checks the tree (default: the one this script lies in)
    check_temporaries.py --self-test  proves on planted mistakes that each kind is found

GCC 12 warns of none of them, and Clang only of containers of the standard library. A function that returns by value may
be called so: give what it returns a name first. Exit code 0: clean; 1: such loops, one line each.
"""
import pathlib
import re
import sys

FOLDERS = ("include", "src", "io", "kernels", "tests", "bench", "tools")
ENDINGS = {".cpp", ".hpp", ".cu", ".cuh", ".h"}


def closing(text, at):
    """The place of the bracket that closes the one at `at`; -1: there is none."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def without_words(text):
    """The text without what comments and quotes say, of the same length and with the same lines."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


def range_of(head):
    """What the loop goes over, of the text between its brackets; empty: it is none over a range."""
    depth = 0
    for i, c in enumerate(head):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c == ";":
            head = head[i + 1:]  # `for (T x = f(); y : range)`
            return range_of(head)
        if depth == 0 and c == ":" and head[i - 1:i] != ":" and head[i + 1:i + 2] != ":":
            return head[i + 1:].strip()
    return ""


# Members that return by value in every type that has them.
BY_VALUE = ("value_or", "substr")


def is_of_temporary(expression):
    """Whether it calls a member of what a call, or a list in braces, has made: `f(x).g()`, `T{x}.g()`."""
    match = re.match(r"(?:\w|::)+(?:<[^()]*>)?\s*(?=[({])", expression)
    if not match:
        return False
    end = closing(expression, match.end())
    member = re.match(r"\s*\.\s*(\w+)\s*\(", expression[end + 1:]) if end >= 0 else None
    return member is not None and member.group(1) not in BY_VALUE


def mistakes_in(text):
    """The lines of such loops, with what they go over."""
    plain = without_words(text)
    for match in re.finditer(r"\bfor\s*\(", plain):
        end = closing(plain, match.end() - 1)
        over = range_of(plain[match.end():end]) if end >= 0 else ""
        if is_of_temporary(over):
            yield plain.count("\n", 0, match.start()) + 1, " ".join(over.split())


def self_test():
    planted = ["for (auto& x : List(a, b).all()) f();", "for (const A::B& x : c::List{a}.all())\n  f();",
               "for (int i = 0; auto x : make<int>(i).values()) {}", "for (auto x :\n     list_of(a)\n         .all()) {}"]
    sound = ["for (auto x : list.all()) {}", "for (auto x : make(a)) {}", "for (int i = f(); i < n(a).b(); ++i) {}",
             "for (auto x : {f(a).b(), 2}) {}", "for (auto x : f(a).member) {}", "// for (auto x : f(a).b()) {}",
             "for (auto& [k, v] : json.items()) {}", "for (auto x : f(a).value_or(std::vector<int>{})) {}", 'for (auto x : names) g("for (a : f(b).c())");']
    for text in planted:
        assert len(list(mistakes_in(text))) == 1, text
    for text in sound:
        assert not list(mistakes_in(text)), text
    print(f"{len(planted)} planted mistakes found, {len(sound)} sound loops let pass")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2])
    files = sorted(f for folder in FOLDERS for f in (root / folder).rglob("*") if f.suffix in ENDINGS)
    found = [(file.relative_to(root), line, over) for file in files for line, over in mistakes_in(file.read_text())]
    for file, line, over in found:
        print(f"{file}:{line}: the loop goes over {over}, whose object has ended: give it a name first")
    print(f"{len(files)} files, {len(found)} mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
