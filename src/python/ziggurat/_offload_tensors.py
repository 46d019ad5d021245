"""Tensors of a torch model whose bytes lie in a store, and are lent to one operation at a time.

A stored tensor is a torch.Tensor of the right shape, type and device over one element of memory. Every function of
torch that is given one calls __torch_function__ here, which leases the bytes from the store, puts them in the tensor's
place, runs the function and takes them back. So it does not matter who uses a parameter, where, or in which order.
"""
import weakref

import torch

from ._errors import UsageError
from ._offload_slots import Lending, as_plain, plain_data, pop_hooks, push_hooks, unhooked

_plain_grad = torch.Tensor.grad


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
    return _tensor_of(t._slot)


def _tensor_of(slot):
    out = torch.Tensor._make_subclass(StoredTensor, slot.hole)
    out._slot, out._lendings = slot, set()
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
    if not t._lendings and isinstance(t, torch.nn.Parameter):
        raise UsageError("has no address that stays: its bytes move", t._slot.place,
                         "take the address inside `with zt.lent(p):`")  # fmt: skip
    if not t._lendings:  # what was detached keeps its lease from now on
        plain_data.__set__(t, t._slot.fetch())
        t._lendings.add(None)
    return torch.Tensor.data_ptr(t)


def _each(func, name, args, kwargs):
    """A function in place of lists of tensors, one position of the lists after the other, so that one is lent."""
    count = len(args[0])
    for i in range(count):
        one = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        _run(func, name, tuple(one), kwargs)


class Stored:
    """What StoredParameter and StoredTensor have in common: `_slot`, and the `_lendings` that put bytes in its place."""

    _slot, _lendings = None, None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with as_plain():
            if func in _WITHOUT_BYTES:
                return func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if func is torch.Tensor.detach or func is torch.detach or func == plain_data.__get__:
                return _detached(args[0])
            if func == plain_data.__set__:
                return _set_data(*args)
            if func is torch.Tensor.data_ptr:
                return _data_ptr(*args)
            if func is torch.Tensor.untyped_storage and not args[0]._lendings:
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
        with as_plain():
            self._lending = Lending(self._those)
        return self

    def __exit__(self, *error):
        self._lending.give_back()


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
    lending = Lending([(t, "write" if any(t is w for w in written) else "read") for t in _once(found)])
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
    try:
        push_hooks()
        return func(*args, **kwargs)
    finally:
        pop_hooks()


def _once(tensors):
    return tensors if len(tensors) == 1 else list({id(t): t for t in tensors}.values())


class StoredTensor(Stored, torch.Tensor):
    """A stored tensor that is no parameter: a gradient, or a parameter's values (`p.data`, `p.detach()`)."""


class StoredParameter(Stored, torch.nn.Parameter):
    """A parameter whose values lie in the store, and whose gradient does. Made of one that lies in memory."""

    @property
    def grad(self):
        with as_plain():
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
        return _tensor_of(self.slot)

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
        with as_plain():
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
    with as_plain():
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
    p._slot, p._lendings, p._own = slot, set(), Gradient(make_gradient)
    slot.param = weakref.ref(p)
    if p.requires_grad:
        p._own.slot = make_gradient(p)
    with as_plain():
        gradient = _plain_grad.__get__(p)
        _plain_grad.__set__(p, None)
        plain_data.__set__(p, slot.hole)
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
    del p._slot, p._lendings, p._own
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
