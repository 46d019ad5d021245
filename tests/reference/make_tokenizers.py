#!/usr/bin/env python3
"""Writes tests/reference/tokenizers/: small tokenizer.json files of each kind, and what Hugging Face's `tokenizers`
makes of some texts with them (cases.json).

    python3 -m venv venv
    venv/bin/pip install tokenizers==0.23.3
    venv/bin/python tests/reference/make_tokenizers.py [--kinds nfkc,whitespace]
    venv/bin/python tests/reference/make_tokenizers.py --large DIR [--kinds mistral,phi3] [--text FILE...]

With --kinds the other kinds' files stay, of which not all come out the same twice. The last writes 10 MB of text, or
what the files have, and their tokens, which zg_test_data compares where ZG_TOKENIZER_CASES names DIR.
"""
import argparse
import json
import pathlib
import random

try:
    from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                            trainers)
except ImportError:  # --help must work all the same
    Tokenizer = None

MARK = "\u2581"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
QWEN35 = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)"
          r"|\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?%s*%s+" % (UPPER, LOWER), r"[^\r\n\p{L}\p{N}]?%s+%s*" % (UPPER, LOWER)
O200K = f"{WORDS[0]}{CONTRACTIONS}?|{WORDS[1]}{CONTRACTIONS}?|" + r"\p{N}{1,3}" + TAIL
TEKKEN = f"{WORDS[0]}|{WORDS[1]}|" + r"\p{N}" + TAIL
DEEPSEEK = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

TRAINING = [
    "The quick brown fox jumps over the lazy dog, and the dog's answer is: they'll see.",
    "It isn't what you'd think; we've seen 1234 of 56789 things in 2024. I'M SURE HE'LL DO IT.",
    "for (int i = 0; i < 10; ++i) {\n\treturn std::max(a[i], b[i]);\n}\n\n",
    "Die Straße ist groß, über Ärger und Öl; l'été à la plage, ça va déjà.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Привет мир, привет!",
    "日本語のテキストと中文的文字以及한국어 텍스트가 있습니다. 日本語 日本語 中文 中文",
    "नमस्ते दुनिया यह हिन्दी है हिन्दी है", "مرحبا بالعالم هذا نص عربي هذا نص", "שלום עולם שלום",
    "  indented   text\t\twith  spaces\r\n\r\nand lines\n\n\nthe end  ",
]

TEXTS = [
    "", " ", "a", "\n", "Hello world", "Hello  world", " Hello world ", "the dog's they'LL we'Ve I'M x'S 'sure 'S",
    "12345678 1 22 333 4444", "٣٤٥ ½²", "a\n\n b\r\n\tc \n d", "   \n\n   x", "foo...bar!!\n\nbaz --\r\n",
    "camelCase HTTPServer XMLHttpRequest iOS ÀÉÎ éàü ǅungla", "日本語のテキスト 中文的文字 한국어 텍스트 123日本",
    "हिन्दी है क्षत्रिय", "e\u0301 vs \u00e9, \u1100\u1161\u11a8 \uac00\u11a8 A\u030a\u0323 q\u0307\u0323 \u212b",
    "مرحبا بالعالم", "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \ufe0f", "\u3000x\u00a0y\u2028z\u0085w",
    "zebra zebras a zebra", "<|a|>x<|a|> y <|b|>  \n z  <|c|>  w x<word>y <word> <word>. <word>word",
    "<|a|><|b|><|b|> <|a|", "héllo wörld ſ 's 'ſ ſt K", "\u2581x \u2581\u2581 y\u2581z", "tab\tsep\t\tx",
    "if a<b and b>c:\n    print(a)\n        pass\n", "\x00\x01\x1f\x7f", "a" * 70 + " " * 40 + "b" * 3,
    "\ufb01ne \uff21\uff22\uff23 \u2460\u00bd \u3392 \ufdfa \u00a8 \u1e9b\u0323 \u0130I\u03a3 \u2126 \u200b\u200cx\u200dy \uffa1\u3131",
    "pre-1990's \"quote\" (x) [y] {z} $5.00 50% #1 a_b c/d", "new  caf\u00e9 cafe\u0301 xcaf\u00e9x",
]


