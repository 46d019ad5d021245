"""The tiered store: named tensors over host memory and NVMe, within budgets."""
import contextlib
import math
import os
import re

from . import _core, _store_files
from ._errors import UsageError
from ._records import Statistics

_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "uint16": "u16", "uint8": "u8",
}  # fmt: skip
_SIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "u16": 2, "u8": 1}
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def bytes_of(size, what="size"):
    """Bytes of a number, or of a text such as "64MiB" or "1.5 GB"."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?)B?\s*", size)
        if not found:
            raise UsageError(f'"{size}" is no size', what, 'expected bytes, or a text such as "64MiB"')
        unit = 1024 ** "KMGT".find(found[2]) * 1024 if found[3] and found[2] else _UNITS[found[2]]
        return int(float(found[1]) * unit)
    if not hasattr(size, "__index__") and not (isinstance(size, float) and math.isfinite(size)):
        raise UsageError(f"{size!r} is no size", what, 'expected bytes, or a text such as "64MiB"')
    return int(size)


def _drives(drives):
    """(path, bytes) of each drive, from {path: size} or pairs."""
    path = (str, os.PathLike)
    pairs = [drives] if isinstance(drives, path) else list(drives.items() if hasattr(drives, "items") else drives)
    if any(isinstance(pair, path) for pair in pairs):
        raise UsageError(f"{drives!r} has no size", "drives", 'expected {path: size}, as {"/mnt/nvme0": "64GiB"}')
    return [(os.fspath(path), bytes_of(size, f"drives: {path}")) for path, size in pairs]


def dtype_name(dtype):
    """ "f32" for "f32", "float32", numpy.float32, torch.float32 and their like."""
    text = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    text = text.rpartition(".")[2]
    name = _DTYPES.get(text, text)
    if name not in _SIZES:
        raise UsageError(f"{dtype!r} is none of the store's", "dtype", "one of " + ", ".join(sorted(_DTYPES)))
    return name


def _shape(shape):
    return (int(shape),) if not hasattr(shape, "__iter__") else tuple(int(n) for n in shape)


def _bytes(values):
    """The bytes of an array of NumPy's or torch's, or of a buffer."""
    if hasattr(values, "detach"):
        import torch

        return memoryview(values.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    if hasattr(values, "dtype"):  # not all of NumPy's types can be seen as a buffer
        return memoryview(values.reshape(-1).view("u1"))
    view = memoryview(values)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


class Tensor:
    """A tensor of a store, cut into segments that move one by one.

    Made by Store.add(). It has no content until it is written. Attributes: name, dtype ("f32", ...), shape, segments
    (their number), nbytes, declared (the other arguments of add()).
    """

    def __init__(self, store, number, name, dtype, shape, declared):
        self._store, self._number, self.declared = store, number, declared
        self.name, self.dtype, self.shape = name, dtype, shape
        self.segments = store._core.segments(number)
        self.nbytes = math.prod(shape) * _SIZES[dtype]

    def acquire(self, i=0, mode="read", tier="host"):
        """A lease of segment i: waits until its bytes are at the tier.

        mode  "read": others may read too; "write": read and modify; "overwrite": every byte is written before it is
              read, so nothing is fetched
        Ctrl-C ends the wait. Raises UsageError for content that was never written, and for a wait that would never
        end; MemoryLimitError where leases leave no room; IoError after a failed transfer.
        """
        return self._store._core.acquire(self._number, i, mode, tier)

    def prefetch(self, i=0, tier="host"):
        """A hint: brings segment i to the tier if there is room. Does not wait."""
        self._store._core.prefetch(self._number, i, tier)

    def pin(self, i=0, tier="host"):
        """Keeps segment i at the tier until the Pin that is returned is released."""
        return self._store._core.pin(self._number, i, tier)

    def has_content(self, i=0):
        """Whether segment i was written, and not discarded since."""
        return self._store._core.has_content(self._number, i)

    def discard(self):
        """Drops the content, which is not written to the drives any more. Waits for leases."""
        for i in range(self.segments):
            self._store._core.discard(self._number, i)

    def write(self, values):
        """Sets all of the content from an array of the tensor's dtype (NumPy's, torch's), or from a buffer of bytes.

        For bfloat16, which NumPy has not, an array of its bits (uint16) is taken too.
        """
        given = dtype_name(values.dtype) if hasattr(values, "dtype") else "u8"
        if given not in (self.dtype, "u8", "u16" if self.dtype == "bf16" else ""):
            raise UsageError(f"are {values.dtype}", f'values of "{self.name}"',
                             f"expected {self.dtype}: convert them first, or give their bytes")  # fmt: skip
        source = _bytes(values)
        if source.nbytes != self.nbytes:
            raise UsageError(f"has {source.nbytes} bytes", f'values of "{self.name}"', f"expected {self.nbytes}")
        at = 0
        for i in range(self.segments):
            with self.acquire(i, "overwrite") as lease, memoryview(lease) as view:
                view.cast("B")[:] = source[at : at + lease.nbytes]
                at += lease.nbytes

    def read(self):
        """All of the content as a new NumPy array of the tensor's shape."""
        import numpy as np

        parts = []
        for i in range(self.segments):
            with self.acquire(i) as lease:
                parts.append(lease.numpy().copy())
        return np.concatenate(parts).reshape(self.shape)

    def explain(self):
        """For each segment where it is, its leases, its next use, and what an acquire of it waits for: as text."""
        return self._store._core.explain(self._number)

    def remove(self):
        """Drops content and space; the name is free again. UsageError while there are leases or pins of it."""
        self._store._core.remove(self._number)
        self._store._tensors.pop(self.name, None)

    def __reduce__(self):
        raise TypeError("a tensor of a store cannot be pickled or copied")

    def __repr__(self):
        return f"<Tensor {self.name!r} {self.dtype}{list(self.shape)}, {self.segments} segments>"


