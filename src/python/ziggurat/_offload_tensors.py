"""Tensors of a torch model whose bytes lie in a store, and are lent to one operation at a time.

A stored tensor is a torch.Tensor of the right shape, type and device over one element of memory. Every function of
torch that is given one calls __torch_function__ here, which leases the bytes from the store, puts them in the tensor's
place, runs the function and takes them back. So it does not matter who uses a parameter, where, or in which order.

What shares the bytes after the function (a slice, a transposed weight) keeps its lease until it is gone. What autograd
saves of a stored tensor is a Saved, which leases the bytes again in the backward pass.

Life of a slot (one tensor of the store): released; lent for reading or writing, while `_uses` > 0; released again. A
thread holds _LOCK while it lends and takes back, not while the function runs.
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
_as_plain = torch._C.DisableTorchFunctionSubclass
_plain_data, _plain_grad = torch.Tensor.data, torch.Tensor.grad
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
        self._uses, self._mode, self._lease, self._view = 0, None, None, None
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
        self._mode, self._lease, self._view = mode, lease, self._over(lease)
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
        """Replaces the bytes by those of a tensor of the same shape."""
        with self.overwritten() as (_, whole), torch.no_grad(), _as_plain():
            whole.copy_(values)
            del whole

    def add(self, values):
        """Adds a tensor of the same shape."""
        with _acquire([(self, "write")])[0] as lease:
            self._over(lease).add_(values)
        self.epoch += 1

    @contextlib.contextmanager
    def raw(self, mode):
        """The address of the leased bytes, for a thread beside the one that runs the model."""
        with _acquire([(self, mode)])[0] as lease:
            yield lease.address

    def fetch(self, size=None, strides=None, offset=0):
        """A tensor over the leased bytes, for reading: whole, or a part. The lease ends with it."""
        with _LOCK:
            self.settle()
            if self._uses:
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


class _Lending:
    """The bytes of some stored tensors, from __init__ until give_back()."""

    def __init__(self, those):
        """those: (tensor, mode) pairs, each tensor once."""
        self._taken = []
        with _LOCK:
            wanted = {}
            for t, mode in those:
                slot = t._slot
                if slot._uses == 0:
                    if mode != "read" or slot not in wanted:
                        wanted[slot] = mode
                elif slot._mode == "read" and mode != "read":
                    raise UsageError("is lent for reading, and is to be written", slot.place,
                                     'use zt.lent(p, mode="write")')  # fmt: skip
            for slot in wanted:
                slot.settle()
            if wanted:
                for (slot, mode), lease in zip(wanted.items(), _acquire(list(wanted.items()))):
                    slot.hold(lease, mode)
            for t, _ in those:
                t._slot._uses += 1
                t._depth += 1
                self._taken.append((t, t._version))
                if t._depth == 1:
                    _plain_data.__set__(t, t._slot._view)

    def give_back(self):
        with _LOCK, _as_plain():
            for t, version in reversed(self._taken):
                slot = t._slot
                t._depth -= 1
                slot._uses -= 1
                if t._version != version:
                    slot._changed, slot._changed_by = True, t
                if t._depth == 0:
                    _plain_data.__set__(t, slot.hole)
                if slot._uses == 0 and slot.end():
                    slot._watched.append((t, t._version))


class lent:
    """`with zt.lent(p, mode="write"): ...`: the parameter's bytes stay in its place for the length of the block.

    tensors  parameters of an offloaded model, or their gradients; others are left alone
    mode     "read", "write", or "overwrite", which fetches nothing and must be followed by writing all of it
    For code that goes round torch's functions, as by data_ptr(). Raises MemoryLimitError where the host budget has no
    room for all of them at once.
    """

    def __init__(self, *tensors, mode="read"):
        self._those = [(t, mode) for t in dict.fromkeys(tensors) if isinstance(t, Stored)]

    def __enter__(self):
        with _as_plain():
            self._lending = _Lending(self._those)
        return self

    def __exit__(self, *error):
        self._lending.give_back()


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


def pack(t):
    """For torch.autograd.graph.saved_tensors_hooks: a Saved for a stored tensor, or for a view of its bytes."""
    with _as_plain():
        if t.layout == torch.strided and t.device.type == "cpu":
            slot = _STORAGES.get(t.untyped_storage()._cdata)
            if slot is not None and t.dtype == slot.dtype:
                return Saved(slot, t)
        # A function's own output, kept as it is, would keep the function, and that the output: for ever.
        return t if t.grad_fn is None else t.detach()


def unpack(saved):
    return saved.fetch() if type(saved) is Saved else saved


def unhooked():
    """Whether hooks for saved tensors may be pushed: nobody else's (a checkpoint's) would be hidden by them."""
    autograd = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(False) is None


# ---- functions of torch ----

_GETTERS = ("shape dtype device requires_grad is_leaf grad_fn layout ndim is_sparse is_sparse_csr is_cuda is_cpu is_meta "
            "is_quantized is_mkldnn is_nested is_xpu is_mps _version _backward_hooks output_nr retains_grad itemsize "
            "nbytes _base _cdata grad name names is_xla is_ipu is_vulkan is_maia _post_accumulate_grad_hooks").split()  # fmt: skip
_METHODS = ("size dim numel nelement ndimension element_size is_floating_point is_complex is_signed register_hook "
            "register_post_accumulate_grad_hook requires_grad_ retain_grad get_device __len__ __hash__ is_shared "
            "_is_view is_inference is_conj is_neg _is_zerotensor has_names").split()  # fmt: skip


def _functions_without_bytes():
    out = {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.is_signed, torch.is_conj}
    for name in _GETTERS:
        if (attribute := getattr(torch.Tensor, name, None)) is not None:
            out.update(getattr(attribute, which) for which in ("__get__", "__set__") if hasattr(attribute, which))
    out.update(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    return out


_WITHOUT_BYTES = _functions_without_bytes()
_EXPORTS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.storage}
_EACH = {"_amp_foreach_non_finite_check_and_unscale_"}  # and _foreach_*_: in place, one tensor after the other


def _writes(name):
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in (
        "__invert__", "__index__", "__int__", "__init__"))  # fmt: skip


def _stored_in(values, found):
    for v in values:
        if isinstance(v, Stored):
            found.append(v)
        elif isinstance(v, (list, tuple)):
            _stored_in(v, found)


def _detached(t):
    out = torch.Tensor._make_subclass(StoredTensor, t._slot.hole)
    out._slot = t._slot
    return out


def _set_data(t, values):
    slot = t._slot
    if isinstance(values, Stored) and values._slot is slot:
        return
    if values.shape != slot.shape or values.dtype != slot.dtype or values.device != slot.hole.device:
        raise UsageError(f"is to become {values.dtype}{list(values.shape)} on {values.device}", slot.place,
                         "change a model's type, device and shapes before zt.offload()")  # fmt: skip
    with torch.no_grad():
        _run(torch.Tensor.copy_, "copy_", (t, values), {})


def _data_ptr(t):
    if t._depth == 0 and isinstance(t, torch.nn.Parameter):
        raise UsageError("has no address that stays: its bytes move", t._slot.place,
                         "take the address inside `with zt.lent(p):`")  # fmt: skip
    if t._depth == 0:  # what was detached keeps its lease from now on
        t._depth = 1 << 30
        _plain_data.__set__(t, t._slot.fetch())
    return torch.Tensor.data_ptr(t)


def _each(func, name, args, kwargs):
    """A function in place of lists of tensors, one position of the lists after the other, so that one is lent."""
    count = len(args[0])
    for i in range(count):
        one = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        _run(func, name, tuple(one), kwargs)


class Stored:
    """What StoredParameter and StoredTensor have in common: `_slot`, and how often the bytes are in their place."""

    _slot, _depth = None, 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with _as_plain():
            if func in _WITHOUT_BYTES:
                return func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if func is torch.Tensor.detach or func is torch.detach or func == _plain_data.__get__:
                return _detached(args[0])
            if func == _plain_data.__set__:
                return _set_data(*args)
            if func is torch.Tensor.data_ptr:
                return _data_ptr(*args)
            if func is torch.Tensor.untyped_storage and args[0]._depth == 0:
                return args[0]._slot.face
            if func in _EXPORTS:
                return func(args[0]._slot.fetch(), *args[1:], **kwargs)
            if (name in _EACH or (name.startswith("_foreach_") and name.endswith("_"))) and len(args[0]) > 1:
                return _each(func, name, args, kwargs)
            return _run(func, name, args, kwargs)

    def __repr__(self):
        values = self._slot.fetch()
        return repr(torch.nn.Parameter(values, self.requires_grad) if isinstance(self, torch.nn.Parameter) else values)

    def __deepcopy__(self, memo):
        with torch.no_grad():
            out = self.clone()
        out = torch.nn.Parameter(out, self.requires_grad) if isinstance(self, torch.nn.Parameter) else out
        return memo.setdefault(id(self), out)

    def __reduce_ex__(self, protocol):
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def is_stored(p):
    """Whether p is a parameter of an offloaded model, or its gradient."""
    return isinstance(p, Stored)


def _run(func, name, args, kwargs):
    found = []
    _stored_in(args, found)
    _stored_in(kwargs.values(), found)
    written = []
    if _writes(name):
        first = args[:1] or [kwargs[k] for k in ("tensor", "input", "self") if k in kwargs]
        _stored_in(first, written)
    if kwargs.get("out") is not None:
        _stored_in([kwargs["out"]], written)
    lending = _Lending([(t, "write" if any(t is w for w in written) else "read") for t in _once(found)])
    try:
        plain = {id(t): torch.Tensor.detach(t) for t in found
                 if not t.requires_grad and not any(t is w for w in written)}  # fmt: skip
        if plain:
            args, kwargs = _with(plain, args), {k: _with(plain, v) for k, v in kwargs.items()}
        out = _call(func, found, args, kwargs)
        if plain:  # a function that returns what it was given
            out = next((t for t in found if plain.get(id(t)) is out), out)
        return out
    finally:
        lending.give_back()


def _with(plain, value):
    """Hooks for saved tensors are given what needs no gradient itself, and keep it: so they see a plain tensor."""
    if isinstance(value, Stored):
        return plain.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_with(plain, v) for v in value)
    return value


def _call(func, found, args, kwargs):
    if not torch.is_grad_enabled():
        return func(*args, **kwargs)
    for t in found:
        if isinstance(t, torch.nn.Parameter):
            watch_gradient(t)
    if not unhooked():
        return func(*args, **kwargs)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return func(*args, **kwargs)


def _once(tensors):
    return tensors if len(tensors) == 1 else list({id(t): t for t in tensors}.values())


class StoredTensor(Stored, torch.Tensor):
    """A stored tensor that is no parameter: a gradient, or a parameter's values (`p.data`, `p.detach()`)."""


