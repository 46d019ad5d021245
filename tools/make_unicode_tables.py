#!/usr/bin/env python3
"""Writes src/data/unicode_tables.inc: general categories, white space, combining classes and canonical decompositions.

Run it from anywhere: `python3 tools/make_unicode_tables.py`. The Unicode version is that of the Python that runs it.
"""
import pathlib
import sys
import unicodedata

# White_Space of PropList.txt, which unicodedata does not carry; str.isspace() differs (it counts U+001C..U+001F).
WHITE_SPACE = [(0x9, 0xD), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
               (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn").split()


def runs_of(value_of):
    """[count, value] of all code points in order."""
    runs = []
    for code in range(sys.maxunicode + 1):
        value = value_of(chr(code))
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return runs


def decompositions():
    """(code, first, second, whether the pair composes); second is 0 for one character."""
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if parts and not parts[0].startswith("<"):
            first, second = (int(p, 16) for p in (parts + ["0"])[:2])
            composes = len(parts) == 2 and unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(code)
            yield code, first, second, int(composes)


def table(type_name, name, cells):
    lines, line = [f"constexpr {type_name} {name}[] = {{"], "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > 110:
            lines.append(line)
            line = "   "
        line += f" {cell},"
    return "\n".join(lines + [line, "};"])


def main():
    categories = runs_of(lambda c: CATEGORIES.index(unicodedata.category(c)))
    classes = runs_of(unicodedata.combining)
    out = pathlib.Path(__file__).resolve().parent.parent / "src" / "data" / "unicode_tables.inc"
    out.write_text("\n".join([
        "// Written by tools/make_unicode_tables.py; do not edit.",
        f"// Unicode {unicodedata.unidata_version}.",
        "// clang-format off",
        "// General categories of all code points in order: 32 * (code points in a row) + category.",
        table("std::uint32_t", "kCategoryRuns", (str(32 * n + c) for n, c in categories)),
        "// Canonical combining classes in the same way: 256 * (code points in a row) + class.",
        table("std::uint32_t", "kCombiningRuns", (str(256 * n + c) for n, c in classes)),
        "// White_Space: ranges, both ends included.",
        table("CodeRange", "kWhiteSpace", (f"{{0x{a:X}, 0x{b:X}}}" for a, b in WHITE_SPACE)),
        "// Canonical decompositions: a code point, its one or two parts, and whether the parts compose to it.",
        table("Decomposition", "kDecompositions",
              (f"{{0x{c:X}, 0x{a:X}, 0x{b:X}, {k}}}" for c, a, b, k in decompositions())),
        "// clang-format on",
        "",
    ]))


if __name__ == "__main__":
    main()
