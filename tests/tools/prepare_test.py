#!/usr/bin/env python3
"""tools/prepare.py with a small tokenizer: tokens, mask and document offsets, chat templates of both kinds, forms of rows,
and what is refused.

Skipped (77) where Python has no `tokenizers` or no `jinja2`.
"""
import array
import importlib.util
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLAIN = ("{% for m in messages %}<|a|>{{ m.role }}\n{{ m.content }}<|b|>{% endfor %}"
         "{% if add_generation_prompt %}<|a|>assistant\n{% endif %}")
MARKED = ("{% for m in messages %}<|a|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "<|b|>{% endgeneration %}{% else %}{{ m.content }}<|b|>{% endif %}{% endfor %}")
CHAT = {"messages": [{"role": "user", "content": "The dog"}, {"role": "assistant", "content": "fox é"},
                     {"role": "user", "content": "x"}, {"role": "assistant", "content": "the end"}]}


def command(folder, *options, files=None):
    return [sys.executable, str(ROOT / "tools/prepare.py"), "--tokenizer", str(folder / "model"), "--out",
            str(folder / "out/t"), *options, *map(str, files or [folder / "in.jsonl"])]


def set_up(folder, template, rows):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_text((ROOT / "tests/reference/tokenizers/llama3.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|b|>", "chat_template": template}))
    data = rows if isinstance(rows, bytes) else "".join(
        r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows).encode()
    (folder / "in.jsonl").write_bytes(data)


def prepare(folder, template, rows, *options, **more):
    set_up(folder, template, rows)
    return subprocess.run(command(folder, *options), capture_output=True, text=True, **more)


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


def refused(done, *parts):
    """One error with these parts, exit code 2."""
    assert done.returncode == 2 and "Traceback" not in done.stderr, (done.returncode, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("error: ") == 1, done.stderr
    for part in parts:
        assert part in done.stderr, (part, done.stderr)


def files_of(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def tokens_masks_and_documents(folder):
    rows = [CHAT, {"prompt": "The quick", "completion": " brown fox"}, "\n", {"text": "lazy"}]
    whole = ("<|a|>user\nThe dog<|b|><|a|>assistant\nfox é<|b|><|a|>user\nx<|b|><|a|>assistant\nthe end<|b|>")
    for template in (PLAIN, MARKED):
        done = prepare(folder, template, rows)
        assert done.returncode == 0, done.stderr
        texts, learnt, mask = read(folder)
        assert texts == [whole, "<|a|>The quick brown fox<|b|>", "<|a|>lazy<|b|>"], texts
        assert learnt == ["fox é<|b|>the end<|b|>", " brown fox<|b|>", "lazy<|b|>"], learnt
    assert (folder / "out/tokenizer.ziggurat.json").exists() and not list(folder.glob("out/*.part*"))
    for template in (PLAIN, MARKED):
        assert prepare(folder, template, rows, "--learn", "all").returncode == 0
        assert read(folder)[0][0] == whole
        assert read(folder)[2] is None and not (folder / "out/t.mask").exists()


def forms_of_rows(folder):
    """Each of these is the same conversation, or the same prompt."""
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"][:1]}, m["content"][1:]]}
             for m in CHAT["messages"]]
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
                for m in CHAT["messages"]]
    alpaca = {"instruction": "x", "input": "", "output": "the end", "history": [["The dog", "fox é"]]}
    prompted = {"prompt": CHAT["messages"][:3], "completion": CHAT["messages"][3:]}
    rows = [CHAT, {"messages": parts}, {"conversations": sharegpt}, {"conversations": CHAT["messages"]}, alpaca, prompted]
    for data in (rows, json.dumps(rows, indent=1).encode(), b"\xef\xbb\xbf" + json.dumps(rows).encode()):
        done = prepare(folder, PLAIN, data)
        assert done.returncode == 0, done.stderr
        texts, learnt, _ = read(folder)
        assert len(texts) == 6 and len(set(texts)) == 1, texts
        assert learnt == ["fox é<|b|>the end<|b|>"] * 5 + ["the end<|b|>"], learnt
        assert "taken as chats" in done.stderr, done.stderr
    set_up(folder, None, [{"instruction": "The", "input": "dog", "output": "fox"}])
    done = subprocess.run(command(folder), capture_output=True, text=True)
    assert done.returncode == 0 and "Alpaca's prompts" in done.stderr, done.stderr
    texts, learnt, _ = read(folder)
    assert learnt == ["fox<|b|>"] and texts[0].startswith("<|a|>Below is an instruction"), (texts, learnt)
    assert "### Instruction:\nThe\n\n### Input:\ndog\n\n### Response:\nfox" in texts[0], texts
    # A token of the text itself is not one that the tokenizer puts around it.
    assert prepare(folder, PLAIN, [{"prompt": "x<|a|>y", "completion": "<|a|>z"}]).returncode == 0
    assert read(folder)[:2] == (["<|a|>x<|a|>y<|a|>z<|b|>"], ["<|a|>z<|b|>"]), read(folder)


