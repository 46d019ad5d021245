#!/usr/bin/env python3
"""Runs what the documents of this tree name, with tiny settings, so that no documented command breaks unseen.

    documented_commands.py table [--build DIR]       documents against the table, and every option against its program
    documented_commands.py run NAME [--build DIR]    the commands of one row of the table
    documented_commands.py list                      the names of the rows that are run
    documented_commands.py self-test                 proves on planted mistakes that each kind is found

documents.py finds the commands, documented_rows.py is the table: which commands there are, and how each is run here, or
why it is not. What is run is made from the documented text, so that an option that no longer exists fails. Each row
runs in a folder of its own, which looks like the tree, and is removed at the end.

Exit code 0: all right; 1: mistakes, one line each; 77: a row needs what this machine does not have.
"""
import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import documents
from documented_rows import HELPS, ROWS, Row

ROOT = pathlib.Path(__file__).resolve().parents[2]
MISTAKES, SKIPPED = 1, 77


def matches(pattern, text):
    """Whether the text is that of the pattern, in which `*` stands for any text."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text) is not None


def row_of(command, rows):
    """The first row that has the command; None if there is none."""
    return next((row for row in rows if any(matches(p, command.text) for p in row.commands)), None)


class Folder:
    """A folder that looks like the tree after a build, in which commands can be run: files are copied, since scripts
    look for things beside themselves, and what is written stays in here; programs are links into the build folder."""

    def __init__(self, root, build, name):
        self.root, self.build = root, build
        base = build / "tests" / "documented"
        base.mkdir(parents=True, exist_ok=True)
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
        ignored = shutil.ignore_patterns("results", "__pycache__", "*.cpp", "*.hpp", "*.txt", "*.safetensors")
        for folder in ("bench", "tools", "tests/tools", "tests/reference"):
            if (root / folder).is_dir():
                shutil.copytree(root / folder, self.path / folder, ignore=ignored)
        made = "bench/results build/bench build/tests drives/nvme0 drives/nvme1 home src/data unseen"
        for folder in made.split():
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        for name in ("configs", "docs"):
            if (root / name).is_dir():
                shutil.copytree(root / name, self.path / name)
        if (root / "README.md").exists():
            shutil.copy(root / "README.md", self.path)
        programs = [build / "ziggurat", *(build / "bench").glob("bench_*"), *(build / "tests").glob("zg_test_gpu*")]
        for program in programs:
            if program.is_file() and os.access(program, os.X_OK):
                os.symlink(program, self.path / "build" / program.relative_to(build))

    def environment(self, unseen=()):
        """With our programs in the path, and modules of Python that cannot be imported."""
        for module in unseen:
            file = self.path / "unseen" / f"{module}.py"
            file.write_text(f'raise ImportError("{module} is hidden from this run")\n')
        paths = [f"{self.path}/build", f"{self.path}/build/bench", os.environ.get("PATH", "")]
        return dict(os.environ, PATH=":".join(paths), PYTHONPATH=f"{self.path}/unseen", HOME=f"{self.path}/home",
                    PYTHON=sys.executable, PYTHONDONTWRITEBYTECODE="1")

    def here(self, text):
        """A text whose places are those of this folder."""
        for drive in ("nvme0", "nvme1"):
            text = text.replace(f"/mnt/{drive}", str(self.path / "drives" / drive))
        for name, path in (("{root}", self.root), ("{build}", self.build), ("{here}", self.path)):
            text = text.replace(name, str(path))
        return text

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)


def with_settings(words, settings):
    """The words with other values of these options; one that is not there is added. True: an option without a value."""
    words = list(words)
    for option, value in settings.items():
        if option in words:
            at = words.index(option)
            if value is not True:
                words[at + 1] = value
        else:
            words += [option] if value is True else [option, value]
    return words


def words_to_run(row, command):
    """The words of a documented command as the row has it run. Throws ValueError when they cannot be told."""
    words = []
    for word in command.words:
        for documented, real in row.replace.items():
            word = real if word == documented else word
        words.append(word)
    words = with_settings(words, row.set) + shlex.split(row.more)
    if any(re.fullmatch(r"[A-Z][A-Z_]*|\[.*|.*\.\.\.", word) for word in words):
        raise ValueError(f"placeholders are left in: {shlex.join(words)}")
    return words


def runs_of(row, found):
    """What is run for a row, as lists of words: each of its documented commands once, or what stands for them."""
    runs = [shlex.split(text) for text in row.instead]
    if not row.instead and not row.why:
        for command in found:
            words = words_to_run(row, command)
            if words not in runs:
                runs.append(words)
    return runs


def launch(folder, words, row, limit):
    """Runs one command; (exit code, all that it says). One that takes too long is ended, with all that it started: its
    code is None."""
    words = [folder.here(word) for word in words]
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    place = folder.path / row.directory
    if words[0].endswith(".sh") and not pathlib.Path(words[0]).is_absolute():
        words[0] = str(folder.path / words[0])
    process = subprocess.Popen(words, cwd=place, env=folder.environment(row.unseen), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True)
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        text, _ = process.communicate()
        return None, text
    return process.returncode, text


def uring_works(folder):
    words = "ziggurat io-bench --path /mnt/nvme0 --size 1MiB --seconds 0 --backend io_uring".split()
    return launch(folder, words, Row("needs", ("",)), 30)[0] == 0


def run_row(row, found, root, build, say=print):
    """Runs a row in a folder of its own. Returns the exit code for this program."""
    folder = Folder(root, build, row.name)
    try:
        for name, text in row.files.items():
            path = folder.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(folder.here(text))
            path.chmod(0o755)
        if row.needs == "io_uring" and not uring_works(folder):
            say(f"{row.name}: skipped, since io_uring does not work here")
            return SKIPPED
        try:
            runs = runs_of(row, found)
        except ValueError as mistake:
            say(f"{row.name}: {mistake}")
            return MISTAKES
        output = ""
        steps = [(shlex.split(text), 0) for text in row.before] + [(words, row.code) for words in runs]
        for words, code in steps:
            begin = time.monotonic()
            got, text = launch(folder, words, row, row.seconds)
            output += text
            say(f"+ {shlex.join(words)}    ({time.monotonic() - begin:.1f} s)")
            if got != code:
                where = ", ".join(sorted({c.place for c in found}))
                ended = f"did not end within {row.seconds} s" if got is None else f"ended with {got}, not {code}"
                say(f"{text.rstrip()}\n{row.name}: {ended}; documented in {where}: {shlex.join(words)}")
                return MISTAKES
        for expected in row.expect:
            if not re.search(expected, output):
                say(f"{output.rstrip()}\n{row.name}: nothing that it says matches {expected}")
                return MISTAKES
        left = [str(p.relative_to(folder.path)) for p in (folder.path / "drives").glob("*/*")]
        if left:
            say(f"{row.name}: left behind on the drives: {', '.join(left)}")
            return MISTAKES
        return 0
    finally:
        folder.remove()


class Programs:
    """What each program knows, by its own help."""

    def __init__(self, root, build):
        self.root, self.folder, self.known = root, Folder(root, build, "help"), {}

    def help(self, program):
        """What the program says when asked for help, or a text that names its options where it cannot be asked; None if
        there is neither."""
        if program not in self.known:
            self.known[program] = self.ask(program)
        return self.known[program]

    def ask(self, program):
        how = HELPS.get(program, f"{program} --help")
        if how.startswith("source "):
            path = self.root / how.split()[1]
            text = path.read_text(encoding="utf-8") if path.exists() else None
            return text and options_of_source(text)
        texts = []
        for one in how.split(" ; "):
            if one.startswith("ziggurat") and not (self.folder.path / "build/ziggurat").exists():
                return None  # that of somebody else is not asked
            try:
                code, text = launch(self.folder, shlex.split(one), Row("help", ("",)), 60)
            except OSError:
                return None
            if code != 0 and program != "cmake":  # which shows its help to whoever asks wrongly
                return None
            texts.append(text)
        return "\n".join(texts)

    def program_of(self, command):
        """The program whose options a command's are: `ziggurat io-bench` and its like count as one."""
        words = command.words
        if words[0] in ("python", "python3", "venv/bin/python") and len(words) > 1 and words[1].endswith(".py"):
            words = words[1:]
        first = words[0]
        if first in ("ziggurat", "build/ziggurat"):
            return " ".join(["ziggurat"] + [word for word in words[1:2] if re.fullmatch(r"[a-z-]+", word)])
        name = first.rsplit("/", 1)[-1]
        return name if name in HELPS else first

    def mistakes_in(self, command):
        """Options of the command that its program does not know, as texts."""
        if not command.options:
            return []
        program = self.program_of(command)
        if program == "cmake":
            return self.mistakes_of_cmake(command)
        text = self.help(program)
        if text is None:
            return [f"{command.place}: {program} does not say which options it has: {command.text}"]
        mistakes = [f"{command.place}: {program} has no option {option}: {command.text}" for option in command.options
                    if not knows(text, option)]
        # What follows after -- goes to the program that trains.
        if " -- " in command.text:
            rest = documents.Command(command.place, "ziggurat train " + command.text.split(" -- ", 1)[1], False)
            mistakes += self.mistakes_in(rest)
        return mistakes

    def mistakes_of_cmake(self, command):
        lists = "\n".join(path.read_text(encoding="utf-8") for path, _ in documents.files(self.root)
                          if path.name == "CMakeLists.txt")
        mistakes = []
        for word in command.words:
            if name := re.match(r"-D(\w+)=", word):
                if not re.search(rf"\b{name.group(1)}\b", lists) and not name.group(1).startswith("CMAKE_"):
                    mistakes.append(f"no CMakeLists.txt asks for {name.group(1)}")
            elif word.startswith("--") and not knows(self.help("cmake"), word):
                mistakes.append(f"cmake has no option {word}")
        if "--preset" in command.words:
            preset = command.words[command.words.index("--preset") + 1]
            if f'"name": "{preset}"' not in (self.root / "CMakePresets.json").read_text(encoding="utf-8"):
                mistakes.append(f"there is no preset {preset}")
        return [f"{command.place}: {m}: {command.text}" for m in mistakes]

    def close(self):
        self.folder.remove()


