#!/usr/bin/env python3
"""Random tokenizers of Hugging Face's `tokenizers`: their tokens of random texts beside the program's.

    PYTHON tests/reference/random/random_texts.py build/ziggurat [--seeds N] [--first SEED] [--keep]

A seed draws the parts of a byte-pair tokenizer (normalizers, splits and their patterns, added tokens, byte fallback,
templates), trains it on a few lines, and texts of many scripts.  The program, which makes tokens when it plans a run,
must make the same ones, or refuse a part by its name.  Output and exit code are those of random_models.py.
"""

import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

try:
    import numpy as np
    from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                            trainers)
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

MARK = "\u2581"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = [
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s+", r"[0-9]{1,3}", r"\p{N}{1,3}", r"[\r\n]", r"[^\S\r\n]+", r"\w+|[^\w\s]+", r"[一-龥぀-ゟ゠-ヿ]+", r"\d", r" ?\S+",
]
LINES = ("The quick brown fox jumps over the lazy dog, isn't it? I'LL say we've 12345 reasons; x += 1.\n"
         "  def f(x):\n\treturn x**2  # comment\r\n\r\n"
         "Ünïcödé café naïve Straße ΑΒΓ αβγ Привет мир. 你好世界 こんにちは カタカナ 한국어 שלום مرحبا हिन्दी ไทย "
         "😀👍🏽👨‍👩‍👧 e\u0301 a\u030a \u00a0\u3000\u200b \ufeff \u2581x ½ ² Ⅷ ٣٤ <s> </s> [INST] hello world hello worlds "
         "100 1000 10000\n") * 3
LETTERS = [
    "abcdefghijklmnopqrstuvwxyzABC  ' ", " \t\n\r\u00a0\u3000\u2028\x0b\x0c\x85\u200b\ufeff", "0123456789²½Ⅷ٣٤०१",
    ".,;:!?'\"-_()[]{}<>/\\|@#$%^&*+=~`", "éüßñçøåÄÖÜſİıǅΩµ", "αβγΣσςПриветмир", "你好世界龥ぁァ가각힣ㄱ",
    "שלוםمرحباहिन्दी्ไทย", "\u0301\u0308\u030a\u0327\u0338\u0345\u05b0\u0f71\u0f72\u1100\u1161\u11a8",
    "😀👍🏽👨‍👩‍👧\U0001F1E9\U0001F1EA\U00020000\U0010FFFF\uE000\uFFFD\ufb01\u212b\u2126", "\u2581<s>▁<0x0A>", "\x00\x01\x7f\x1b",
]
ADDED = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "[INST]", "[/INST]", "<mask>", "hello", "the", " x", "é", "e\u0301",
         "ab", "abc", "bc", "\n", "  ", "\u2581\u2581", "<tool>", "123", "你", "😀", "x ", "</s>"]
BEHAVIORS = ["removed", "merged_with_previous", "merged_with_next", "contiguous"]


def random_text(r, names):
    out = []
    for _ in range(r.choice([1, 3, 8, 20])):
        k = r.random()
        if k < 0.15:
            out.append(r.choice(names))
        elif k < 0.3:
            at = r.randrange(len(LINES))
            out.append(LINES[at:at + r.randint(1, 30)])
        elif k < 0.35:
            code = r.randrange(0x110000)
            out.append("?" if 0xD800 <= code < 0xE000 else chr(code))
        elif k < 0.42:
            out.append(" " * r.randint(1, 5))
        else:
            letters = r.choice(LETTERS)
            out.append("".join(r.choice(letters) for _ in range(r.randint(1, 12))))
    return "".join(out)


def split(r):
    if r.random() < 0.2:
        return pre_tokenizers.Split(r.choice([" ", "\n", MARK, "a", "  ", "the"]), r.choice(["isolated"] + BEHAVIORS),
                                    r.random() < 0.1)
    return pre_tokenizers.Split(Regex(r.choice(PATTERNS)), r.choice(["isolated"] * 4 + BEHAVIORS), r.random() < 0.15)


