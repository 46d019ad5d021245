#!/usr/bin/env python3
"""tools/prepare.py with a small tokenizer: tokens, mask and document offsets, chat templates of both kinds, and errors.

Skipped (77) where Python has no `tokenizers` or no `jinja2`.
"""
import array
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLAIN = ("{% for m in messages %}<|a|>{{ m.role }}\n{{ m.content }}<|b|>{% endfor %}"
         "{% if add_generation_prompt %}<|a|>assistant\n{% endif %}")
MARKED = ("{% for m in messages %}<|a|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "<|b|>{% endgeneration %}{% else %}{{ m.content }}<|b|>{% endif %}{% endfor %}")
CHAT = {"messages": [{"role": "user", "content": "The dog"}, {"role": "assistant", "content": "fox é"},
                     {"role": "user", "content": "x"}, {"role": "assistant", "content": "the end"}]}


def prepare(folder, template, rows, *options):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_text((ROOT / "tests/reference/tokenizers/llama3.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|b|>", "chat_template": template}))
    (folder / "in.jsonl").write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return subprocess.run([sys.executable, str(ROOT / "tools/prepare.py"), "--tokenizer", str(model), "--out",
                           str(folder / "out/t"), *options, str(folder / "in.jsonl")], capture_output=True, text=True)


def read(folder):
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    ids = array.array("H", (folder / "out/t.bin").read_bytes())
    docs = array.array("q", (folder / "out/t.docs").read_bytes())
    description = json.loads((folder / "out/t.json").read_text())
    mask = (folder / "out/t.mask").read_bytes() if description["mask"] else None
    assert description["tokens"] == len(ids) == docs[-1] and description["documents"] == len(docs) - 1, description
    assert mask is None or len(mask) == len(ids)

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=False)
    documents = [slice(a, b) for a, b in zip(docs, docs[1:])]
    learnt = [] if mask is None else [text([i for i, m in zip(ids[d], mask[d]) if m]) for d in documents]
    return [text(ids[d]) for d in documents], learnt, mask


def main():
    if not all(importlib.util.find_spec(name) for name in ("tokenizers", "jinja2")):
        print("no tokenizers or no jinja2 for this Python")
        return 77
    rows = [CHAT, {"prompt": "The quick", "completion": " brown fox"}, "\n", {"text": "lazy"}]
    whole = ("<|a|>user\nThe dog<|b|><|a|>assistant\nfox é<|b|><|a|>user\nx<|b|><|a|>assistant\nthe end<|b|>")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for template in (PLAIN, MARKED):
            done = prepare(folder, template, rows)
            assert done.returncode == 0, done.stderr
            texts, learnt, mask = read(folder)
            assert texts == [whole, "The quick brown fox<|b|>", "<|a|>lazy<|b|>"], texts
            assert learnt == ["fox é<|b|>the end<|b|>", " brown fox<|b|>", "lazy<|b|>"], learnt
        assert (folder / "out/tokenizer.ziggurat.json").exists() and not list(folder.glob("out/*.part"))
        assert prepare(folder, PLAIN, rows, "--learn", "all").returncode == 0
        assert read(folder)[2] is None and not (folder / "out/t.mask").exists()
        for row, expected in (("{\n", "in.jsonl:1: is no JSON"), ({"other": 1}, "in.jsonl:1: has no"),
                              ({"text": ""}, None)):
            done = prepare(folder, PLAIN, [row])
            assert (done.returncode == 0) == (expected is None) and (expected or "") in done.stderr, done.stderr
        changing = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
        done = prepare(folder, changing, [CHAT])
        assert done.returncode == 1 and "in another way" in done.stderr, done.stderr
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
