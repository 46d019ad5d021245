#!/usr/bin/env python3
"""Writes src/data/unicode_tables.inc: the code points of the categories L* and N*, and White_Space, as ranges.

Run it from anywhere: `python3 tools/make_unicode_tables.py`. The Unicode version is that of the Python that runs it.
"""
import pathlib
import sys
import unicodedata

# White_Space of PropList.txt, which unicodedata does not carry; str.isspace() differs (it counts U+001C..U+001F).
WHITE_SPACE = [(0x9, 0xD), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
               (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]


def ranges_of(major):
    ranges = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] != major:
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def table(name, ranges):
    lines = [f"constexpr CodeRange {name}[] = {{"]
    cells = [f"{{0x{first:X}, 0x{last:X}}}," for first, last in ranges]
    for i in range(0, len(cells), 6):
        lines.append("    " + " ".join(cells[i:i + 6]))
    return "\n".join(lines + ["};"])


def main():
    out = pathlib.Path(__file__).resolve().parent.parent / "src" / "data" / "unicode_tables.inc"
    out.write_text("\n".join([
        "// Written by tools/make_unicode_tables.py; do not edit.",
        f"// Unicode {unicodedata.unidata_version}: sorted ranges, both ends included.",
        "// clang-format off",
        table("kLetters", ranges_of("L")),
        table("kNumbers", ranges_of("N")),
        table("kWhiteSpace", WHITE_SPACE),
        "// clang-format on",
        "",
    ]))


if __name__ == "__main__":
    main()