def over_bytes(r):
    t = Tokenizer(models.BPE(ignore_merges=r.random() < 0.3, byte_fallback=r.random() < 0.1))
    t.normalizer = r.choice([None, None, None, normalizers.NFC(), normalizers.Sequence([normalizers.NFC()]),
                             normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")]),
                             normalizers.Replace("ß", "ss"), normalizers.Prepend("x")])
    level = pre_tokenizers.ByteLevel
    kind = r.randrange(5)
    if kind == 0:
        t.pre_tokenizer = level(add_prefix_space=r.random() < 0.4, use_regex=r.random() < 0.8)
    elif kind == 1:
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(r.random() < 0.6),
                                                   level(add_prefix_space=False, use_regex=r.random() < 0.7)])
    else:
        t.pre_tokenizer = pre_tokenizers.Sequence([split(r) for _ in range(r.randint(1, 3))] + [
            level(add_prefix_space=r.random() < 0.1, use_regex=r.random() < 0.2)])
    t.decoder = decoders.ByteLevel()
    return t


def over_characters(r, unknown, fallback):
    t = Tokenizer(models.BPE(fuse_unk=r.random() < 0.6, byte_fallback=fallback, ignore_merges=r.random() < 0.1,
                             **unknown))
    marks = normalizers.Replace(" ", MARK)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=r.choice(["always", "first", "never"]), split=r.random() < 0.5)
    kind = r.randrange(5)
    if kind == 0:
        t.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), marks])
    elif kind == 1:
        t.normalizer = marks
        t.pre_tokenizer = r.choice([None, pre_tokenizers.Split(" ", "merged_with_previous")])
    elif kind == 2:
        t.pre_tokenizer = metaspace
    elif kind == 3:
        t.normalizer = normalizers.NFC()
        t.pre_tokenizer = pre_tokenizers.Sequence([metaspace, split(r)])
    else:
        t.normalizer = normalizers.Sequence([normalizers.Replace("\u3000", " "), marks, normalizers.NFC()])
        if r.random() < 0.4:
            t.pre_tokenizer = pre_tokenizers.Digits(True)
    t.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    return t


def of_odd_parts(r, unknown):
    """Some of these must be refused."""
    affixes = {name: affix for name, affix in (("continuing_subword_prefix", "##"), ("end_of_word_suffix", "</w>"))
               if r.random() < 0.2}
    t = Tokenizer(models.BPE(fuse_unk=r.random() < 0.5, **affixes, **unknown))
    t.normalizer = r.choice([
        normalizers.NFKC(), normalizers.Lowercase(), normalizers.NFD(), normalizers.Strip(), normalizers.StripAccents(),
        None, normalizers.Replace(Regex("[0-9]"), "#"),
        normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])])
    t.pre_tokenizer = r.choice([
        pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(),
        pre_tokenizers.BertPreTokenizer(), None, pre_tokenizers.UnicodeScripts(), split(r),
        pre_tokenizers.Digits(False)])
    return t


def template(r, t):
    begin, end = (("<s>", t.token_to_id("<s>")), ("</s>", t.token_to_id("</s>")))
    bytes_ = processors.ByteLevel(trim_offsets=r.random() < 0.5)
    with_begin = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[begin])
    with_both = processors.TemplateProcessing(single="<s> $A </s>", pair="$A $B", special_tokens=[begin, end])
    with_end = processors.TemplateProcessing(single="$A </s>", pair="$A $B", special_tokens=[end])
    return r.choice([None, None, None, with_begin, with_begin, with_both, bytes_,
                     processors.Sequence([bytes_, with_end]), processors.RobertaProcessing(end, begin)])


