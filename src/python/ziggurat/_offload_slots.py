"""Slots: what an offloaded model has in a store, how its bytes are lent to tensors, and what autograd saves of them.

What shares the bytes after the function that they were lent to (a slice, a transposed weight) keeps its lease until it
is gone. What autograd saves of a stored tensor is a Saved, which leases the bytes again in the backward pass.

Life of a slot (one tensor of the store): released; lent for reading or writing, while it has `_users`; released again.
A thread holds _LOCK while it lends and takes back, not while the function runs. Ctrl-C may raise KeyboardInterrupt after
any call here: who lends and who is lent are sets, so that taking back what was lent in part, or again, is harmless.
"""
import contextlib
import functools
import mmap
import threading
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ._errors import Error, UsageError

_LOCK = threading.RLock()
_STORAGES = {}  # StorageImpl -> slot; each entry's weak reference keeps the address from being another's
_NO_RESERVE = 0x4000  # MAP_NORESERVE
as_plain, _autograd = torch._C.DisableTorchFunctionSubclass, torch._C._autograd
plain_data = torch.Tensor.data
_STORE_TYPES = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
                torch.int64: "i64", torch.int32: "i32"}  # fmt: skip


class Slot:
    """A tensor of the model in the store, as one segment. `param` is the parameter whose values, or gradient, it has."""

    def __init__(self, store, name, label, like, dtype, role, strides):
        """name: in the store; label: of the parameter, for people; like: a tensor of the shape."""
        self.label, self.role, self.dtype, self.shape, self.strides = label, role, dtype, like.shape, strides
        self.nbytes = like.numel() * dtype.itemsize
        kind = _STORE_TYPES.get(dtype)
        count = like.numel() if kind else self.nbytes
        self.tensor = store.add(name, kind or "u8", (count,), role=role, segment_bytes=0)
        # NaN where the type has one, so that a reader who goes round torch's functions is not believed.
        hole = torch.full((1,), float("nan") if dtype.is_floating_point else -1, dtype=torch.float32).to(dtype)
        self.hole = hole.as_strided(like.shape, (0,) * like.dim())
        _STORAGES[hole.untyped_storage()._cdata] = self
        self.param = None  # a weak reference
        self.before_use = None  # called before the bytes are lent: an update that is under way ends first
        self.epoch = 0  # grows with each write
        self.lent = 0  # how often
        self._users = set()  # the Lendings that go on
        self._mode, self._lease, self._view = None, None, None
        self._changed, self._changed_by = False, None  # while it is lent: whether, and by which tensor, it was written
        self._watched, self._storages = [], []

    # ---- lending ----

    def settle(self):
        """Ends what is under way, and tells of writes that the store has not seen. Before each use."""
        if self.before_use is not None:
            self.before_use()
        for t, version in self._watched:
            if t._version != version:
                self._watched = []
                raise UsageError("was written through a view (a slice, or view()), which was not told to the store",
                                 self.place, "write to the parameter itself, as by p.data[...] = values, or inside "
                                 "`with zt.lent(p, mode=\"write\"):`")  # fmt: skip
        self._watched = []

    @property
    def place(self):
        return f'{"parameter" if self.role == "weight" else "gradient of"} "{self.label}"'

    def hold(self, lease, mode):
        """The bytes of `lease` are lent from now on."""
        view = self._over(lease)
        self._mode, self._lease, self._view = mode, lease, view
        self.lent += 1

    def _over(self, lease):
        flat = torch.from_dlpack(lease)
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        storage = flat.untyped_storage()
        if len(self._storages) > 8:
            for gone in [s for s in self._storages if s.expired()]:
                self._storages.remove(gone)
                _STORAGES.pop(gone.cdata, None)
        self._storages.append(StorageWeakRef(storage))
        _STORAGES[storage._cdata] = self
        return flat.as_strided(self.shape, self.strides)

    def end(self):
        """Takes the bytes back after the last use; returns whether something still shares them, which keeps the lease."""
        lease, saved = self._lease, None
        if self._changed and self._mode == "read":
            saved = self._view.clone()  # written by a function whose name does not say so
        if self._changed or self._mode != "read":
            self.epoch += 1
            param = self.param and self.param()
            if self.role == "weight" and param is not None and param is not self._changed_by:
                torch.autograd.graph.increment_version(param)
        self._mode = self._lease = self._view = self._changed_by = None
        self._changed = False
        shared = lease.views > 0
        lease.__exit__(None, None, None)
        if saved is not None:
            self.keep(saved)
        return shared

    @contextlib.contextmanager
    def overwritten(self):
        """The lease of all bytes, which are to be written, and a tensor over them; nobody may have them meanwhile."""
        with _acquire([(self, "overwrite")])[0] as lease:
            yield lease, self._over(lease)
        self.epoch += 1

    def keep(self, values):
        """Replaces the bytes by the bytes of a tensor of the same shape."""
        with self.overwritten() as (_, whole), torch.no_grad(), as_plain():
            whole.copy_(values)
            del whole

    def add(self, values):
        """Adds a tensor of the same shape."""
        with _acquire([(self, "write")])[0] as lease:
            self._over(lease).add_(values)
        self.epoch += 1

    def fetch(self, size=None, strides=None, offset=0):
        """A tensor over the leased bytes, for reading: whole, or a part. The lease ends with it."""
        with _LOCK:
            self.settle()
            if self._users:
                whole = self._view
            else:
                lease = _acquire([(self, "read")])[0]
                self.lent += 1
                whole = self._over(lease)
                lease.__exit__(None, None, None)
            return whole if size is None else whole.as_strided(size, strides, offset)

    @functools.cached_property
    def face(self):
        """A storage of the right size over addresses without memory: who counts or compares storages sees it."""
        pages = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()

    def forget(self):
        """The slot ends; its tensor leaves the store."""
        self.before_use = None
        for s in self._storages:
            _STORAGES.pop(s.cdata, None)
        _STORAGES.pop(self.hole.untyped_storage()._cdata, None)
        self.tensor.remove()


