#!/usr/bin/env python3
"""Makes a token file of any data that Python can tokenise: NAME.bin, NAME.docs, NAME.mask and NAME.json.

    python3 -m venv venv && venv/bin/pip install tokenizers jinja2
    venv/bin/python tools/prepare.py --tokenizer MODEL_DIRECTORY --out data/train chats.jsonl more.jsonl
    ziggurat train config.json --set data.train=data/train.bin

MODEL_DIRECTORY holds tokenizer.json, and for chats and the end token tokenizer_config.json (or chat_template.jinja).
An input has one JSON object a line, or is one list of them. An object has one of

    {"text": "..."}                                  special tokens are put around it as the tokenizer does
    {"prompt": "...", "completion": "..."}           the same, but the completion alone is learnt; both may be lists of
                                                     messages, too
    {"messages": [{"role": "user", "content": "..."}, ...]}   goes through the chat template
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same, as ShareGPT has it; "system" may stand beside
    {"instruction": "...", "input": "...", "output": "..."}   Alpaca's: a turn of each, through the chat template; where
                                                     the model has none, in Alpaca's own words

"content" may be a list of parts of text. What stands beside messages as "tools", "documents" or
"chat_template_kwargs" reaches the template.

Of messages what the assistant says is learnt: what stands in {% generation %} ... {% endgeneration %} of the
template, or, where it has none, the template's text with an assistant's message less its text up to there.
--learn all makes all tokens targets. Of several templates "default" is taken, and "tool_use" for rows with tools.

    NAME.bin    tokens, uint16 up to a vocabulary of 65536, else uint32
    NAME.mask   one byte for each token: 0 where it is no target of the loss; only with --learn assistant
    NAME.docs   int64: where each document begins, and at last the number of tokens
    NAME.json   {"format": "ziggurat tokens", "version": 1, "dtype", "tokens", "documents", "mask"}

Files appear when all is done, under their names. Exit codes: 0, 2 for what the caller can mend, 130 for Ctrl-C.
"""
import argparse
import array
import collections
import contextlib
import datetime
import json
import os
import pathlib
import resource
import secrets
import signal
import sys
import time

GENERATION = "\ue000", "\ue001"  # private characters that mark what the assistant says
RENDER_SECONDS, RENDER_BYTES = 10, 4 << 30  # what one rendering of a template may take
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
         "model": "assistant", "system": "system", "tool": "tool", "observation": "tool"}
ALPACA = ("Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
          "\n\n### Instruction:\n{}{}\n\n### Response:\n")
PACKED = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PK\x03\x04": "zip",
          b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
LFS = b"version https://git-lfs.github.com/spec/"


class Mistake(Exception):
    """What the caller can mend."""

    def __init__(self, where, what, hint=""):
        super().__init__(f"{where}: {what}" + (f"\n  hint: {hint}" if hint else ""))


