#!/usr/bin/env python3
"""Doors between checkpoints of ziggurat and those of PyTorch and DeepSpeed: master weights and Adam's moments.

    checkpoint_doors.py to-dcp CHECKPOINT DIR          torch.distributed.checkpoint: what get_state_dict() names
    checkpoint_doors.py to-universal CHECKPOINT DIR    DeepSpeed's universal checkpoint: DIR/zero/NAME/fp32.pt, ...
    checkpoint_doors.py from-dcp DIR FILE --like CHECKPOINT
    checkpoint_doors.py from-universal DIR FILE --like CHECKPOINT

CHECKPOINT is one checkpoint's directory (ziggurat checkpoint list shows them; verify checks its hashes, which this
script does not). FILE is a safetensors file, of which ziggurat checkpoint import makes a checkpoint: the hashes are the
program's to write. Names and shapes are those of Hugging Face's models; --prefix stands before them (default:
"transformer." for GPT-2, none for Llama). DCP is handed all tensors at once; else one is in memory at a time.

Exit code 0: done; 2: a directory that cannot be read, or lacks a tensor; 3: there is no PyTorch.
"""
import argparse
import json
import os
import pathlib
import pickle
import re
import struct
import sys

try:
    import torch
except ImportError as error:
    torch = None
    NO_TORCH = error

KINDS = {"": "fp32", ".exp_avg": "exp_avg", ".exp_avg_sq": "exp_avg_sq", ".momentum_buffer": "momentum_buffer"}


def split(name):
    """"wte.weight.exp_avg": the parameter and what of it."""
    end = next((end for end in KINDS if end and name.endswith(end)), "")
    return name[:len(name) - len(end)], end


class Refused(Exception):
    """What is wrong with the input, for a person."""


def read_json(path):
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from error


