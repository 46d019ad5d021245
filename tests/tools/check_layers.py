#!/usr/bin/env python3
"""Walks the includes of include/, src/, kernels/ and io/ and fails on an arrow that points up.

    check_layers.py [ROOT]       checks the tree (default: the one this script lies in)
    check_layers.py --self-test  proves on planted mistakes that each kind is found

Exit code 0: clean; 1: arrows that point where they must not, one line each.
"""
import pathlib
import re
import sys
import tempfile

# Who may include whom: the layers from the bottom to the top, each with the areas below it that it may use. An area
# may always include itself. A header outside of include/ziggurat is private to its area; but those of kernels/ are what
# the areas that use kernels call.
LAYERS = [
    ("base", []),
    ("kernels", ["base"]),
    ("io", ["base"]),
    ("device", ["base", "kernels", "io"]),
    ("comm", ["base", "kernels", "device"]),
    ("store", ["base", "io", "device"]),
    ("optim", ["base", "kernels"]),
    ("model", ["base", "kernels", "device", "comm"]),
    ("data", ["base", "io"]),
    ("config", ["base", "io", "optim", "model"]),
    ("step", ["base", "model", "optim", "store", "comm", "device"]),
    ("engine", ["base", "model", "optim", "store", "comm", "device", "step"]),
    ("plan", ["base", "device", "store", "model", "step"]),
    ("checkpoint", ["base", "kernels", "io", "device", "store", "optim", "model", "step", "engine"]),
    ("train", ["base", "kernels", "io", "device", "comm", "store", "optim", "model", "data", "config", "step", "engine", "plan", "checkpoint"]),
    ("cli", ["base", "io", "device", "comm", "store", "data", "config", "plan", "checkpoint", "train"]),
    ("python", ["base", "kernels", "io", "device", "store", "optim", "config", "train"]),
]
RANK = {area: rank for rank, (area, _) in enumerate(LAYERS)}
ALLOWED = {area: set(below) for area, below in LAYERS}

# Libraries that one area hides from all others.
OWNERS = [
    (re.compile(r"liburing|libaio|xxhash"), {"io"}),
    (re.compile(r"oneapi/|dnnl"), {"kernels"}),
    (re.compile(r"hwy/"), {"kernels"}),
    (re.compile(r"cuda|nccl|cublas"), {"kernels", "device", "comm"}),
    (re.compile(r"mpi\.h"), {"comm"}),
    (re.compile(r"boost/"), {"base"}),
    (re.compile(r"CLI/"), {"cli"}),
    (re.compile(r"spdlog/"), {"base"}),
]

# A header for others that lies above the areas' folders, and the area that it belongs to.
TOP_HEADERS = {"include/ziggurat/ziggurat.h": "store"}

# Headers of plain values: any area may include them, since they include nothing but base and each other, and so bring
# nothing of their area along. A configuration is made of such values.
VALUES = {
    "include/ziggurat/data/options.hpp",
    "include/ziggurat/device/options.hpp",
    "include/ziggurat/step/options.hpp",
    "include/ziggurat/kernels/types.hpp",
    "include/ziggurat/store/options.hpp",
}

