"""The commands that the documents of this tree name, and the words that each is made of.

A document is a Markdown file, the docstring of a Python program, the comment at the head of a program, a script or a
configuration, or what the program gives as examples when it is asked for its help. A command is a line of an indented
or fenced block, or an inline `code`, whose first word is a program of this tree, or one of the tools that build it.
"""
import ast
import os
import pathlib
import re
import shlex

# Programs of other people that a command may begin with.
TOOLS = {"cmake", "ctest", "ninja", "python", "python3", "mpirun", "kill", "cc", "taskset", "venv/bin/pip",
         "venv/bin/python"}
# Programs that documents beside them name without their folder.
BESIDE = {"make_reference.py", "make_optimizers.py", "make_ranks.py", "make_parts.py", "make_families.py",
          "load_family.py", "pytorch_gpt2.py", "pytorch_gpu.py", "check_layers.py", "check_temporaries.py",
          "documented_commands.py", "io_stream", "store_stream", "store_c"}
# A block in one of these languages holds no commands.
OTHER_LANGUAGES = {"cpp", "c", "json", "cmake", "python"}


class Command:
    """One command: where it is, its text in single spaces, its words without quotes, and the options among them."""

    def __init__(self, place, text, inline):
        self.place, self.inline = place, inline
        self.text = " ".join(text.split())
        try:
            self.words = shlex.split(self.text)
        except ValueError:  # a quote that is not closed: of a synopsis
            self.words = self.text.split()

    @property
    def options(self):
        """The options that it names, without their values; `[--seed S]` of a synopsis counts as well."""
        return [word.split("=")[0] for word in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", self.text.split(" -- ")[0])]


def program_of(text):
    """The first word of a command, if it is a program that a document of this tree may name; else None."""
    words = text.split()
    if not words:
        return None
    first = words[0]
    if first in TOOLS or first == "ziggurat" or re.fullmatch(r"bench_[a-z_]+", first) or first in BESIDE:
        return first
    if re.match(r"(OUT_DIR|/tmp/\w+)/", first):
        return first
    if re.fullmatch(r"build/[\w./-]+|(bench|tools|tests)/[\w./-]+\.(py|sh)", first):
        return first
    return None


def without_comment(line):
    """A line of a block up to what is said about it: after `#`, or after three spaces, which no command has."""
    line = re.split(r"\s#(?:\s|$)", line)[0]
    return re.split(r"(?<=\S) {3,}(?=\S)", line)[0].rstrip()


def parts_of(line):
    """The commands of one line, which `&&` or `;` joins where they are in no brackets and no quotes."""
    depth, quote, part, parts = 0, "", "", []
    for piece in re.split(r"(\s&&\s|\s;\s|[\[\]()\"'])", line):
        if quote:
            quote = "" if piece == quote else quote
        elif piece in ('"', "'"):
            quote = piece
        elif piece in ("[", "("):
            depth += 1
        elif piece in ("]", ")"):
            depth -= 1
        elif depth == 0 and piece.strip() in ("&&", ";"):
            parts.append(part)
            part = ""
            continue
        part += piece
    return [re.split(r" \| jq ", p.strip())[0] for p in parts + [part]]  # jq only prints a part of what the other says


def commands_of_block(place, first_line, lines):
    """Of lines that stand together; one that is indented further than a command goes on with it."""
    found, current, depth = [], None, 0
    for number, line in enumerate(lines, first_line):
        indent = len(line) - len(line.lstrip())
        text = without_comment(line.strip()).removesuffix("\\")
        if not text:
            current = None
        elif program_of(text) and not (current and indent > depth + 8):
            current, depth = [f"{place}:{number}", text], indent
            found.append(current)
        elif current and indent > depth:
            current[1] += " " + text
        else:
            current = None
    return [Command(where, part, False) for where, text in found for part in parts_of(text) if program_of(part)]


def commands_of_inline(place, first_line, text):
    """Of `code` within a paragraph, which may be broken over lines."""
    found = []
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        line = first_line + text.count("\n", 0, match.start())
        parts = parts_of(" ".join(match.group(1).split()))
        found += [Command(f"{place}:{line}", part, True) for part in parts if program_of(part)]
    return found


def of_list(prose):
    """Whether these lines begin a point of a list, which goes on indented."""
    return bool(prose and re.match(r"\s*([-*]|\d+\.) ", prose[0]))


def of_text(place, text, first_line=1):
    """Of a text in Markdown, or in the form that docstrings and comments take: blocks are indented by two or more."""
    found, prose, block, fence, start = [], [], [], None, 0

    def end_prose(number):
        found.extend(commands_of_inline(place, number - len(prose), "\n".join(prose)))
        prose.clear()

    def end_block():
        found.extend(commands_of_block(place, start, block))
        block.clear()

    lines = text.split("\n")
    for number, line in enumerate(lines, first_line):
        if line.strip().startswith("```"):
            if fence is None:
                end_prose(number)
                end_block()
                fence, start = line.strip()[3:], number + 1
            else:
                if fence in OTHER_LANGUAGES:
                    block.clear()
                end_block()
                fence = None
        elif fence is not None:
            block.append(line)
        elif block and not line.strip() or line.startswith("  ") and (block or not of_list(prose)):
            if not block:
                end_prose(number)
                start = number
            block.append(line)
        else:
            end_block()
            prose.append(line)
            if not line.strip():
                end_prose(number + 1)
    end_prose(first_line + len(lines))
    end_block()
    return found


def head_comment(text, mark):
    """The comment at the head of a file, as text whose lines keep their numbers."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("#!"):
            lines.append("")
        elif line.startswith("/*"):
            lines.append(line[2:].removeprefix(" "))
        elif line.startswith(mark):
            lines.append(line[len(mark):].removeprefix(" "))
        elif line.strip():
            break
    return "\n".join(lines)


def docstring(text):
    """Of a Python program, with its line."""
    module = ast.parse(text)
    return (ast.get_docstring(module, clean=False) or "", module.body[0].lineno if module.body else 1)


def files(root):
    """(path, place below the root) of the tree's files, but for those of build folders and what runs leave."""
    for folder, below, names in os.walk(root):
        if "CMakeCache.txt" in names:
            names, below[:] = [], []
        others = ("build", "runs", "venv") if folder == str(root) else ()
        below[:] = sorted(n for n in below if not n.startswith(".") and n not in others)
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            yield path, path.relative_to(root).as_posix()


def documents(root):
    """(place, text, first line) of every document of the tree."""
    for path, place in files(pathlib.Path(root)):
        if path.suffix == ".md":
            yield place, path.read_text(encoding="utf-8"), 1
        elif path.suffix == ".py":
            text, line = docstring(path.read_text(encoding="utf-8"))
            yield place, text, line
        elif path.suffix == ".sh":
            yield place, head_comment(path.read_text(encoding="utf-8"), "#"), 1
        elif path.suffix == ".cpp" and place.startswith(("bench/", "tools/")) or place.startswith("configs/"):
            yield place, head_comment(path.read_text(encoding="utf-8"), "//"), 1
        elif path.suffix == ".c" and place.startswith("tools/examples/"):
            yield place, head_comment(path.read_text(encoding="utf-8"), " *"), 1


def commands(root):
    """All commands of the tree's documents, in their order."""
    return [command for place, text, line in documents(root) for command in of_text(place, text, line)]


def options(root):
    """(place, option) of each inline `--option` without a program before it, in the Markdown files of the tree."""
    found = []
    for place, text, _ in documents(root):
        for match in re.finditer(r"(?<!`)`(--[a-z][\w-]*)[^`]*`(?!`)", text) if place.endswith(".md") else ():
            found.append((f"{place}:{text.count(chr(10), 0, match.start()) + 1}", match.group(1)))
    return found