class Checkpoint:
    """A checkpoint's tensors, whole."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        manifest = read_json(self.path / "manifest.json")
        if manifest.get("kind") != "ziggurat checkpoint" or not 1 <= manifest["format"] <= 2:
            raise Refused(f"{path}: is no checkpoint of format 1 or 2; one that pins state is exported first (ziggurat checkpoint export)")
        self.step, self.updates = manifest["step"], manifest["updates"]
        bits = manifest["bits"]
        if "lora" in bits:
            raise Refused(f"{path}: is of a run that trains adapters, which these forms have no names for; use the saved "
                          "adapters (ziggurat checkpoint export --model)")
        self.gpt2 = bits["model.arch"] == "gpt2"
        if bits["model.arch"] == "phi3":
            raise Refused(f"{path}: is of a Phi-3, whose q, k and v, and gate and up, are apart here, and one matrix "
                          "each elsewhere; use the saved model")
        self.sizes = {key: int(bits["model." + key]) for key in ("width", "inner", "heads", "head_size")}
        self.pieces = {}  # by tensor: (file, begin of the data, entry, note)
        for file in manifest["files"]:
            self.add(self.path / file["name"])

    def add(self, path):
        try:
            with open(path, "rb") as file:
                length, = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise Refused(f"{path}: {error}") from error
        notes = header.pop("__metadata__")
        for name, entry in header.items():
            note = notes[name].split()
            tensor = re.sub(r"\[\d+\]$", "", name) if len(note) > 2 else name
            self.pieces.setdefault(tensor, []).append((path, 8 + length, entry, note))

    def params(self):
        return sorted(name for name in self.pieces if not split(name)[1] and not name.endswith(".scale"))

    def shape(self, name, count):
        """As the engine has it: matrices are [out, in]."""
        if name.endswith("bias") or re.search(r"(norm|ln_\w+)\.weight$", name):
            return [count]
        columns = self.sizes["width"]
        if name.endswith(("mlp.c_proj.weight", "mlp.down_proj.weight")):
            columns = self.sizes["inner"]
        if name.endswith(("attn.c_proj.weight", "self_attn.o_proj.weight")):
            columns = self.sizes["heads"] * self.sizes["head_size"]
        return [count // columns, columns]

    def transposed(self, name):
        """Whether Hugging Face's model has the matrix as [in, out] (GPT-2's Conv1D)."""
        return self.gpt2 and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None

    def read(self, name):
        """The tensor in fp32, as Hugging Face's model has it."""
        parts = self.pieces[name]
        types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
        if parts[0][2]["dtype"] not in types:
            raise Refused(f"{self.path}: keeps {name} in 8 bits; resume with optimizer.state=fp32 and save again")
        kind = types[parts[0][2]["dtype"]]
        values = []
        for path, begin, entry, _ in parts:
            first, end = entry["data_offsets"]
            with open(path, "rb") as file:
                file.seek(begin + first)
                values.append(torch.frombuffer(bytearray(file.read(end - first)), dtype=kind).float())
        whole = torch.empty(sum(v.numel() for v in values))
        for (_, _, _, note), v in zip(parts, values):
            first, lines, stride = int(note[0]), *(map(int, note[2:4]) if len(note) > 2 else (1, 0))
            torch.as_strided(whole, (lines, v.numel() // lines), (stride, 1), first).copy_(v.view(lines, -1))
        base, _ = split(name)
        whole = whole.view(self.shape(base, whole.numel()))
        return whole.t().contiguous() if self.transposed(base) else whole

    def moments(self, name):
        return [end for end in KINDS if end and name + end in self.pieces]


def prefix_of(args, checkpoint):
    return args.prefix if args.prefix is not None else "transformer." if checkpoint.gpt2 else ""


def full_name(prefix, name):
    return name if name == "lm_head.weight" else prefix + name


def to_dcp(args):
    from torch.distributed import checkpoint as dcp
    source = Checkpoint(args.source)
    prefix = prefix_of(args, source)
    state = {"model": {}, "optim": {"state": {}}}
    for name in source.params():
        theirs = full_name(prefix, name)
        state["model"][theirs] = source.read(name)
        moments = source.moments(name)
        if moments:
            state["optim"]["state"][theirs] = {KINDS[end]: source.read(name + end) for end in moments}
            state["optim"]["state"][theirs]["step"] = torch.tensor(float(source.updates))
    dcp.save(state, checkpoint_id=args.target, no_dist=True)
    return len(state["model"])


def to_universal(args):
    source = Checkpoint(args.source)
    prefix, zero = prefix_of(args, source), pathlib.Path(args.target) / "zero"
    for name in source.params():
        folder = zero / full_name(prefix, name)
        folder.mkdir(parents=True, exist_ok=True)
        for end in ["", *source.moments(name)]:
            torch.save({"param": source.read(name + end), "cat_dim": 0}, folder / f"{KINDS[end]}.pt")
        torch.save(torch.tensor(float(source.updates)), folder / "step.pt")
    return len(source.params())


def from_dcp(args, like):
    from torch.distributed import checkpoint as dcp
    prefix = prefix_of(args, like)
    try:
        there = dcp.FileSystemReader(args.source).read_metadata().state_dict_metadata
    except OSError as error:
        raise Refused(f"{args.source}: is no checkpoint of torch.distributed.checkpoint ({error})") from error

    def read(name, end):
        theirs = full_name(prefix, name)
        key = f"model.{theirs}" if not end else f"optim.state.{theirs}.{KINDS[end]}"
        if key not in there:
            raise Refused(f"{args.source}: has no {key}; is the prefix {prefix!r} right (--prefix)?")
        value = torch.empty(there[key].size, dtype=there[key].properties.dtype)
        path = key.split(".", 1) if not end else ["optim", "state", theirs, KINDS[end]]
        state = value
        for part in reversed(path):
            state = {part: state}
        dcp.load(state, checkpoint_id=args.source, no_dist=True)
        return value
    return read


def from_universal(args, like):
    prefix = prefix_of(args, like)

    def read(name, end):
        path = pathlib.Path(args.source) / "zero" / full_name(prefix, name) / f"{KINDS[end]}.pt"
        try:
            return torch.load(path, map_location="cpu", weights_only=True)["param"]
        except (OSError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
            raise Refused(f"{path}: {error}; is the prefix {prefix!r} right (--prefix)?") from error
    return read


def to_file(args, like, read):
    """Writes what `like` has, one tensor after the other."""
    names = [name + end for name in like.params() for end in ["", *like.moments(name)]]
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    shapes = {}
    for name in names:
        count = sum(note_count(piece) for piece in like.pieces[name])
        shapes[name] = like.shape(split(name)[0], count)
        header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [offset, offset + 4 * count]}
        offset += 4 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{args.target}.part", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            base, end = split(name)
            value = read(base, end).float()
            if like.transposed(base):
                value = value.t()
            if list(value.shape) != shapes[name]:
                raise Refused(f"{args.source}: has {name} as {list(value.shape)}, {shapes[name]} expected")
            file.write(value.contiguous().numpy().tobytes())
    os.replace(f"{args.target}.part", args.target)
    return len(like.params())


def note_count(piece):
    count = 1
    for size in piece[2]["shape"]:
        count *= size
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("to-dcp", "to-universal", "from-dcp", "from-universal"):
        sub = commands.add_parser(command)
        sub.add_argument("source", metavar="DIR" if command.startswith("from") else "CHECKPOINT", help="what is read")
        sub.add_argument("target", metavar="FILE" if command.startswith("from") else "DIR", help="what is written")
        sub.add_argument("--prefix", help="stands before the parameters' names in the other form")
        if command.startswith("from"):
            sub.add_argument("--like", required=True, metavar="CHECKPOINT",
                             help="a checkpoint of the run that goes on: says which tensors there must be")
    args = parser.parse_args()
    if torch is None:
        print(f"checkpoint_doors.py: torch cannot be imported ({NO_TORCH}); there is no door", file=sys.stderr)
        return 3
    try:
        if args.command.startswith("from"):
            like = Checkpoint(args.like)
            read = {"from-dcp": from_dcp, "from-universal": from_universal}[args.command]
            count = to_file(args, like, read(args, like))
        else:
            count = {"to-dcp": to_dcp, "to-universal": to_universal}[args.command](args)
    except Refused as error:
        print(f"checkpoint_doors.py: {error}", file=sys.stderr)
        return 2
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        print(f"checkpoint_doors.py: {args.source}: cannot be read or written ({error!r})", file=sys.stderr)
        return 2
    print(f"{args.target}: {count} parameters with their moments")
    return 0


if __name__ == "__main__":
    sys.exit(main())
