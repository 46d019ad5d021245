#!/usr/bin/env python3
"""Writes src/data/unicode_tables.inc: general categories, white space, combining classes and canonical decompositions;
and src/data/unicode_compat.inc: compatibility decompositions and small letters.

    venv/bin/pip install unicodedata2==16.0.0 tokenizers==0.23.3
    venv/bin/python tools/make_unicode_tables.py

Categories are those of Unicode 16, which Hugging Face's `tokenizers` splits texts by. Its normal form C is of an older
version of Unicode, in which later characters neither combine nor compose. The tables leave out what it does not know,
so that tokens are the same.
"""
import argparse
import pathlib
import sys

try:
    import unicodedata2 as unicodedata
    from tokenizers.normalizers import NFC, NFD, NFKD, Lowercase
except ImportError:  # --help must work all the same
    unicodedata = None

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


def normalised(form, text):
    """The text in normal form C or D as `tokenizers` has it, which takes no half of a surrogate pair."""
    return text if any(0xD800 <= ord(c) < 0xE000 for c in text) else form.normalize_str(text)


def combining(form, c):
    """The combining class, or 0 for a character that `tokenizers` does not move before one of class 240."""
    value = unicodedata.combining(c)
    return value if value == 240 or normalised(form, "\u0345" + c) == c + "\u0345" else 0


def decompositions(compose, decompose):
    """(code, first, second, whether the pair composes); second is 0 for one character."""
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if parts and not parts[0].startswith("<") and normalised(decompose, chr(code)) != chr(code):
            first, second = (int(p, 16) for p in (parts + ["0"])[:2])
            composes = len(parts) == 2 and normalised(compose, chr(first) + chr(second)) == chr(code)
            yield code, first, second, int(composes)


def table(type_name, name, cells):
    lines, line = [f"constexpr {type_name} {name}[] = {{"], "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > 110:
            lines.append(line)
            line = "   "
        line += f" {cell},"
    return "\n".join(lines + [line, "};"])


def replacements(form, same):
    """Code, count and codes of all characters that the form makes something else of than `same` does."""
    for code in range(sys.maxunicode + 1):
        text = normalised(form, chr(code))
        if text != same(chr(code)):
            yield from (code, len(text), *map(ord, text))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    categories = runs_of(lambda c: CATEGORIES.index(unicodedata.category(c)))
    compose, decompose = NFC(), NFD()
    classes = runs_of(lambda c: combining(decompose, c))
    out = pathlib.Path(__file__).resolve().parent.parent / "src" / "data" / "unicode_tables.inc"
    out.write_text("\n".join([
        "// Written by tools/make_unicode_tables.py; do not edit.",
        f"// Unicode {unicodedata.unidata_version}; normal form C as far as Hugging Face's tokenizers knows it.",
        "// clang-format off",
        "// General categories of all code points in order: 32 * (code points in a row) + category.",
        table("std::uint32_t", "kCategoryRuns", (str(32 * n + c) for n, c in categories)),
        "// Canonical combining classes in the same way: 256 * (code points in a row) + class.",
        table("std::uint32_t", "kCombiningRuns", (str(256 * n + c) for n, c in classes)),
        "// White_Space: ranges, both ends included.",
        table("CodeRange", "kWhiteSpace", (f"{{0x{a:X}, 0x{b:X}}}" for a, b in WHITE_SPACE)),
        "// Canonical decompositions: a code point, its one or two parts, and whether the parts compose to it.",
        table("Decomposition", "kDecompositions",
              (f"{{0x{c:X}, 0x{a:X}, 0x{b:X}, {k}}}" for c, a, b, k in decompositions(compose, decompose))),
        "// clang-format on",
        "",
    ]))
    (out.parent / "unicode_compat.inc").write_text("\n".join([
        "// Written by tools/make_unicode_tables.py; do not edit. As Hugging Face's tokenizers knows them.",
        "// clang-format off",
        "// Compatibility decompositions where they are not the canonical ones: a code point, how many it becomes, these.",
        table("char32_t", "kCompatible", (f"0x{c:X}" for c in replacements(NFKD(), lambda c: normalised(decompose, c)))),
        "// The small letters of others, in the same way.",
        table("char32_t", "kSmall", (f"0x{c:X}" for c in replacements(Lowercase(), lambda c: c))),
        "// clang-format on",
        "",
    ]))


if __name__ == "__main__":
    main()