def what_templates_are_given(folder):
    template = ("{{ tools | tojson if tools else 'none' }}{{ documents | length if documents }}{{ mood }}"
                "{{ strftime_now('%d %b %Y') }}" + PLAIN)
    tools = [{"type": "function", "function": {"name": "dog"}}]
    rows = [{**CHAT, "tools": tools}, {**CHAT, "tools": json.dumps(tools)},
            {**CHAT, "documents": [{"text": "x"}], "chat_template_kwargs": {"mood": "lazy"}}]
    done = prepare(folder, template, rows, "--date", "2024-07-26")
    assert done.returncode == 0, done.stderr
    texts, learnt, _ = read(folder)
    assert texts[0].startswith(json.dumps(tools) + "26 Jul 2024<|a|>user") and texts[1] == texts[0], texts
    assert texts[2].startswith("none1lazy26 Jul 2024<|a|>"), texts
    assert learnt == ["fox é<|b|>the end<|b|>"] * 3, learnt
    named = [{"name": "rag", "template": "r" + PLAIN}, {"name": "default", "template": PLAIN},
             {"name": "tool_use", "template": "t" + PLAIN}]
    (folder / "own.jinja").write_text("o" + PLAIN)
    for options, begins in (((), "t<|a|>"), (("--template", "rag"), "r<|a|>"),
                            (("--template", str(folder / "own.jinja")), "o<|a|>")):
        done = prepare(folder, named, [{**CHAT, "tools": tools}], *options)
        assert done.returncode == 0 and read(folder)[0][0].startswith(begins), (done.stderr, options)
    assert prepare(folder, named, [CHAT]).returncode == 0 and read(folder)[0][0].startswith("<|a|>")
    refused(prepare(folder, named[:1], [CHAT]), "rag", "--template NAME")
    refused(prepare(folder, named, [CHAT], "--template", "none"), "default, rag, tool_use")