def random_tokenizer(r):
    """Its style, itself, and names of tokens that texts should have."""
    style = r.choice(["bytes", "bytes", "characters", "characters", "odd"])
    fallback = style == "characters" and r.random() < 0.6
    unknown = {"unk_token": "<unk>"} if r.random() < 0.5 else {}
    t = {"bytes": lambda: over_bytes(r), "characters": lambda: over_characters(r, unknown, fallback),
         "odd": lambda: of_odd_parts(r, unknown)}[style]()
    special = ["<unk>", "<s>", "</s>"]
    if fallback and r.random() < 0.9:
        special += [f"<0x{b:02X}>" for b in range(256)]
    t.train_from_iterator([LINES], trainers.BpeTrainer(
        vocab_size=r.choice([350, 500, 700]) + len(special), special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if style == "bytes" else []))
    names = ["<s>", "</s>"]
    for _ in range(r.randint(0, 5)):
        names.append(r.choice(ADDED))
        token = AddedToken(names[-1], single_word=r.random() < 0.25, lstrip=r.random() < 0.25, rstrip=r.random() < 0.25,
                           normalized=r.random() < 0.5, special=r.random() < 0.5)
        (t.add_special_tokens if r.random() < 0.5 else t.add_tokens)([token])
    processor = template(r, t)
    if processor is not None:
        t.post_processor = processor
    return style, t, names


def write(r, t, path):
    """In either spelling of the merges."""
    t.save(str(path), pretty=r.random() < 0.5)
    root = json.loads(path.read_text())
    if r.random() < 0.3 and all(" " not in "".join(merge) for merge in root["model"]["merges"]):
        root["model"]["merges"] = [" ".join(merge) for merge in root["model"]["merges"]]
        path.write_text(json.dumps(root, ensure_ascii=r.random() < 0.5))


def tokens_of(program, directory, texts):
    """The program's tokens of each text; or what it says when it refuses."""
    (directory / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (directory / "run.json").write_text(json.dumps(dict(
        model=dict(arch="gpt2", n_layer=1, n_head=1, n_embd=8, n_positions=8), steps=1, output=dict(dir="run"),
        data=dict(train="texts.jsonl", validation=0, tokenizer={"file": "tokenizer.json"}, seq_len=2),
        train_batch_size=1)))
    done = subprocess.run([program, "train", "run.json", "--plan"], cwd=directory, capture_output=True, text=True,
                          timeout=120, errors="replace")
    if done.returncode != 0:
        return done.returncode, done.stderr.strip()[-400:]
    file = next((directory / "run").rglob("train.bin"))
    ids = np.fromfile(file, dtype=np.uint16).tolist()
    starts = np.fromfile(file.with_suffix(".docs"), dtype=np.int64)
    return 0, [ids[a:b] for a, b in zip(starts[:-1], starts[1:])]


def encoded(t, text):
    """None where `tokenizers` panics, as it does where added tokens that take blanks stand side by side."""
    try:
        return t.encode(text).ids
    except BaseException as error:  # pyo3's PanicException is no Exception
        if "Panic" not in type(error).__name__:
            raise
        return None


def agrees_with_itself(directory, text, ids):
    """Of added tokens that the normalizer makes equal, `tokenizers` takes another one each time."""
    again = (Tokenizer.from_file(str(directory / "tokenizer.json")) for _ in range(12))
    return all(encoded(t, text) == ids for t in again)


def one(seed, args):
    r = random.Random(seed)
    style, t, names = random_tokenizer(r)
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"zg-texts-{seed}-"))
    found = {"seed": seed, "style": style}
    write(r, t, directory / "tokenizer.json")
    t = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [random_text(r, names) for _ in range(60)] + ["", " ", "hello", "  hello", LINES]
    try:
        code, ours = tokens_of(args.program, directory, texts)
    except subprocess.TimeoutExpired:
        code, ours = -1, "hangs"
    if code == 2:
        found["refused"] = ours
    elif code != 0:
        found["WRONG"] = f"exit code {code}: {ours}"
    else:
        for text, ids in zip(texts, ours, strict=True):
            expected = encoded(t, text)
            if expected is not None and ids != expected and agrees_with_itself(directory, text, expected):
                found["WRONG"] = f"{text[:100]!r}: {ids[:40]} beside {expected[:40]}"
                break
    if args.keep or "WRONG" in found:
        found["files"] = str(directory)
    else:
        shutil.rmtree(directory)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="keep the files")
    args = parser.parse_args()
    wrong = 0
    for seed in range(args.first, args.first + args.seeds):
        found = one(seed, args)
        print(json.dumps(found), flush=True)
        wrong += "WRONG" in found
    print(f"{args.seeds} tokenizers, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
