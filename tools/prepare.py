#!/usr/bin/env python3
"""Makes a token file of any data that Python can tokenise: NAME.bin, NAME.docs, NAME.mask and NAME.json.

    python3 -m venv venv && venv/bin/pip install tokenizers jinja2
    venv/bin/python tools/prepare.py --tokenizer MODEL_DIRECTORY --out data/train chats.jsonl more.jsonl
    ziggurat train config.json --set data.train=data/train.bin

MODEL_DIRECTORY holds tokenizer.json, and tokenizer_config.json for the chat template and the end token. A line of
an input has one of

    {"text": "..."}                                  special tokens are put around it as the tokenizer does
    {"messages": [{"role": "user", "content": "..."}, ...]}   goes through the chat template
    {"prompt": "...", "completion": "..."}           the completion alone is learnt

Of messages what the assistant says is learnt: what stands in {% generation %} ... {% endgeneration %} of the
template, or, where it has none, the template's text with an assistant's message less its text up to there.
--learn all makes all tokens targets.

    NAME.bin    tokens, uint16 up to a vocabulary of 65536, else uint32
    NAME.mask   one byte for each token: 0 where it is no target of the loss; only with --learn assistant
    NAME.docs   int64: where each document begins, and at last the number of tokens
    NAME.json   {"format": "ziggurat tokens", "version": 1, "dtype", "tokens", "documents", "mask"}
"""
import argparse
import array
import json
import os
import pathlib
import shutil
import sys

GENERATION = "\ue000", "\ue001"  # private characters that mark what the assistant says


def fail(where, what):
    sys.exit(f"error: {where}: {what}")


def load_template(text):
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: puts marks around what is between."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(m)]) for m in GENERATION)
            return [begin.set_lineno(line), *body, end.set_lineno(line)]

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(text)


class Preparation:
    def __init__(self, directory, learn):
        from tokenizers import Tokenizer
        self.directory, self.learn = pathlib.Path(directory), learn
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            fail(path, "there is none; a directory with the tokenizer.json of a model is expected")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.config = {}
        if (self.directory / "tokenizer_config.json").is_file():
            self.config = json.loads((self.directory / "tokenizer_config.json").read_text())
        self.template = self.has_marks = None
        text = self.config.get("chat_template")
        if (self.directory / "chat_template.jinja").is_file():
            text = (self.directory / "chat_template.jinja").read_text()
        if isinstance(text, list):
            text = next((t["template"] for t in text if t["name"] == "default"), None)
        if text:
            self.template, self.has_marks = load_template(text), "endgeneration" in text
        end = self.special("eos_token")
        self.end = self.tokenizer.token_to_id(end) if end else None

    def special(self, key):
        value = self.config.get(key)
        return value["content"] if isinstance(value, dict) else value

    def render(self, messages, **more):
        return self.template.render(messages=messages, bos_token=self.special("bos_token") or "",
                                    eos_token=self.special("eos_token") or "", **more)

    def spans(self, messages, where):
        """The template's text, as (text, whether it is learnt) in order."""
        if self.template is None:
            fail(where, f"has messages, and {self.directory} has no chat template")
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in GENERATION):
            fail(where, "has the private characters U+E000 or U+E001, which mark what is learnt")
        if self.has_marks:
            spans = []
            for part in self.render(messages, add_generation_prompt=False).split(GENERATION[0]):
                said, mark, rest = part.partition(GENERATION[1])
                spans += [(said, True), (rest, False)] if mark else [(part, False)]
            return spans
        spans, done = [], ""
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:n], add_generation_prompt=True)
            after = self.render(messages[:n + 1], add_generation_prompt=False)
            if not before.startswith(done) or not after.startswith(before):
                fail(where, "the chat template writes earlier messages in another way when later ones follow; give it "
                     "{% generation %}, or use --learn all")
            spans += [(before[len(done):], False), (after[len(before):], True)]
            done = after
        rest = self.render(messages, add_generation_prompt=False)
        return spans + [(rest[len(done):], False)]

    def tokens_of_spans(self, spans):
        """Tokens of the whole text, each learnt if its first character is."""
        encoding = self.tokenizer.encode("".join(t for t, _ in spans), add_special_tokens=False)
        ends, total = [], 0
        for text, learnt in spans:
            total += len(text)
            ends.append((total, learnt))
        mask, at = [], 0
        for begin, _ in encoding.offsets:
            while at + 1 < len(ends) and begin >= ends[at][0]:
                at += 1
            mask.append(int(ends[at][1]) if ends else 0)
        return encoding.ids, mask

    def document(self, row, where):
        """Tokens of one line, and whether each is learnt."""
        if not isinstance(row, dict):
            fail(where, "is no JSON object")
        if "messages" in row:
            ids, mask = self.tokens_of_spans(self.spans(row["messages"], where))
        elif "prompt" in row and "completion" in row:
            ids, mask = self.tokens_of_spans([(row["prompt"], False), (row["completion"], True)])
            ids, mask = self.with_end(ids, mask)
        elif "text" in row:
            ids, mask = self.with_end(self.tokenizer.encode(row["text"]).ids, None)
        else:
            fail(where, 'has no "text", "messages", or "prompt" and "completion"')
        if mask is None or self.learn == "all":
            mask = [1] * len(ids)
        return ids, [0] + mask[1:]  # nothing comes before the first token from which it could be predicted

    def with_end(self, ids, mask):
        if self.end is None or (ids and ids[-1] == self.end):
            return ids, mask
        return ids + [self.end], mask and mask + [1]


