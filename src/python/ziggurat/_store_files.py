"""Store.checkpoint() and Store.open(): the tensors of a store as a checkpoint, a segment in memory at a time."""
import json
import secrets

from . import _checkpoints
from ._errors import UsageError

# Other types are kept as bytes: the program's checkpoints have none of them.
_NAMES = {"f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "u8": "U8"}
_KEY = "ziggurat.store"


def _entry(t):
    if t.dtype in _NAMES:
        return _checkpoints.Entry(t.name, _NAMES[t.dtype], list(t.shape) or [1])
    return _checkpoints.Entry(t.name, "U8", [t.nbytes])


def _has_content(t):
    written = [t.has_content(i) for i in range(t.segments)]
    if any(written) and not all(written):
        raise UsageError(f"has {written.count(False)} segments that were never written", f'tensor "{t.name}"',
                         "write or discard all of it before")  # fmt: skip
    return t.nbytes > 0 and all(written)


def save(store, directory, step):
    """Writes all tensors but activations into a new checkpoint in `directory`; the path of its manifest."""
    tensors = [t for t in store._tensors.values() if t.declared["role"] != "activation"]
    plan = [(t, _entry(t)) for t in tensors if _has_content(t)]
    kept = {t.name for t, _ in plan}
    config = {_KEY: [{**t.declared, "name": t.name, "content": t.name in kept} for t in tensors]}
    with _checkpoints.Writer(directory, step, [entry for _, entry in plan]) as writer:
        for t, entry in plan:
            for i in range(t.segments):
                with t.acquire(i) as lease:
                    writer.put(entry, lease.address, lease.nbytes)
        return writer.commit(secrets.token_hex(8), {_KEY: "1"}, config)


def load(store, path):
    """Adds the tensors of what save() has written, with their contents."""
    with _checkpoints.Reader(path) as saved:
        declared = json.loads(saved.manifest["config"]).get(_KEY)
        if declared is None:
            raise UsageError("is not of a store", saved.path, "name what Store.checkpoint() has returned")
        for entry in declared:
            content = entry.pop("content")
            t, at = store.add(**entry), 0
            for i in range(t.segments if content else 0):
                with t.acquire(i, "overwrite") as lease:
                    saved.read(t.name, at, lease.address, lease.nbytes)
                    at += lease.nbytes