def _acquire(wanted):
    """Leases for (slot, mode) pairs: all of one store at once."""
    try:
        if len(wanted) == 1:
            slot, mode = wanted[0]
            return [slot.tensor.acquire(0, mode)]
        store = wanted[0][0].tensor._store
        if all(slot.tensor._store is store for slot, _ in wanted):
            return store.acquire_all([(slot.tensor, 0, mode) for slot, mode in wanted])
        return [slot.tensor.acquire(0, mode) for slot, mode in wanted]
    except Error as e:
        names = ", ".join(slot.place for slot, _ in wanted)
        hint = e.hint or "views of parameters that live on (slices, graphs of losses that were kept) hold their memory"
        raise type(e)(e.message, f"{names}: {e.place}" if e.place else names, hint) from e


@contextlib.contextmanager
def addresses(wanted):
    """Of the leased bytes of (slot, mode) pairs, for a thread beside the one that runs the model.

    All are acquired at once: a thread that held some while it waits for others could wait for one that waits for it.
    """
    with contextlib.ExitStack() as leases:
        yield [leases.enter_context(lease).address for lease in _acquire(wanted)]


class Lending:
    """The bytes of some stored tensors, from __init__ until give_back()."""

    def __init__(self, those):
        """those: (tensor, mode) pairs, each tensor once."""
        self._taken, self._slots = [], []
        try:
            with _LOCK:
                self._take(those)
        except BaseException:
            self.give_back()
            raise

    def _take(self, those):
        wanted = {}
        for t, mode in those:
            slot = t._slot
            if not slot._users:
                if mode != "read" or slot not in wanted:
                    wanted[slot] = mode
            elif slot._mode == "read" and mode != "read":
                raise UsageError("is lent for reading, and is to be written", slot.place,
                                 'use zt.lent(p, mode="write")')  # fmt: skip
        for slot in wanted:
            slot.settle()
        self._slots = list({t._slot: None for t, _ in those})
        if wanted:
            for (slot, mode), lease in zip(wanted.items(), _acquire(list(wanted.items()))):
                slot.hold(lease, mode)
        for t, _ in those:
            t._slot._users.add(self)
            self._taken.append((t, t._version))
            t._lendings.add(self)
            if len(t._lendings) == 1:
                plain_data.__set__(t, t._slot._view)

    def give_back(self):
        with _LOCK, as_plain():
            last = {}
            while self._taken:
                t, version = self._taken[-1]
                if self in t._lendings:
                    if t._version != version:
                        t._slot._changed, t._slot._changed_by = True, t
                    if len(t._lendings) == 1:
                        plain_data.__set__(t, t._slot.hole)
                    t._lendings.discard(self)
                last.setdefault(t._slot, []).append(t)
                self._taken.pop()
            while self._slots:
                slot = self._slots[-1]
                slot._users.discard(self)
                if not slot._users and slot._lease is not None and slot.end():
                    slot._watched += [(t, t._version) for t in last.get(slot, ())]
                self._slots.pop()

    def __del__(self):
        if self._slots:  # Ctrl-C came in between
            self.give_back()