def shown(value):
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def package(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise Mistake(name, f"this Python cannot import it: {error}",
                      "python3 -m venv venv && venv/bin/pip install tokenizers jinja2") from error


def parse(data, where):
    """JSON of bytes."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Mistake(where, f"is no UTF-8 at byte {error.start} (0x{data[error.start]:02X})",
                      "convert the file: iconv -f LATIN1 -t UTF-8") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if b"\n" in data.strip() else ""
        raise Mistake(where, f"is no JSON: {error.msg} at {line}column {error.colno}",
                      "one object a line is expected, or one list of objects in the file") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a number of too many digits, lists in lists
        raise Mistake(where, f"is no JSON that can be read: {shown(str(error) or type(error).__name__)}") from error


def read_json(path):
    """The object that a file has."""
    data = read(path)
    value = parse(data, path)
    if not isinstance(value, dict):
        raise Mistake(path, f"is no JSON object, but {type(value).__name__}")
    return value


def read(path):
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Mistake(path, f"cannot be read: {error.strerror}") from error
    if data.startswith(LFS):
        raise Mistake(path, "is a pointer of Git LFS in place of the file", "fetch it: git lfs pull")
    return data


class Template:
    """A chat template, with what transformers gives it."""

    def __init__(self, text, where, today):
        jinja2 = package("jinja2")
        __import__("jinja2.sandbox")
        __import__("jinja2.ext")
        self.errors = jinja2.TemplateError
        if any(mark in text for mark in GENERATION):
            raise Mistake(where, "has the private characters U+E000 or U+E001, which mark what is learnt")

        class Generation(jinja2.ext.Extension):
            """{% generation %} ... {% endgeneration %}: puts marks around what is between."""
            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(m)]) for m in GENERATION)
                return [begin.set_lineno(line), *body, end.set_lineno(line)]

        class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
            """A power can take any time, and nothing interrupts it."""
            intercepted_binops = frozenset(["**"])

            def call_binop(self, context, operator, left, right):
                if abs(right) > 64 or abs(left) > 1 << 64:
                    raise jinja2.TemplateError("computes a power of large numbers")
                return super().call_binop(context, operator, left, right)

        def raise_exception(message):
            raise jinja2.TemplateError(message)

        def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                              sort_keys=sort_keys)

        environment = Environment(trim_blocks=True, lstrip_blocks=True,
                                  extensions=[Generation, jinja2.ext.loopcontrols])
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = today.strftime
        environment.filters["tojson"] = tojson
        try:
            with bounded():
                self.template = environment.from_string(text)
        except (jinja2.TemplateError, RecursionError, MemoryError, TimeoutError) as error:
            line = f" at line {error.lineno}" if getattr(error, "lineno", None) else ""
            raise Mistake(where, f"is no template that jinja2 takes{line}: {shown(str(error))}") from error
        self.marks = "endgeneration" in text

    def render(self, where, **values):
        try:
            with bounded():
                return self.template.render(**values)
        except Mistake:
            raise
        except Exception as error:  # a template may do anything with what a row has
            kind = "" if isinstance(error, (self.errors, TimeoutError)) else type(error).__name__ + ": "
            raise Mistake(where, f"the chat template does not take it: {kind}{shown(str(error))}") from error


@contextlib.contextmanager
def bounded():
    """Within, time and memory are what a template may take."""
    def late(*_):
        raise TimeoutError(f"it takes more than {RENDER_SECONDS} s")

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + RENDER_BYTES
    tighter = min((n for n in (most, soft, hard) if n != resource.RLIM_INFINITY))
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (tighter, hard))
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def text_of(row, key, where, otherwise=None):
    """A text of a row; `otherwise` where it has none."""
    value = row.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, str):
        raise Mistake(where, f'"{key}" is {shown(value)}, a text is expected')
    return value


def content_of(message, where):
    """What a message says: a text, or parts of text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
            if not isinstance(text, str):
                raise Mistake(where, f'"content" has the part {shown(part)}; parts of text alone are known')
            parts.append(text)
        return "".join(parts)
    if content is None and message.get("tool_calls"):
        return content
    if not isinstance(content, str):
        raise Mistake(where, f'"content" is {shown(content)}, a text is expected')
    return content


def messages_of(value, key, where):
    """Messages with roles and texts."""
    if not isinstance(value, list) or not value:
        raise Mistake(where, f'"{key}" is {shown(value)}, a list of messages is expected')
    messages = []
    for n, message in enumerate(value):
        place = f"{where}: {key}[{n}]"
        if not isinstance(message, dict):
            raise Mistake(place, f"is {shown(message)}, an object is expected")
        if "role" not in message and "from" in message:
            role = ROLES.get(message["from"]) if isinstance(message["from"], str) else None
            if role is None:
                raise Mistake(place, f'"from" is {shown(message["from"])}, one of {", ".join(ROLES)} is expected')
            messages.append({"role": role, "content": text_of(message, "value", place)})
            continue
        text_of(message, "role", place)
        messages.append({**message, "content": content_of(message, place)})
    return messages


class Preparation:
    def __init__(self, directory, learn, template=None, today=None):
        self.directory, self.learn = pathlib.Path(directory), learn
        self.path = self.directory / "tokenizer.json"
        if not self.path.is_file():
            raise Mistake(self.path, "there is none", "name a model's directory, with its tokenizer.json")
        self.tokenizer = self.load()
        self.config = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (self.directory / name).is_file():
                self.config.update(read_json(self.directory / name))
        self.today = today or datetime.datetime.now()
        self.templates = self.load_templates(template)
        end = self.special("eos_token")
        self.end = self.tokenizer.token_to_id(end) if end else None
        if end and self.end is None:
            raise Mistake(self.directory, f'"eos_token" is {shown(end)}, which is no token of tokenizer.json')
        self.notes = set()

    def load(self):
        tokenizers = package("tokenizers")
        read(self.path)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what `tokenizers` panics with is no Exception
            raise Mistake(self.path, f"is no tokenizer that `tokenizers` takes: {shown(str(error))}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def load_templates(self, wanted):
        """Templates by name; with a wanted one that alone, as "default"."""
        where, texts = self.directory / "tokenizer_config.json", {}
        value = self.config.get("chat_template")
        if isinstance(value, str):
            texts["default"] = value
        elif isinstance(value, list):
            for entry in value:
                if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "template")):
                    raise Mistake(where, '"chat_template" has an entry without name and template')
                texts[entry["name"]] = entry["template"]
        elif value is not None:
            raise Mistake(where, f'"chat_template" is {shown(value)}, a text or a list of them with names is expected')
        files = {"default": self.directory / "chat_template.jinja"}
        files.update((p.stem, p) for p in sorted((self.directory / "additional_chat_templates").glob("*.jinja")))
        for name, path in files.items():
            if path.is_file():
                texts[name] = self.decode(path)
        if wanted is not None:
            if wanted not in texts and not pathlib.Path(wanted).is_file():
                raise Mistake("--template " + wanted, "is no file and no name of a template of the model",
                              f"it has {', '.join(sorted(texts)) or 'none'}")
            texts = {"default": texts[wanted] if wanted in texts else self.decode(pathlib.Path(wanted))}
        elif texts and "default" not in texts:
            raise Mistake(where, f"none of its chat templates is \"default\": {', '.join(sorted(texts))}",
                          "name one: --template NAME")
        return {name: Template(text, f"{self.directory}: chat template {name}", self.today)
                for name, text in texts.items() if name in ("default", "tool_use")}

    @staticmethod
    def decode(path):
        try:
            return read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Mistake(path, f"is no UTF-8 at byte {error.start}") from error

    def special(self, key):
        value = self.config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            raise Mistake(self.directory, f'"{key}" is {shown(value)}, a text is expected')
        return value

    def renderer(self, row, where):
        """A function of messages that gives the template's text, with what else the row has for it."""
        more = {}
        for key, kind in (("tools", list), ("documents", list), ("chat_template_kwargs", dict)):
            value = row.get(key)
            if isinstance(value, str):  # as data sets with columns of one type have it
                value = parse(value.encode("utf-8", "surrogatepass"), f'{where}: "{key}"') if value.strip() else None
            if value is not None and not isinstance(value, kind):
                raise Mistake(where, f'"{key}" is {shown(value)}, {kind.__name__} expected')
            more[key] = value
        more.update(more.pop("chat_template_kwargs") or {})
        template = self.templates.get("tool_use" if more["tools"] and "tool_use" in self.templates else "default")
        if template is None:
            raise Mistake(where, f"is a chat, and {self.directory} has no chat template",
                          "put a chat_template.jinja there, or name one: --template FILE")
        tokens = {key: self.special(key) or "" for key in ("bos_token", "eos_token")}
        tokens.update((key, self.special(key)) for key in ("unk_token", "pad_token") if self.special(key))
        values = {**tokens, **more}

        def render(messages, add_generation_prompt):
            return template.render(where, **{**values, "messages": messages,
                                             "add_generation_prompt": add_generation_prompt})
        return render, template.marks

    def chat(self, row, messages, where, asked=0):
        """The template's text, as (text, whether it is learnt) in order. `asked` messages are not learnt."""
        render, marks = self.renderer(row, where)
        beside = {k: row.get(k) for k in ("tools", "documents", "chat_template_kwargs")}
        if any(mark in json.dumps([messages, beside], ensure_ascii=False) for mark in GENERATION):
            raise Mistake(where, "has the private characters U+E000 or U+E001, which mark what is learnt")
        if self.learn == "all":
            said = render(messages, False)
            return [(said.replace(GENERATION[0], "").replace(GENERATION[1], ""), True)]
        if marks and not asked:
            spans = []
            for part in render(messages, False).split(GENERATION[0]):
                said, mark, rest = part.partition(GENERATION[1])
                spans += [(said, True), (rest, False)] if mark else [(part, False)]
            return spans

        def plain(messages, opens):
            said = render(messages, opens)
            return said.replace(GENERATION[0], "").replace(GENERATION[1], "")
        spans, done = [], ""
        for n, message in enumerate(messages):
            if message["role"] != "assistant" or n < asked:
                continue
            before, after = plain(messages[:n], True), plain(messages[:n + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise Mistake(where, "the chat template writes earlier messages in another way when later ones follow",
                              "give it {% generation %} ... {% endgeneration %}, or use --learn all")
            spans += [(before[len(done):], False), (after[len(before):], True)]
            done = after
        rest = plain(messages, False)
        if not rest.startswith(done):
            raise Mistake(where, "the chat template writes earlier messages in another way when later ones follow",
                          "give it {% generation %} ... {% endgeneration %}, or use --learn all")
        return spans + [(rest[len(done):], False)]

    def tokens_of_spans(self, spans, around):
        """Tokens of the whole text, each learnt if its first character is; `around`: with the special tokens that
        stand around a text, of which those behind it are learnt."""
        encoding = self.tokenizer.encode("".join(t for t, _ in spans), add_special_tokens=around)
        ends, total = [], 0
        for text, learnt in spans:
            total += len(text)
            ends.append((total, learnt))
        mask, at = [], 0
        for (begin, _), special in zip(encoding.offsets, encoding.special_tokens_mask):
            if special and around:
                mask.append(int(any(s == 0 for s in encoding.special_tokens_mask[:len(mask)])))
                continue
            while at + 1 < len(ends) and begin >= ends[at][0]:
                at += 1
            mask.append(int(ends[at][1]) if ends else 0)
        return list(encoding.ids), mask

    def alpaca(self, row, where):
        """An instruction as a chat, or, of a model without template, in Alpaca's words."""
        asked, more, said = (text_of(row, "instruction", where), text_of(row, "input", where, ""),
                             text_of(row, "output", where))
        system, history = text_of(row, "system", where, ""), row.get("history") or []
        self.notes.add("instructions and outputs are taken as " + ("chats" if self.templates else "Alpaca's prompts"))
        if not self.templates:
            if system or history:
                raise Mistake(where, f"has a system's message or a history, and {self.directory} has no chat template")
            prompt = ALPACA.format(", paired with an input that provides further context" if more else "", asked,
                                   f"\n\n### Input:\n{more}" if more else "")
            return self.with_end(*self.tokens_of_spans([(prompt, False), (said, True)], True))
        messages = [{"role": "system", "content": system}] if system else []
        for pair in history if isinstance(history, list) else [history]:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
                raise Mistake(where, f'"history" has {shown(pair)}, a list of two texts is expected')
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        messages += [{"role": "user", "content": f"{asked}\n\n{more}" if more and asked else asked + more},
                     {"role": "assistant", "content": said}]
        return self.tokens_of_spans(self.chat(row, messages, where), False)

    def prompted(self, row, where):
        if isinstance(row["prompt"], list):
            prompt = messages_of(row["prompt"], "prompt", where)
            messages = prompt + messages_of(row["completion"], "completion", where)
            return self.tokens_of_spans(self.chat(row, messages, where, len(prompt)), False)
        spans = [(text_of(row, "prompt", where), False), (text_of(row, "completion", where), True)]
        return self.with_end(*self.tokens_of_spans(spans, True))

    def conversation(self, row, where):
        key = "messages" if "messages" in row else "conversations"
        messages = messages_of(row[key], key, where)
        if system := text_of(row, "system", where, ""):
            messages.insert(0, {"role": "system", "content": system})
        return self.tokens_of_spans(self.chat(row, messages, where), False)

    def document(self, row, where):
        """Tokens of one row, and whether each is learnt."""
        if not isinstance(row, dict):
            raise Mistake(where, f"is {shown(row)}, a JSON object is expected")
        try:
            if "messages" in row or "conversations" in row:
                ids, mask = self.conversation(row, where)
            elif "prompt" in row and "completion" in row:
                ids, mask = self.prompted(row, where)
            elif "instruction" in row and "output" in row:
                ids, mask = self.alpaca(row, where)
            elif "text" in row:
                ids, mask = self.with_end(self.tokenizer.encode(text_of(row, "text", where)).ids, None)
            else:
                raise Mistake(where, 'has no "text", "messages", "conversations", "prompt" with "completion", or '
                              f'"instruction" with "output"; found {", ".join(map(json.dumps, map(shown, row))) or "{}"}',
                              "rename the fields of your data to these")
        except UnicodeEncodeError as error:
            raise Mistake(where, "has half of a surrogate pair (\\ud800 to \\udfff), which is no text") from error
        except TypeError as error:
            try:
                json.dumps(row, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                raise Mistake(where, "has half of a surrogate pair (\\ud800 to \\udfff), which is no text") from error
            raise
        if mask is None or self.learn == "all":
            mask = [1] * len(ids)
        return ids, [0] + mask[1:]  # nothing comes before the first token from which it could be predicted

    def with_end(self, ids, mask):
        if self.end is None or (ids and ids[-1] == self.end):
            return ids, mask
        return ids + [self.end], mask and mask + [1]


class Progress:
    """A line now and then, of how much is done."""

    def __init__(self, paths):
        self.total = sum(os.path.getsize(p) for p in paths if os.path.isfile(p))
        self.terminal = sys.stderr.isatty()
        self.done = 0
        self.next = time.monotonic() + (0.5 if self.terminal else 30)

    def tell(self, read_bytes, documents, tokens):
        self.done += read_bytes
        if time.monotonic() < self.next:
            return
        share = f"{100 * self.done // self.total}%, " if self.total else ""
        print(f"{share}{documents} documents, {tokens} tokens", end="\r" if self.terminal else "\n", file=sys.stderr,
              flush=True)
        self.next = time.monotonic() + (0.5 if self.terminal else 30)


def rows(path):
    """(row, where, bytes) of a file of lines, or of one list."""
    try:
        with open(path, "rb") as file:
            begin = file.peek(64)[:64].removeprefix(b"\xef\xbb\xbf")
            for mark, name in PACKED.items():
                if begin.startswith(mark):
                    raise Mistake(path, f"is {name}; lines of JSON are expected",
                                  "unpack or convert it, to one JSON object a line in UTF-8")
            if begin.startswith(LFS):
                raise Mistake(path, "is a pointer of Git LFS in place of the file", "fetch it: git lfs pull")
            if begin.lstrip().startswith(b"["):
                data = file.read().removeprefix(b"\xef\xbb\xbf")
                for number, row in enumerate(parse(data, path), 1):
                    yield row, f"{path}: record {number}", 0 if number > 1 else len(data)
                return
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield parse(text.rstrip(b"\r\n"), where), where, len(line)
    except OSError as error:
        raise Mistake(path, f"cannot be read: {error.strerror}") from error


class Outputs:
    """Files under names that nobody foresees, until all are put in place. What is not put in place goes."""

    def __init__(self, folder):
        self.folder, self.made, self.open = folder, [], {}
        for missing in [p for p in (folder, *folder.parents) if not p.exists()][::-1]:
            missing.mkdir()
            self.made.append(missing)

    def create(self, path):
        part = pathlib.Path(f"{path}.part-{secrets.token_hex(8)}")
        file = open(part, "xb")
        self.open[path] = part, file
        return file

    def commit(self, last):
        """Puts all in place, the description last, so that it never describes half a file."""
        for _, file in self.open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        last.unlink(missing_ok=True)
        for path in sorted(self.open, key=lambda path: path == last):
            os.replace(self.open[path][0], path)
        self.open, self.made = {}, []
        folder = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(folder)
        os.close(folder)

    def discard(self, path):
        part, file = self.open.pop(path)
        file.close()
        part.unlink()

    def remove(self):
        for part, file in self.open.values():
            with contextlib.suppress(OSError):  # what a full disk has left unwritten
                file.close()
            part.unlink(missing_ok=True)
        for folder in reversed(self.made):
            with contextlib.suppress(OSError):  # somebody has put something there
                folder.rmdir()


def write_documents(preparation, inputs, files, wide):
    """The counts of what was written."""
    counts = collections.Counter(tokens=0, documents=0, targets=0, idle=0)
    progress = Progress(inputs)
    tokens, masks, docs = files
    for path in inputs:
        for row, where, read_bytes in rows(path):
            try:
                ids, mask = preparation.document(row, where)
            except (Mistake, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # of `tokenizers`, whose panics are no Exceptions
                raise Mistake(where, f"cannot be tokenised: {type(error).__name__}: {shown(str(error))}") from error
            if ids:
                docs.write(counts["tokens"].to_bytes(8, "little"))
                numbers = array.array("I" if wide else "H", ids)
                if sys.byteorder == "big":
                    numbers.byteswap()
                tokens.write(numbers.tobytes())
                masks.write(bytes(mask))
                counts.update(tokens=len(ids), documents=1, targets=sum(mask), idle=int(not any(mask)))
            progress.tell(read_bytes, counts["documents"], counts["tokens"])
    docs.write(counts["tokens"].to_bytes(8, "little"))
    return counts


def write(preparation, inputs, out):
    wide = max(preparation.tokenizer.get_vocab().values(), default=0) > 65535
    names = {ending: pathlib.Path(f"{out}.{ending}") for ending in ("bin", "mask", "docs", "json")}
    outputs = Outputs(out.parent)
    try:
        files = [outputs.create(names[ending]) for ending in ("bin", "mask", "docs")]
        counts = write_documents(preparation, inputs, files, wide)
        if counts["tokens"] == 0:
            raise Mistake(", ".join(map(str, inputs)), "no document has a token")
        if counts["targets"] == 0:
            raise Mistake(", ".join(map(str, inputs)), f"none of the {counts['tokens']} tokens is a target of the loss",
                          "no message is the assistant's, or completions are empty; --learn all makes all targets")
        masked = preparation.learn != "all"
        description = {"format": "ziggurat tokens", "version": 1, "dtype": "uint32" if wide else "uint16",
                       "tokens": counts["tokens"], "documents": counts["documents"], "mask": masked}
        outputs.create(names["json"]).write((json.dumps(description) + "\n").encode())
        if not masked:
            outputs.discard(names["mask"])
        # The tokenizer goes with the tokens, for samples and for saved models.
        outputs.create(out.parent / "tokenizer.json").write(read(preparation.path))
        outputs.create(out.parent / "tokenizer.ziggurat.json").write(
            (json.dumps({"file": "tokenizer.json", "type": "hf", "version": 1}) + "\n").encode())
        outputs.commit(names["json"])
        if not masked:
            names["mask"].unlink(missing_ok=True)
    except OSError as error:
        raise Mistake(out, f"cannot be written: {error.strerror}",
                      "make room there, or name another place with --out") from error
    finally:
        outputs.remove()
    return counts


def check_out(text, source):
    """The outputs' path without its extensions."""
    out = pathlib.Path(text)
    if text.endswith("/") or out.is_dir():
        raise Mistake("--out " + text, "is a directory", f"name files in it: --out {out / 'train'}")
    if out.suffix in (".bin", ".json", ".jsonl"):
        raise Mistake("--out " + text, f"ends with {out.suffix}", f"name it without: --out {out.with_suffix('')}")
    copy = out.parent / "tokenizer.json"
    if copy.exists() and read(copy) != read(source):
        raise Mistake(copy, "is another tokenizer's", "name another directory with --out")
    return out


def date_of(text):
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no date like 2026-07-26") from error


def run(arguments):
    for path in arguments.inputs:
        if path.is_dir() or not path.exists():
            raise Mistake(path, "is a directory" if path.is_dir() else "there is no such file",
                          "name files of JSON lines")
    source = pathlib.Path(arguments.tokenizer) / "tokenizer.json"
    preparation = Preparation(arguments.tokenizer, arguments.learn, arguments.template, arguments.date)
    out = check_out(arguments.out, source)
    counts = write(preparation, arguments.inputs, out)
    for note in sorted(preparation.notes):
        print(f"note: {note}", file=sys.stderr)
    if preparation.end is None:
        print(f"note: {arguments.tokenizer} names no eos_token, so that no token ends a text", file=sys.stderr)
    if counts["idle"]:
        print(f"note: {counts['idle']} of {counts['documents']} documents have no target", file=sys.stderr)
    print(f"{out}.bin: {counts['documents']} documents, {counts['tokens']} tokens, {counts['targets']} of them targets",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=pathlib.Path, metavar="FILE",
                        help="files of documents: one JSON object a line, or one list of objects")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="model directory with tokenizer.json")
    parser.add_argument("--out", required=True, metavar="NAME", help="the output's path without its extensions")
    parser.add_argument("--learn", choices=("assistant", "all"), default="assistant",
                        help="which tokens are targets of the loss (default: %(default)s)")
    parser.add_argument("--template", metavar="NAME", help="one of the model's chat templates by its name, or a file")
    parser.add_argument("--date", type=date_of, metavar="YYYY-MM-DD",
                        help="what templates that ask for the date are told (default: today)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that unfinished files go
    try:
        run(parser.parse_args())
    except Mistake as mistake:
        print(f"error: {mistake}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        print(f"error: {error or 'there is not enough memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