class StoredParameter(Stored, torch.nn.Parameter):
    """A parameter whose values lie in the store, and whose gradient does. Made of one that lies in memory."""

    @property
    def grad(self):
        with _as_plain():
            return self._own.gradient() if self._own.has_gradient else _plain_grad.__get__(self)

    @grad.setter
    def grad(self, values):
        self._own.set_gradient(self, values)

    @grad.deleter
    def grad(self):
        self._own.set_gradient(self, None)


class Gradient:
    """The gradient of a stored parameter: its slot, made when it becomes trainable, and whether there is one."""

    def __init__(self, make):
        self._make, self.slot, self.has_gradient, self.hooked = make, None, False, False
        self.pending = False  # an update that was begun reads it
        self._dropped = False  # and it is to be dropped then

    def gradient(self):
        out = torch.Tensor._make_subclass(StoredTensor, self.slot.hole)
        out._slot = self.slot
        return out

    def add(self, p, values):
        """Adds one backward pass's gradient to what the micro-batches before have left."""
        if values.is_sparse:
            raise UsageError("is sparse", f'gradient of "{p._slot.label}"',
                             "dense gradients are offered: make the embedding with sparse=False")  # fmt: skip
        if self.slot is None:
            self.slot = self._make(p)
        if not self.has_gradient:
            self.slot.keep(values)
            self.has_gradient = True
            return
        self.slot.add(values)

    def update_done(self):
        """The update that was begun is done with it."""
        self.pending = False
        if self._dropped:
            self._dropped = False
            self.slot.tensor.discard()

    def set_gradient(self, p, values):
        with _as_plain():
            _plain_grad.__set__(p, None)
        if values is None:
            if self.has_gradient and self.pending:
                self._dropped = True
            elif self.has_gradient:
                self.slot.tensor.discard()
            self.has_gradient = False
            return
        if isinstance(values, Stored) and values._slot is self.slot:
            return
        if values.shape != p.shape:
            raise UsageError(f"is to become {list(values.shape)}", f'gradient of "{p._slot.label}"',
                             f"the parameter has {list(p.shape)}")  # fmt: skip
        p._slot.settle()
        self.has_gradient = False
        self.add(p, values.detach())