def knows(text, option):
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


def options_of_source(text):
    """The options that a program's source names where it reads them: of a program that cannot be asked here."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    found = re.findall(r'add_argument\("(--?[\w-]+)"', code)
    found += [f"--{name}" for name in re.findall(r'\{"([a-z][\w-]*)", *[01],', code)]  # of getopt_long
    for letters in re.findall(r'getopt(?:_long)?\([^;)]*?"([a-zA-Z:]+)"', code):
        found += [f"-{letter}" for letter in letters if letter != ":"]
    return "\n".join(found)


def all_commands(root, programs, helps=True):
    """Of the tree's documents, and of the examples that the program's own help gives."""
    found = documents.commands(root)
    for name in [n for n in HELPS if n == "ziggurat" or n.startswith("ziggurat ")] if helps else []:
        text = programs.help(name)
        if text is not None:
            found += documents.of_text(f"{name} --help", text)
    return found


def table_mistakes(found, rows):
    """Where documents and table do not agree, as texts."""
    mistakes, by_row = [], {row.name: [] for row in rows}
    for command in found:
        row = row_of(command, rows)
        if row is None:
            mistakes.append(f"{command.place}: in no row of the table (tests/tools/documented_rows.py): {command.text}")
        else:
            by_row[row.name].append(command)
    for row in rows:
        commands = by_row[row.name]
        if not commands:
            mistakes.append(f"table, row {row.name}: no document names a command like: {'; '.join(row.commands)}")
            continue
        for pattern in row.commands:
            if not any(matches(pattern, c.text) for c in commands):
                mistakes.append(f"table, row {row.name}: no document names a command like: {pattern}")
        for word in row.replace:
            if not any(word in c.words for c in commands):
                mistakes.append(f"table, row {row.name}: no document has the word {word}, which it replaces")
    names = [row.name for row in rows]
    mistakes += [f"table: there are two rows {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    return mistakes


def is_run(row):
    return bool(not row.why or row.instead)


def check_table(root, build, rows):
    programs = Programs(root, build)
    try:
        found = all_commands(root, programs)
        mistakes = table_mistakes(found, rows)
        for command in found:
            row = row_of(command, rows)
            if row and not row.foreign:
                mistakes += programs.mistakes_in(command)
        everything = "\n".join(text for text in (programs.help(name) for name in HELPS) if text)
        mentioned = documents.options(root)
        mistakes += [f"{place}: no program of this tree has the option {option}" for place, option in mentioned
                     if not knows(everything, option)]
    finally:
        programs.close()
    for mistake in mistakes:
        print(mistake)
    run = sum(is_run(row) for row in rows)
    print(f"{len(found)} commands and {len(mentioned)} options by themselves; {len(rows)} rows, {run} of them run; "
          f"{len(mistakes)} mistakes")
    return MISTAKES if mistakes or not found else 0


def run_named(name, root, build, rows):
    row = next((r for r in rows if r.name == name), None)
    if row is None or not is_run(row):
        print(f"no row of the table that is run is called {name}")
        return MISTAKES
    programs = Programs(root, build)
    try:
        helps = any(p.startswith("ziggurat") for p in row.commands)  # which names itself alone
        found = [c for c in all_commands(root, programs, helps) if row_of(c, rows) is row]
    finally:
        programs.close()
    if not found:
        print(f"{name}: no document names a command like: {'; '.join(row.commands)}")
        return MISTAKES
    return run_row(row, found, root, build)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "run", "list", "self-test"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="the build folder (default: build)")
    args = parser.parse_args(arguments)
    build = args.build.resolve()
    if args.what == "table":
        return check_table(ROOT, build, ROWS)
    if args.what == "run":
        return run_named(args.name, ROOT, build, ROWS)
    if args.what == "list":
        print("\n".join(row.name for row in ROWS if is_run(row)))
        return 0
    import documented_self_test
    return documented_self_test.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