def byte_alphabet(training, size, split, normalizer=None):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = split
    if normalizer:
        t.normalizer = normalizer
    t.train_from_iterator(training, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.decoder = decoders.ByteLevel()
    return t


def byte_level(pattern, size, normalizer=None, behavior="isolated", invert=False):
    patterns = pattern if isinstance(pattern, tuple) else (pattern,)
    splits = [pre_tokenizers.Split(Regex(p), behavior, invert) for p in patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t = byte_alphabet(TRAINING * 3, size, pre_tokenizers.Sequence(splits + [bytes_]), normalizer)
    t.add_special_tokens(["<|a|>", "<|b|>"])
    return t


def with_marks(size, normalizer, split, **options):
    """Characters and U+2581, as SentencePiece's models have them."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, **options))
    t.normalizer = normalizers.Replace(" ", MARK)
    t.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", True)
    special = ["<unk>", "<s>", "</s>"]
    if options.get("byte_fallback"):
        special += [f"<0x{b:02X}>" for b in range(256)]
    t.train_from_iterator(TRAINING[:5] * 3, trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=90, show_progress=False))
    changed = json.loads(t.to_str())
    changed["added_tokens"] = changed["added_tokens"][:3]
    t = Tokenizer.from_str(json.dumps(changed))
    t.normalizer, t.pre_tokenizer = normalizer, split
    if normalizer is None:
        changed = json.loads(t.to_str())
        changed["normalizer"] = None
        t = Tokenizer.from_str(json.dumps(changed))
    if split is None:
        changed = json.loads(t.to_str())
        changed["pre_tokenizer"] = None
        t = Tokenizer.from_str(json.dumps(changed))
    t.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return t


def changed_model(t, change):
    """The tokenizer with its model's JSON changed in place."""
    root = json.loads(t.to_str())
    change(root["model"])
    return Tokenizer.from_str(json.dumps(root))


def llama3():
    t = byte_level(LLAMA3, 330)

    def change(model):
        model["ignore_merges"] = True
        del model["merges"][10:14]  # whole words that no merge makes any more
    t = changed_model(t, change)
    bos = processors.TemplateProcessing(single="<|a|> $A", special_tokens=[("<|a|>", t.token_to_id("<|a|>"))])
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return t


def llama2_normalizer():
    return normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])


def phi3():
    t = with_marks(420, llama2_normalizer(), None, byte_fallback=True)
    t.add_special_tokens([AddedToken("<|a|>", rstrip=True), AddedToken("<|b|>", lstrip=True),
                          AddedToken("<|c|>", lstrip=True, rstrip=True)])
    t.add_tokens([AddedToken("<word>", single_word=True, normalized=False), AddedToken("zebra", normalized=False),
                  AddedToken("caf\u00e9", single_word=True, normalized=True), AddedToken("new  caf", normalized=True)])
    return t


def gemma():
    t = with_marks(420, normalizers.Replace(" ", MARK), pre_tokenizers.Split(" ", "merged_with_previous"),
                   byte_fallback=True)
    t.add_tokens([AddedToken(x, normalized=False) for x in ("\n\n", "\n\n\n", MARK * 2, "\t\t", "<|a|>")])
    return t


def qwen2():
    t = byte_level(QWEN2, 330, normalizers.NFC())
    t.add_tokens([AddedToken("cafe\u0301", normalized=True), AddedToken("zebra", single_word=True)])
    return t


def smollm():
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    return byte_alphabet(TRAINING * 3, 320, split)


def words(size, normalizer, split):
    """Characters of words alone, without a decoder: the tokenizers of the library's own first steps."""
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.normalizer, t.pre_tokenizer = normalizer, split
    t.train_from_iterator(TRAINING * 3, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=120, show_progress=False))
    t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False)
    return t