def mistakes_in_rows(folder):
    def chat(*messages, **more):
        return {"messages": list(messages), **more}
    user = {"role": "user", "content": "x"}
    for row, *parts in (
            ("{\n", "in.jsonl:1: is no JSON", "column 2"), ("\n[1\n", "is no JSON", "one list of objects"),
            ("{}\n{]\n", "in.jsonl:1: has no"), ('{"text": "x"}\n{"text": \n', "in.jsonl:2: is no JSON"),
            ({"other": 1}, 'in.jsonl:1: has no "text"', 'found "other"', "rename"), ("5\n", "in.jsonl:1: is 5"),
            ({"text": 5}, '"text" is 5'), ({"prompt": "x"}, 'found "prompt"'),
            ({"prompt": "x", "completion": 5}, '"completion" is 5'), ({"messages": 5}, '"messages" is 5'),
            ({"messages": []}, "a list of messages"), (chat(7), "messages[0]: is 7"),
            (chat({"content": "x"}), 'messages[0]: "role" is None'),
            (chat(user, {"role": "assistant"}), 'messages[1]: "content" is None'),
            (chat({"role": "user", "content": [{"type": "image", "url": "x"}]}), "parts of text alone"),
            (chat(user, tools=7), '"tools" is 7'), (chat(user, tools="{"), '"tools"'),
            ({"conversations": [{"from": "nobody", "value": "x"}]}, '"from" is nobody'),
            ({"conversations": [{"from": "gpt", "value": 1}]}, '"value" is 1'),
            ({"instruction": 1, "output": "x"}, '"instruction" is 1'),
            ({"text": "\ud800"}, "surrogate"), (chat({"role": "user", "content": "\udfff"}), "surrogate"),
            (chat({"role": "user", "content": "\ue000"}), "U+E000"), ('{"text": ' + "[" * 100000, "is no JSON"),
            ('{"text": ' + "1" * 5000 + "}", "is no JSON that can be read")):
        refused(prepare(folder, PLAIN, [row]), str(folder / "in.jsonl"), *parts)
    for data, part in ((b'{"text": "x"}\n{"text": "\xff"}', "in.jsonl:2: is no UTF-8 at byte 10 (0xFF)"),
                       ("{}".encode("utf-16"), "is UTF-16"), (b"PAR1", "is Parquet"), (b"\x1f\x8b\x08", "is gzip"),
                       (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"", "no document"),
                       (b'[{"text": "x"}, 5]', "record 2: is 5"), (b"[1,\n2,\n}]", "line 3, column 1")):
        refused(prepare(folder, PLAIN, data), part)
    # Without one target nothing is learnt.
    refused(prepare(folder, PLAIN, [chat(user)]), "none of the", "--learn all")
    assert prepare(folder, PLAIN, [chat(user)], "--learn", "all").returncode == 0
    done = prepare(folder, PLAIN, [chat(user), CHAT])
    assert done.returncode == 0 and "1 of 2 documents have no target" in done.stderr, done.stderr