def rows(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if line.strip():
                try:
                    yield json.loads(line), where
                except ValueError as error:
                    fail(where, f"is no JSON: {error}")


def write(preparation, inputs, out):
    """Removes what an earlier run has made, writes aside, and renames; the description comes last, so that it never
    describes half a file."""
    wide = max(preparation.tokenizer.get_vocab().values(), default=0) > 65535
    names = {ending: f"{out}.{ending}" for ending in ("bin", "mask", "docs", "json")}
    for name in names.values():
        pathlib.Path(name).unlink(missing_ok=True)
    total = documents = 0
    with open(names["bin"] + ".part", "wb") as tokens, open(names["mask"] + ".part", "wb") as masks, \
            open(names["docs"] + ".part", "wb") as docs:
        for path in inputs:
            for row, where in rows(path):
                try:
                    ids, mask = preparation.document(row, where)
                except Exception as error:  # of the template, or of a message without what it needs
                    fail(where, f"cannot be tokenised: {error!r}")
                if not ids:
                    continue
                docs.write(total.to_bytes(8, "little"))
                tokens.write(array.array("I" if wide else "H", ids).tobytes())
                masks.write(bytes(mask))
                total, documents = total + len(ids), documents + 1
                if documents % 10000 == 0 and sys.stderr.isatty():
                    print(f"\r{documents} documents, {total} tokens", end="", file=sys.stderr)
        docs.write(total.to_bytes(8, "little"))
    if total == 0:
        fail(", ".join(map(str, inputs)), "no document has a token")
    masked = preparation.learn != "all"
    for ending in ("bin", "docs") + (("mask",) if masked else ()):
        os.replace(names[ending] + ".part", names[ending])
    if not masked:
        os.remove(names["mask"] + ".part")
    description = {"format": "ziggurat tokens", "version": 1, "dtype": "uint32" if wide else "uint16",
                   "tokens": total, "documents": documents, "mask": masked}
    pathlib.Path(names["json"]).write_text(json.dumps(description) + "\n")
    print(f"{names['bin']}: {documents} documents, {total} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE.jsonl", help="files of documents, one JSON object a line")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="model directory with tokenizer.json")
    parser.add_argument("--out", required=True, metavar="NAME", help="the output's path without its extensions")
    parser.add_argument("--learn", choices=("assistant", "all"), default="assistant",
                        help="which tokens are targets of the loss (default: %(default)s)")
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    preparation = Preparation(arguments.tokenizer, arguments.learn)
    source, copy = preparation.directory / "tokenizer.json", out.parent / "tokenizer.json"
    if copy.exists() and copy.read_bytes() != source.read_bytes():
        fail(copy, "is another tokenizer; name another directory with --out")
    write(preparation, arguments.inputs, out)
    # The tokenizer goes with the tokens, for samples and for saved models.
    if not copy.exists():
        shutil.copyfile(source, copy)
    (out.parent / "tokenizer.ziggurat.json").write_text(
        json.dumps({"file": "tokenizer.json", "type": "hf", "version": 1}) + "\n")


if __name__ == "__main__":
    main()
