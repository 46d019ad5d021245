"""Weight files, tokenizers and data as other programs write them, by hand: no library of theirs is between."""

import json
import struct

import numpy as np
import torch

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def write_safetensors(path, tensors, dtype, metadata=True):
    header, at, blobs = {"__metadata__": {"format": "pt"}} if metadata else {}, 0, []
    for name, value in tensors.items():
        value = value.detach().to(TYPES[dtype]).contiguous()
        blobs.append(value.view(torch.uint8).numpy().tobytes())
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, entry in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            a, b = entry["data_offsets"]
            raw = torch.frombuffer(bytearray(data[8 + n + a:8 + n + b]), dtype=TYPES[entry["dtype"]])
            out[name] = raw.view(entry["shape"]).to(TYPES["F64"])
    return out


def read_directory(directory):
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= read_safetensors(path)
    return tensors


def save_model(r, model, directory, dtype):
    """Rounds the parameters to the files' type, and writes these, in one file or several."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(TYPES[dtype]))
    tensors = dict(model.named_parameters())  # a tied matrix comes once
    if model.config.tie_word_embeddings and r.chance(0.3):
        tensors["lm_head.weight"] = model.get_output_embeddings().weight
    if model.config.model_type == "gpt2" and r.chance(0.5):
        tensors = {n.removeprefix("transformer."): p for n, p in tensors.items()}
    names = list(tensors)
    r.shuffle(names)
    shards = r.choice([1, 1, 2, 3])
    if shards == 1:
        write_safetensors(directory / "model.safetensors", {n: tensors[n] for n in names}, dtype, r.chance(0.8))
        return
    where = {n: f"model-{1 + r.randrange(shards):05}-of-{shards:05}.safetensors" for n in names}
    for file in set(where.values()):
        write_safetensors(directory / file, {n: tensors[n] for n in names if where[n] == file}, dtype)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_tokenizer(directory, vocab):
    """256 bytes, and what else the model knows as pairs of letters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    table = {chr(b) if b in plain else chr(256 + others.index(b)): b for b in range(256)}
    merges = [f"{a} {b}" for a in "abcdefghij" for b in "klmnopqrst"][:vocab - 256]
    table |= {merge.replace(" ", ""): 256 + i for i, merge in enumerate(merges)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (directory / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "post_processor": None,
        "decoder": level, "model": {"type": "BPE", "vocab": table, "merges": merges}}))


# ---- data

def megatron(base, documents, r):
    """A data set of Megatron: version 1, a sequence for each document."""
    dtype, code = r.choice([(np.uint16, 8), (np.int32, 4)])
    lengths = [len(d) for d in documents]
    pointers = [sum(lengths[:i]) * np.dtype(dtype).itemsize for i in range(len(documents))]
    np.concatenate([np.array(d, dtype=dtype) for d in documents]).tofile(f"{base}.bin")
    with open(f"{base}.idx", "wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1))
        f.write(np.array(lengths, dtype=np.int32).tobytes() + np.array(pointers, dtype=np.int64).tobytes())
        f.write(np.arange(len(documents) + 1, dtype=np.int64).tobytes())


def labels(ids, mask, at, n):
    """The targets of the n tokens from `at` on; -100 where the mask or the text's end leaves one out."""
    targets = [t if m else -100 for t, m in zip(ids[at + 1:at + n + 1], mask[at + 1:at + n + 1])]
    return targets + [-100] * (n - len(targets))


def windows(r, vocab, seq, directory, data):
    """A file of whole windows.  Returns how many, and the tokens and targets of each."""
    count = r.randint(1, 4)
    ids = [r.randrange(vocab) for _ in range(count * seq + 1 + r.randint(0, seq - 1))]
    mask = [1] * len(ids)
    kind = r.choice(["uint16", "uint32", "jsonl", "megatron"])
    data |= dict(train="data.jsonl" if kind == "jsonl" else "data.bin", order="epochs")
    if kind == "megatron":
        cuts = sorted(r.sample(range(1, len(ids)), min(len(ids) - 1, r.randint(0, 3))))
        megatron(directory / "data", [ids[a:b] for a, b in zip([0] + cuts, cuts + [len(ids)])], r)
    elif kind == "jsonl":
        at, lines = 0, []
        while at < len(ids):
            n = r.randint(1, len(ids) - at)
            line = {"tokens": ids[at:at + n]}
            if r.chance(0.5):
                line["loss_mask"] = [int(r.chance(0.7)) for _ in range(n)]
                mask[at:at + n] = [0] + line["loss_mask"][1:]
            lines.append(json.dumps(line) + "\n")
            at += n
        (directory / "data.jsonl").write_text("".join(lines))
    else:
        np.array(ids, dtype=kind).tofile(directory / "data.bin")
        data["token_dtype"] = kind
    return count, [(ids[w * seq:(w + 1) * seq], labels(ids, mask, w * seq, seq)) for w in range(count)]


def packed(lengths, seq):
    """How many sequences best-fit decreasing makes of documents, as docs/data.md says it."""
    whole = sum(n // seq for n in lengths if n >= 2)
    rooms = []
    for n in sorted((n % seq for n in lengths if n >= 2 and n % seq >= 2), reverse=True):
        fits = [i for i, room in enumerate(rooms) if room >= n]
        if fits:
            rooms[min(fits, key=lambda i: (rooms[i], i))] -= n
        else:
            rooms.append(seq - n)
    return whole + len(rooms)


def documents(r, vocab, seq, directory, data):
    """Documents to be packed.  Returns in how many sequences, and the tokens and targets of each piece by itself."""
    texts = []
    for _ in range(r.randint(1, 8)):
        n = r.choice([1, 2, r.randint(2, seq), seq, r.randint(seq, 3 * seq)])
        mask = [0] + [int(r.chance(0.7)) for _ in range(n - 1)] if r.chance(0.5) else [1] * n
        texts.append(([r.randrange(vocab) for _ in range(n)], mask))
    texts.append(([3, 1, 4], [1, 1, 1]))
    if r.chance(0.3):
        texts = [(ids, [1] * len(ids)) for ids, _ in texts]
        megatron(directory / "data", [ids for ids, _ in texts], r)
        data["train"] = "data.bin"
    else:
        lines = [{"input_ids": ids} | ({} if all(mask) else {"labels": [t if m else -100 for t, m in zip(ids, mask)]})
                 for ids, mask in texts]
        (directory / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        data["train"] = "data.jsonl"
    data |= dict(order="epochs", packing="documents")
    sequences = []
    for ids, mask in texts:
        for at in range(0, len(ids) if len(ids) > 1 else 0, seq):
            n = min(seq, len(ids) - at)
            if n > 1 or n == seq:
                sequences.append((ids[at:at + n], labels(ids, mask, at, n)))
    return packed([len(ids) for ids, _ in texts], seq), sequences