class Store:
    """Tensors that are larger than memory: segments over host memory and NVMe, within budgets never exceeded.

        import ziggurat as zg
        with zg.Store(host_bytes="1GiB", drives={"/mnt/nvme0": "64GiB"}) as store:
            t = store.add("w", "float32", (4096, 4096), segment_bytes="8MiB")
            for i in range(t.segments):
                with t.acquire(i, mode="overwrite") as lease:
                    lease.numpy()[:] = 0
            with store.step():          # what is done here is fetched ahead the next time
                for i in range(t.segments):
                    with t.acquire(i, mode="write") as lease:
                        lease.numpy()[:] += 1

    host_bytes   budget of host memory: bytes, or a text such as "1GiB"
    drives       a directory on each drive, and the size of the file that is made there: {path: size} or pairs; none:
                 everything stays in memory
    policy       of eviction: "next-use", "lru" or "clock"
    backend      "auto", "io_uring", "libaio", "threads", or "ram" (memory instead of drives, for tests)
    queue_depth  blocks in flight on a drive; None: as many as make 32 to 64 MiB, a quarter of host_bytes over the drives
    read_ahead   bytes fetched ahead; None: half of the budget
    verify       checksums of what lies on NVMe
    protect_reads  for looking for mistakes: who writes to bytes that were acquired for reading, which torch does not
                 refuse, ends the process there and then (SIGSEGV; `python -X faulthandler` names the line)

    Any thread may use a store. add(), remove(), demote() and close() need it alone, and refuse while another thread
    is inside a call. A forked child cannot use it (ForkError); start workers by spawn, or open a store in each.
    """

    def __init__(self, *, host_bytes, drives=(), device_bytes=0, policy="next-use", queue_depth=None, backend="auto",
                 block_size=1 << 20, verify=True, read_ahead=None, write_ahead=True,
                 protect_reads=False):  # fmt: skip
        self._core = _core.Store.open(
            bytes_of(host_bytes, "host_bytes"), _drives(drives), bytes_of(device_bytes, "device_bytes"), policy,
            queue_depth or 0, backend, backend != "auto", bytes_of(block_size, "block_size"),
            bytes_of(read_ahead or 0, "read_ahead"), verify, write_ahead, protect_reads,
        )  # fmt: skip
        self._tensors = {}

    def add(self, name, dtype, shape, *, role="other", segment_bytes=8 << 20, lowest="nvme", priority=0):
        """Declares a tensor of this dtype and shape; it has no content until it is written.

        segment_bytes  a segment moves as a whole; some MiB are a good size; 0: one segment
        lowest         the lowest tier that it may be demoted to: "nvme" or "host"
        priority       -100 to 100: tensors of a lower priority are evicted first
        role           "weight", "gradient", "optimizer state", "activation", "other": for reports
        """
        dtype, shape = dtype_name(dtype), _shape(shape)
        size = bytes_of(segment_bytes, "segment_bytes")
        number = self._core.add(name, dtype, math.prod(shape), role, size // _SIZES[dtype] * _SIZES[dtype], lowest,
                                priority)  # fmt: skip
        declared = {"dtype": dtype, "shape": list(shape), "role": role, "segment_bytes": size, "lowest": lowest,
                    "priority": priority}  # fmt: skip
        self._tensors[name] = Tensor(self, number, name, dtype, shape, declared)
        return self._tensors[name]

    def __getitem__(self, name):
        if name not in self._tensors:
            raise KeyError(f"the store has no tensor {name!r}")
        return self._tensors[name]

    def __contains__(self, name):
        return name in self._tensors

    def __iter__(self):
        return iter(self._tensors)

    def acquire_all(self, wanted):
        """Leases of several segments at once, or none: wanted is a list of (tensor, i, mode).

        A thread that needs several segments takes them so: it holds none while it waits, which no deadlock can follow.
        """
        return self._core.acquire_all([(t._number, i, mode, "host") for t, i, mode in wanted])

    @contextlib.contextmanager
    def step(self, name="step"):
        """A step that repeats: its accesses are recorded, and fetched ahead in the next step of this name."""
        self._core.step_begin(name)
        try:
            yield self
        finally:
            self._core.step_end()

    def checkpoint(self, directory, step=0):
        """Writes all tensors and their contents as a new checkpoint in `directory`; returns the path of its manifest.

        One segment is in memory at a time. It has its name only when all of it is on the drive, and hashes of all that
        is in it: `ziggurat checkpoint show` and `verify` read it. Nobody should write tensors meanwhile. The state of
        optimizers in this store is not in it, nor are activations. Raises UsageError for a tensor that was written in
        part; IoError or OSError.
        """
        return _store_files.save(self, directory, step)

    @classmethod
    def open(cls, checkpoint, **options):
        """A new store with the tensors of checkpoint(): its manifest, its directory, or the one above (the newest).

        options are those of Store(). All hashes are compared first; UsageError where it is damaged.
        """
        store = cls(**options)
        try:
            _store_files.load(store, checkpoint)
        except BaseException:
            with contextlib.suppress(UsageError):
                store.close()
            raise
        return store

    def drain(self):
        """Waits until nothing moves."""
        self._core.drain()

    def demote(self):
        """Begins to demote every segment as low as it may be. UsageError while there are leases or pins."""
        self._core.demote()

    def statistics(self):
        """What the store has done so far: a Statistics object."""
        return Statistics(self._core.statistics())

    def state(self):
        """What is queued, moving and leased, as text."""
        return self._core.state()

    @property
    def closed(self):
        return self._core.closed

    def close(self):
        """Drops all content and removes the files. UsageError while leases, views or pins live. Again: nothing."""
        self._core.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            return self.close()
        with contextlib.suppress(UsageError):  # leases of the frames that the error passes; it must not hide it
            self.close()

    def __reduce__(self):
        raise TypeError("a store cannot be pickled or copied")

    def __repr__(self):
        return f"<Store, {'closed' if self.closed else f'{len(self._tensors)} tensors'}>"