@torch.no_grad()
def _after_accumulation(p):
    """A parameter's hook: its gradient leaves for the store as soon as it is made."""
    with _as_plain():
        values = _plain_grad.__get__(p)
        if values is None:
            return
        if p._slot.before_use is not None:
            p._slot.before_use()
        p._own.add(p, values)
        _plain_grad.__set__(p, None)


def watch_gradient(p):
    """Gradients of p go to the store from now on, where it has any."""
    if p.requires_grad and p.is_leaf and not p._own.hooked:
        p._own.hooked = p.register_post_accumulate_grad_hook(_after_accumulation)


def make_stored(p, slot, make_gradient):
    """The parameter's values were written to the slot: its own memory is given up."""
    p.__class__ = StoredParameter
    p._slot, p._depth, p._own = slot, 0, Gradient(make_gradient)
    slot.param = weakref.ref(p)
    if p.requires_grad:
        p._own.slot = make_gradient(p)
    with _as_plain():
        gradient = _plain_grad.__get__(p)
        _plain_grad.__set__(p, None)
        _plain_data.__set__(p, slot.hole)
        if gradient is not None:
            p._own.add(p, gradient)
    watch_gradient(p)


def make_plain(p, values):
    """The reverse: `values` become the parameter's memory."""
    own, slot, gradient = p._own, p._slot, None
    if own.has_gradient:
        gradient = torch.empty_strided(slot.shape, slot.strides, dtype=own.slot.dtype)
        gradient.copy_(own.slot.fetch())
    forget(p)
    p.__class__ = torch.nn.Parameter
    del p._slot, p._depth, p._own
    p.data = values
    p.grad = None if gradient is None else gradient.to(p.dtype)


def forget(p):
    """The parameter's tensors leave the store; it is not to be used any more."""
    own = p._own
    if own.hooked:
        own.hooked.remove()
    p._slot.forget()
    if own.slot is not None:
        own.slot.forget()