FOLDERS = ["include/ziggurat", "src", "kernels", "io"]
ENDINGS = {".hpp", ".h", ".cpp", ".c", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def area_of(path):
    """The area of a file, from its path below the root; None where there is none."""
    if path in TOP_HEADERS:
        return TOP_HEADERS[path]
    parts = pathlib.PurePosixPath(path).parts
    if parts[:2] == ("include", "ziggurat"):
        parts = parts[2:]
    elif parts[0] == "src":
        parts = parts[1:]
    return parts[0] if len(parts) > 1 else None


def target_of(root, path, name):
    """The file below the root that an include names, or None for a library's."""
    beside = (root / path).parent / name
    for candidate in (beside, root / "include" / name, root / "src" / name, root / name):
        if candidate.is_file():
            try:
                return candidate.resolve().relative_to(root).as_posix()
            except ValueError:
                return None  # above the root
    return None


def mistake_in(root, path, name):
    """What is wrong with the file `path` including `name`; None if nothing is."""
    area = area_of(path)
    target = target_of(root, path, name)
    if target is None:
        if name.startswith("ziggurat/"):
            return "there is no such header"
        for pattern, owners in OWNERS:
            if pattern.match(name) and area not in owners:
                return f"this library is for {' and '.join(sorted(owners))} alone"
        return None
    other = area_of(target)
    if other not in RANK:
        return f"{target} belongs to no known area"
    public = target.startswith("include/")
    if path.startswith("include/") and not public:
        return "a public header includes a private one"
    if path in VALUES and other != "base" and target not in VALUES:
        return "a header of plain values includes base and its like alone"
    if other == area or target in VALUES:
        return None
    if not public and other != "kernels":
        return f"this header is private to {other}"
    if RANK[other] > RANK[area]:
        return f"points up: {area} lies below {other}"
    if other not in ALLOWED[area]:
        return f"{area} may use {', '.join(sorted(ALLOWED[area])) or 'nothing'}, not {other}"
    return None


def check(root):
    """All mistakes below the root as texts, and the number of includes looked at."""
    root = root.resolve()
    mistakes, looked_at = [], 0
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in ENDINGS or not file.is_file():
                continue
            path = file.relative_to(root).as_posix()
            if area_of(path) not in RANK:
                mistakes.append(f"{path}: lies in no known area")
                continue
            # Newlines of comments stay, so that line numbers do.
            text = COMMENT.sub(lambda m: "\n" * m.group().count("\n"), file.read_text(encoding="utf-8"))
            for match in INCLUDE.finditer(text):
                looked_at += 1
                name = match.group(1) or match.group(2)
                mistake = mistake_in(root, path, name)
                if mistake:
                    line = text.count("\n", 0, match.start(1 if match.group(1) else 2)) + 1
                    mistakes.append(f"{path}:{line}: #include {name}: {mistake}")
    return mistakes, looked_at


CLEAN = {
    "include/ziggurat/base/a.hpp": "#include <string>\n",
    "include/ziggurat/kernels/types.hpp": '#include "ziggurat/base/a.hpp"\n',
    "include/ziggurat/kernels/other.hpp": '#include "ziggurat/kernels/types.hpp"\n',
    "include/ziggurat/step/options.hpp": '#include "ziggurat/kernels/types.hpp"\n',
    "include/ziggurat/config/c.hpp": '#include "ziggurat/step/options.hpp"\n',
    "include/ziggurat/store/s.hpp": '#include "ziggurat/base/a.hpp"\n// #include "ziggurat/train/t.hpp"\n',
    "include/ziggurat/train/t.hpp": '#include "ziggurat/store/s.hpp"\n',
    "include/ziggurat/ziggurat.h": "#include <stdint.h>\n",
    "src/store/s.cpp": '#include "ziggurat/store/s.hpp"\n#include "node.hpp"\n#include "store/node.hpp"\n',
    "src/store/node.hpp": '/*\n#include "ziggurat/train/t.hpp"\n*/\n#include <vector>\n',
    "kernels/host/k.cpp": '#include "kernels/host/k.hpp"\n#include "ziggurat/kernels/types.hpp"\n',
    "kernels/host/k.hpp": "#include <hwy/highway.h>\n",
    "io/i.cpp": "#include <liburing.h>\n#include <libaio.h>\n#include <xxhash.h>\n",
}
PLANTED = [  # file, line to plant, part of what must be said
    ("include/ziggurat/base/a.hpp", '#include "ziggurat/train/t.hpp"', "base lies below train"),
    ("src/store/s.cpp", '#include "ziggurat/train/t.hpp"', "store lies below train"),
    ("src/store/node.hpp", "  #  include <ziggurat/train/t.hpp>", "store lies below train"),
    ("kernels/host/k.hpp", '#include "ziggurat/store/s.hpp"', "kernels lies below store"),
    ("io/i.cpp", '#include "ziggurat/kernels/other.hpp"', "io may use base, not kernels"),
    ("src/store/s.cpp", '#include "ziggurat/kernels/other.hpp"', "store may use base, device, io, not kernels"),
    ("include/ziggurat/kernels/types.hpp", '#include "ziggurat/kernels/other.hpp"', "plain values"),
    ("include/ziggurat/step/options.hpp", '#include "ziggurat/store/s.hpp"', "plain values"),
    ("include/ziggurat/train/t.hpp", '#include "store/node.hpp"', "a public header includes a private one"),
    ("include/ziggurat/ziggurat.h", '#include "ziggurat/train/t.hpp"', "store lies below train"),
    ("include/ziggurat/other.h", "#include <string>", "no known area"),
    ("src/train/t.cpp", '#include "store/node.hpp"', "private to store"),
    ("src/train/t.cpp", '#include "ziggurat/store/gone.hpp"', "no such header"),
    ("src/train/t.cpp", "#include <liburing.h>", "io alone"),
    ("src/train/t.cpp", "#include <libaio.h>", "io alone"),
    ("src/store/s.cpp", "#include <xxhash.h>", "io alone"),
    ("src/news/n.cpp", "#include <string>", "no known area"),
]


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        def tree(name, files):
            for path, text in files.items():
                file = pathlib.Path(folder, name, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            return pathlib.Path(folder, name)

        mistakes, looked_at = check(tree("clean", CLEAN))
        assert not mistakes and looked_at == 18, (mistakes, looked_at)
        for number, (path, line, said) in enumerate(PLANTED):
            files = dict(CLEAN)
            files[path] = files.get(path, "") + line + "\n"
            mistakes, _ = check(tree(str(number), files))
            assert len(mistakes) == 1 and said in mistakes[0] and mistakes[0].startswith(path), (line, mistakes)
    print(f"{len(PLANTED)} planted mistakes, each found")


def main(arguments):
    if arguments == ["--self-test"]:
        self_test()
        return 0
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parents[2]
    mistakes, looked_at = check(root)
    for mistake in mistakes:
        print(mistake)
    print(f"{looked_at} includes, {len(mistakes)} mistakes")
    return 1 if mistakes or looked_at == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