KINDS = {
    "gpt2": lambda: byte_alphabet(TRAINING * 3, 320, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2_prefix": lambda: byte_alphabet(TRAINING * 3, 320, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "smollm": smollm,
    "llama3": llama3,
    "cl100k": lambda: byte_level(CL100K, 330, behavior="removed", invert=True),
    "qwen2": qwen2,
    "qwen35": lambda: byte_level(QWEN35, 330, normalizers.NFC()),
    "o200k": lambda: byte_level(O200K, 330),
    "tekken": lambda: byte_level(TEKKEN, 330),
    "deepseek": lambda: byte_level(DEEPSEEK, 330),
    "llama2": lambda: with_marks(420, llama2_normalizer(), None, byte_fallback=True),
    "mistral": lambda: with_marks(420, None, pre_tokenizers.Metaspace(MARK, "first", False), byte_fallback=True),
    "metaspace": lambda: with_marks(200, None, pre_tokenizers.Metaspace(MARK, "always", True)),
    "gemma": gemma,
    "phi3": phi3,
    "nfkc": lambda: byte_level(r"\w+|[^\w\s]+|\s+", 330, normalizers.NFKC()),
    "whitespace": lambda: words(260, normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()]),
                                pre_tokenizers.Whitespace()),
    "whitespace_split": lambda: words(260, normalizers.NFD(), pre_tokenizers.WhitespaceSplit()),
}


def large_text(seed, size, everywhere=False):
    """Words of the texts above, characters of many scripts, or of all, and random bytes as far as they are text."""
    rng = random.Random(seed)
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE00),
              (0xE00, 0x1000), (0x1100, 0x1200), (0x1E00, 0x2070), (0x2070, 0x2C00), (0x3000, 0x3200),
              (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFB50), (0x10000, 0x10400), (0x1D400, 0x1D800),
              (0x1F000, 0x1FB00), (0x20000, 0x20400)]
    if everywhere:  # all planes that have characters, without surrogates and those for private use
        blocks += [(c, c + 0x80) for c in range(0, 0x32400, 0x80) if not 0xD800 <= c < 0xF900]
    words = [w for t in TRAINING + TEXTS for w in t.split(" ")]
    blanks = [" "] * 12 + ["  ", "\n", "\n\n", "\t", "", "   ", "\r\n"]
    parts, total = [], 0
    while total < size:
        kind = rng.random()
        if kind < 0.75:
            part = rng.choice(words) + rng.choice(blanks)
        elif kind < 0.95:
            first, last = rng.choice(blocks)
            part = "".join(chr(rng.randrange(first, last)) for _ in range(rng.randrange(1, 12)))
        else:
            part = rng.randbytes(rng.randrange(1, 40)).decode("utf-8", errors="replace")
        parts.append(part)
        total += len(part.encode())
    return "".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", metavar="DIR")
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the tokenizers")
    parser.add_argument("--text", nargs="+", type=pathlib.Path, metavar="FILE", help="in place of the random text")
    arguments = parser.parse_args()
    here = pathlib.Path(__file__).resolve().parent / "tokenizers"
    if arguments.large:
        out = pathlib.Path(arguments.large)
        out.mkdir(parents=True, exist_ok=True)
        text = ("".join(f.read_bytes().decode() for f in arguments.text) if arguments.text
                else large_text(1, arguments.bytes, everywhere=True))
        (out / "text").write_bytes(text.encode())
        for kind in arguments.kinds.split(","):
            file = here / f"{kind}.json"
            ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
            (out / f"{file.stem}.ids").write_bytes(b"".join(i.to_bytes(4, "little") for i in ids))
            print(file.stem, len(ids), "tokens")
        return
    here.mkdir(exist_ok=True)
    texts = TEXTS + [large_text(s, 200) for s in range(2, 8)]
    cases = {"texts": texts, "kinds": {}}
    for name, make in KINDS.items():
        file = here / f"{name}.json"
        if name in arguments.kinds.split(","):
            root = json.loads(make().to_str())
            if name == "tekken":  # as older files write merges
                root["model"]["merges"] = [" ".join(m) for m in root["model"]["merges"]]
            file.write_text(json.dumps(root, ensure_ascii=True, separators=(",", ":")) + "\n")
        tokenizer = Tokenizer.from_file(str(file))
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        cases["kinds"][name] = {"ids": ids, "document": tokenizer.encode("x").ids,
                                "decoded": [tokenizer.decode(i, skip_special_tokens=False) for i in ids]}
    (here / "cases.json").write_text(json.dumps(cases, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