# ---- what autograd saves ----


class Saved:
    """What autograd saves in place of a stored tensor's bytes."""

    __slots__ = ("slot", "epoch", "size", "strides", "offset")

    def __init__(self, slot, t):
        hole = t.untyped_storage()._cdata == slot.hole.untyped_storage()._cdata
        if hole and t.shape != slot.shape:
            raise UsageError("a part of it was saved for backward without its bytes", slot.place,
                             "use the parameter inside `with zt.lent(p):` there")  # fmt: skip
        self.slot, self.epoch, self.size = slot, slot.epoch, t.shape
        self.strides, self.offset = (slot.strides, 0) if hole else (t.stride(), t.storage_offset())

    def fetch(self):
        if self.epoch != self.slot.epoch:
            raise RuntimeError(f"{self.slot.place}, which is needed for the gradient, was modified after the forward "
                               "pass: run the forward pass again, or step the optimizer after the backward pass")  # fmt: skip
        return self.slot.fetch(self.size, self.strides, self.offset)


class Kept:
    """What autograd saves of a tensor that stays in memory."""

    __slots__ = ("values", "version")

    def __init__(self, t):
        # A function's own output, kept as it is, would keep the function, and that the output: for ever.
        self.values, self.version = t if t.grad_fn is None else t.detach(), t._version

    def fetch(self):
        if self.values._version != self.version:  # torch does not look where there are hooks
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                               f"operation: a {self.values.dtype} tensor of {list(self.values.shape)} is at version "
                               f"{self.values._version}; expected version {self.version} instead")  # fmt: skip
        return self.values


def saved_of(t):
    """A Saved for a stored tensor, or for a view of its bytes; None for others."""
    with as_plain():
        if t.layout == torch.strided and t.device.type == "cpu":
            slot = _STORAGES.get(t.untyped_storage()._cdata)
            if slot is not None and t.dtype == slot.dtype:
                return Saved(slot, t)
    return None


def pack(t):
    """For torch.autograd.graph.saved_tensors_hooks."""
    return saved_of(t) or Kept(t)


def unpack(saved):
    return saved.fetch()


def unhooked():
    """Whether hooks for saved tensors may be pushed: nobody else's (a checkpoint's) would be hidden by them."""
    return _autograd._saved_tensors_hooks_is_enabled() and _autograd._top_saved_tensors_default_hooks(False) is None


def push_hooks():
    _autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_hooks():
    """Those of push_hooks(); where Ctrl-C came in between, others may lie above them, which stay."""
    top = _autograd._top_saved_tensors_default_hooks(False)
    if top is not None and top[0] is pack:
        _autograd._pop_saved_tensors_default_hooks()