def mistakes_in_templates(folder):
    changing = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
    refused(prepare(folder, changing, [CHAT]), "in another way")
    for template, part in (("{% if", "is no template that jinja2 takes at line 1"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
                           ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
                           ("{{ messages.x.y }}", "does not take it"), ("{{ ''.__class__.__mro__ }}", "does not take it"),
                           ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
                           ("{{ 9 ** 9999999 }}", "power"), ("{{ range(10 ** 9) | length }}", "does not take it"),
                           ("{{ '%0*d' | format(10 ** 12, 1) }}", "does not take it"),
                           ("{% set n = namespace(t='a' * 1000) %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}"
                            "{% endfor %}{{ n.t }}", "does not take it"), (5, '"chat_template" is 5'),
                           ([{"name": 1}], "without name and template"), ("\ue000", "U+E000"),
                           ("(" * 3000 + "{{" + "(" * 3000, "is no template")):
        refused(prepare(folder, template, [CHAT]), part)
    refused(prepare(folder, None, [CHAT]), "has no chat template", "--template FILE")
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    begin = time.monotonic()
    refused(prepare(folder, slow, [CHAT]), "takes more than 10 s")
    assert time.monotonic() - begin < 60


def mistakes_in_the_model(folder):
    def with_file(name, content):
        set_up(folder, PLAIN, [CHAT])
        (folder / "model" / name).write_bytes(content)
        done = subprocess.run(command(folder), capture_output=True, text=True)
        os.remove(folder / "model" / name)
        return done
    for name, content, *parts in (
            ("tokenizer.json", b"{}", "is no tokenizer that"), ("tokenizer.json", b"", "is no tokenizer that"),
            ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            ("tokenizer_config.json", b"[]", "is no JSON object"), ("tokenizer_config.json", b"{", "is no JSON"),
            ("tokenizer_config.json", b'{"eos_token": "none"}', "is no token of tokenizer.json"),
            ("tokenizer_config.json", b'{"eos_token": 5}', '"eos_token" is 5'),
            ("chat_template.jinja", b"\xff", "is no UTF-8 at byte 0")):
        refused(with_file(name, content), str(folder / "model"), *parts)
    set_up(folder, PLAIN, [CHAT])
    os.remove(folder / "model/tokenizer.json")
    refused(subprocess.run(command(folder), capture_output=True, text=True), "model/tokenizer.json: there is none")


def places(folder):
    set_up(folder, PLAIN, [CHAT])

    def run(*options, files=None, **more):
        return subprocess.run(command(folder, *options, files=files), capture_output=True, text=True, **more)
    refused(run(files=[folder / "none.jsonl"]), "none.jsonl: there is no such file")
    refused(run(files=[folder]), "is a directory")
    refused(run("--out", str(folder)), "is a directory")
    refused(run("--out", str(folder / "x.bin")), "ends with .bin")
    refused(run("--out", str(folder / "in.jsonl/x")), "cannot be written: Not a directory")
    refused(run("--out", str(folder / "new/deep/t"), files=[folder / "in.jsonl", folder / "model/tokenizer.json"]))
    assert not (folder / "new").exists(), files_of(folder)
    (folder / "other").mkdir()
    (folder / "other/tokenizer.json").write_text("{}")
    refused(run("--out", str(folder / "other/t")), "is another tokenizer's")
    # A disk that is full keeps what an earlier run has left.
    assert run().returncode == 0
    before = {name: (folder / name).read_bytes() for name in files_of(folder) if (folder / name).is_file()}
    (folder / "in.jsonl").write_text((json.dumps(CHAT) + "\n") * 400)
    before["in.jsonl"] = (folder / "in.jsonl").read_bytes()

    def full():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    refused(run(preexec_fn=full), "cannot be written: File too large", "make room")
    assert {name: (folder / name).read_bytes() for name in files_of(folder) if (folder / name).is_file()} == before


def an_interrupt_leaves_nothing(folder):
    set_up(folder, PLAIN, [CHAT])
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    work = subprocess.Popen(command(folder, "--out", str(folder / "fresh/t"), files=[folder / "in.jsonl", fifo]),
                            stderr=subprocess.PIPE, text=True)
    with open(fifo, "w") as pipe:  # opens when the script does
        pipe.write(json.dumps(CHAT) + "\n")
        pipe.flush()
        assert list((folder / "fresh").glob("t.bin.part-*")), files_of(folder)
        work.send_signal(signal.SIGINT)
        assert work.wait(30) == 130, work.returncode
    assert "nothing was written" in work.stderr.read() and not (folder / "fresh").exists()


def is_that_of_transformers(folder):
    """The same tokens as apply_chat_template() gives, where transformers is there."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import PreTrainedTokenizerFast
    forms = json.loads((ROOT / "tests/reference/chats.json").read_text())["forms"]
    chats = [[{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
             for said in (["Hi", "Yes."], [" Hi \n", " Yes. \n"])]
    for form in forms:
        done = prepare(folder, form["template"], [{"messages": m} for m in chats], "--learn", "all", "--date",
                       "2026-11-05")
        assert done.returncode == 0, done.stderr
        known = PreTrainedTokenizerFast(tokenizer_file=str(folder / "model/tokenizer.json"), eos_token="<|b|>",
                                        chat_template=form["template"])
        ids, docs = (array.array(code, (folder / "out" / name).read_bytes()) for code, name in (("H", "t.bin"),
                                                                                                 ("q", "t.docs")))
        for n, messages in enumerate(chats):
            expected = known.apply_chat_template(messages, tokenize=False)
            if "strftime_now" not in form["template"]:
                assert list(ids[docs[n]:docs[n + 1]]) == known.encode(expected, add_special_tokens=False), form["name"]


def main():
    if not all(importlib.util.find_spec(name) for name in ("tokenizers", "jinja2")):
        print("no tokenizers or no jinja2 for this Python")
        return 77
    for test in (tokens_masks_and_documents, forms_of_rows, what_templates_are_given, mistakes_in_rows,
                 mistakes_in_templates, mistakes_in_the_model, places, an_interrupt_leaves_nothing,
                 is_that_of_transformers):
        with tempfile.TemporaryDirectory() as name:
            test(pathlib.Path(name))
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
