"""save() and load() of the optimizers: their state as a checkpoint, a segment in memory at a time."""
import json
import secrets

import torch

from . import _checkpoints
from ._errors import UsageError
from ._offload_tensors import lent

_MOMENTS = {"fp32": "F32", "split": "F32", "bf16": "BF16", "int8": "U8"}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


class _Part:
    """One tensor that a checkpoint has of a parameter: the master, or a moment."""

    def __init__(self, optimizer, p, key, moment):
        core = optimizer._core
        self.core, self.p, self.number = core, p, optimizer._numbers[p]
        self.count, self.per_segment, self.block = core.extent(self.number)
        names = optimizer._group_names(p)
        self.part = "master" if moment is None else str(moment)
        self.name = key if moment is None else f"{key}.{names[moment]}"
        self.dtype = "F32" if moment is None else _MOMENTS[optimizer._format]
        blocks = -(-self.count // self.block)
        shape = [blocks * self.block] if self.dtype == "U8" else list(p.shape) or [1]
        self.entries = [_checkpoints.Entry(self.name, self.dtype, shape)]
        if self.dtype == "U8":
            self.entries.append(_checkpoints.Entry(self.name + ".scale", "F32", [blocks]))

    def segments(self):
        """(number, first element, elements) of each."""
        return [(s, s * self.per_segment, min(self.per_segment, self.count - s * self.per_segment))
                for s in range(-(-self.count // self.per_segment))]  # fmt: skip

    def write(self, writer, weights):
        if self.dtype == "U8":
            return self._write_codes(writer)
        own = self.part == "master" and weights.dtype == torch.float32
        for segment, first, count in self.segments():
            if own:
                writer.put(self.entries[0], weights.data_ptr() + 4 * first, 4 * count)
                continue
            values = torch.empty(count)
            self.core.read(self.number, self.part, weights.data_ptr(), values.data_ptr(), segment)
            values = values.to(_DTYPES[self.dtype])
            writer.put(self.entries[0], values.data_ptr(), values.nbytes)

    def _write_codes(self, writer):
        scales = torch.empty(self.entries[1].bytes // 4)
        for segment, first, count in self.segments():
            codes = torch.empty(-(-count // self.block) * self.block, dtype=torch.uint8)
            at = scales.data_ptr() + 4 * (first // self.block)
            self.core.copy_codes(self.number, int(self.part), True, codes.data_ptr(), at, segment)
            writer.put(self.entries[0], codes.data_ptr(), codes.nbytes)
        writer.put(self.entries[1], scales.data_ptr(), scales.nbytes)

    def check(self, saved):
        """Throws where the checkpoint has not this tensor, or in a form that does not fit."""
        for entry in self.entries:
            found = saved.nbytes(entry.name)
            if found is None:
                raise UsageError("is not in it", f"{saved.path}: {entry.name}", "is it of this model and optimizer?")
            if (saved.dtype(entry.name) == "U8") != (entry.dtype == "U8"):
                raise UsageError(f"is in {saved.dtype(entry.name)}", f"{saved.path}: {entry.name}",
                                 'moments in 8 bits are for optimizers with state="int8" alone')  # fmt: skip
            wanted = entry.bytes // _DTYPES[entry.dtype].itemsize * _DTYPES[saved.dtype(entry.name)].itemsize
            if found != wanted:
                raise UsageError(f"has {found} bytes, {wanted} expected", f"{saved.path}: {entry.name}",
                                 "is it of this model?")  # fmt: skip

    def read(self, saved, weights):
        if self.dtype == "U8":
            return self._read_codes(saved)
        own = self.part == "master" and weights.dtype == torch.float32
        dtype = _DTYPES[saved.dtype(self.name)]
        for segment, first, count in self.segments():
            if own:
                saved.read(self.name, 4 * first, weights.data_ptr() + 4 * first, 4 * count)
                continue
            values = torch.empty(count, dtype=dtype)
            saved.read(self.name, first * dtype.itemsize, values.data_ptr(), values.nbytes)
            values = values.float()
            self.core.write(self.number, self.part, weights.data_ptr(), values.data_ptr(), segment)

    def _read_codes(self, saved):
        for segment, first, count in self.segments():
            blocks, at = -(-count // self.block), first // self.block
            codes = torch.empty(blocks * self.block, dtype=torch.uint8)
            scales = torch.empty(blocks)
            saved.read(self.name, first, codes.data_ptr(), codes.nbytes)
            saved.read(self.name + ".scale", 4 * at, scales.data_ptr(), scales.nbytes)
            self.core.copy_codes(self.number, int(self.part), False, codes.data_ptr(), scales.data_ptr(), segment)


def _parts(optimizer, p, key):
    if hasattr(p, "to_local"):
        raise UsageError("is spread over ranks", f"parameter {key}",
                         "save state_dict() by torch.distributed.checkpoint")  # fmt: skip
    moments = range(len(optimizer._group_names(p)))
    return [_Part(optimizer, p, key, moment) for moment in (None, *moments)] if p.numel() > 0 else []


def _plain(key, value):
    """A group's option as JSON has it."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, tuple):
        value = list(value)
    try:
        json.dumps(value)
    except TypeError:
        raise UsageError(f"is a {type(value).__name__}", f'option "{key}" of a group',
                         "numbers, texts and lists of them can be saved") from None  # fmt: skip
    return value


def save(optimizer, directory):
    """Writes all state and the fp32 masters into a new checkpoint in `directory`; the path of its manifest."""
    optimizer.flush()
    params = [(p, key) for p, key in optimizer._keys.items() if "step" in optimizer.state.get(p, {})]
    plan = [(p, _parts(optimizer, p, key)) for p, key in params]
    steps = {key: int(optimizer.state[p]["step"]) for p, key in params}
    groups = [{k: _plain(k, v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group, there in zip(groups, optimizer.param_groups):
        group["params"] = [optimizer._keys[p] for p in there["params"]]
    kind = type(optimizer).__name__
    config = {"ziggurat.torch": kind, "state": optimizer._format, "seed": optimizer._seed, "groups": groups,
              "steps": steps}  # fmt: skip
    bits = {"optimizer.type": kind, "optimizer.state": optimizer._format, "seed": str(optimizer._seed)}
    entries = [entry for _, parts in plan for part in parts for entry in part.entries]
    with _checkpoints.Writer(directory, max(steps.values(), default=0), entries) as writer:
        for p, parts in plan:
            with lent(p):
                weights = optimizer._known_weights(p)
                for part in parts:
                    part.write(writer, weights)
                del weights
        return writer.commit(secrets.token_hex(8), bits, config)


def load(optimizer, path):
    """Takes weights and state of what save() has written; nothing is changed where that does not fit."""
    optimizer.flush()
    with _checkpoints.Reader(path) as saved:
        config = json.loads(saved.manifest["config"])
        _compare(optimizer, saved.path, config)
        keys = [key for group in config["groups"] for key in group["params"]]
        plan = []
        for p, key in zip(optimizer._numbered(), keys):
            plan.append((p, key, _parts(optimizer, p, key) if key in config["steps"] else []))
            for part in plan[-1][2]:
                part.check(saved)
        for group, old in zip(optimizer.param_groups, config["groups"]):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in old.items() if k != "params"})
        for p, key, parts in plan:
            optimizer.state.pop(p, None)
            if key in config["steps"]:
                with lent(p, mode="write"):
                    optimizer.state[p], weights = optimizer._begin_state(p, config["steps"][key])
                    for part in parts:
                        part.read(saved, weights)
                    optimizer._written(p, weights)
                    del weights
                optimizer._versions[p] = p._version


def _compare(optimizer, path, config):
    kind, found = type(optimizer).__name__, config.get("ziggurat.torch")
    if found != kind:
        raise UsageError(f"is of {found or 'a training run'}, not of {kind}", path,
                         "load it into an optimizer of that class; ziggurat train resumes its own")  # fmt: skip
    there = [len(group["params"]) for group in config["groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise UsageError(f"has groups of {there} parameters", path, f"this optimizer's have {here}")
    if optimizer._format in ("bf16", "int8") and config["seed"] != optimizer._seed:
        raise UsageError(f"was made with seed {config['seed']}", path,
                         f"make the optimizer with that seed, not {optimizer._seed}: rounding follows it")  # fmt: skip
