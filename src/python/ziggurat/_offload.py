"""offload(): a torch model whose parameters lie in a store."""
import contextlib
import sys
import threading
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _offload_files, _offload_slots, _offload_tensors
from ._errors import Error, MemoryLimitError, UsageError
from ._measure import probe
from ._records import Record
from ._store import Store, bytes_of


class OffloadStatistics(Record):
    """What an offloaded model's parameters have done.

    parameters      tensors in the store, and the bytes of their values
    parameter_bytes
    resident_bytes  of parameters and buffers that stayed in memory
    lent            how often bytes were lent, to the forward pass, the backward pass or an update
    gradient_bytes  of gradients that the store holds now
    store           the store's own statistics: tiers, links, waits
    """


def _dense_strides(p, name):
    """Strides of p in the store: its own where its elements lie without gaps."""
    order = sorted(range(p.dim()), key=lambda d: (p.stride(d), p.shape[d]))
    expected = 1
    for d in order:
        if p.shape[d] != 1 and p.stride(d) != expected:
            raise UsageError(f"has strides {p.stride()} for {list(p.shape)}", f'parameter "{name}"',
                             "its elements overlap or have gaps: make it contiguous before zt.offload()")  # fmt: skip
        expected *= p.shape[d]
    return p.stride()


class _Calls(threading.local):
    """Of a thread: how deep it is in calls of modules, the frame of the outermost, and whether that has pushed hooks."""

    depth, outermost, hooked = 0, None, False


def _runs(frame):
    """Whether the caller's caller was called by `frame`, directly or not."""
    here = sys._getframe(2)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


class Offloaded:
    """A model whose parameters lie in a store; made by offload(). A context manager, whose end is close()."""

    def __init__(self, model, store, own_store, min_bytes, gradient_dtype):
        self.model, self._store, self._own_store = model, store, own_store
        self._min_bytes, self._gradient_dtype = min_bytes, gradient_dtype
        self._hooks, self._params, self._closed = [], {}, False
        self._step, self._calls = None, _Calls()
        number = store.__dict__.setdefault("_offloaded_models", 0)
        store.__dict__["_offloaded_models"] += 1
        self._prefix = f"{number}." if number else ""

    # ---- in ----

    def _take(self, files):
        """Moves the parameters into the store, one by one."""
        places = {}  # of all modules where a parameter is
        for name, p in self.model.named_parameters(remove_duplicate=False):
            places.setdefault(p, []).append(name)
        self._refuse(places)
        saved = None if files is None else _offload_files.Files(files)
        with saved or contextlib.nullcontext():
            if saved is not None:
                saved.check(places)
            for p, names in places.items():
                self._take_one(p, names, saved)
            if saved is not None:
                for name, buffer in self.model.named_buffers():
                    if saved.has([name]) and buffer.is_contiguous():
                        saved.read([name], buffer.data_ptr(), buffer)
        self._watch()

    def _moves(self, p):
        return p.numel() > 0 and p.nbytes >= self._min_bytes

    def _refuse(self, places):
        if isinstance(self.model, torch._dynamo.eval_frame.OptimizedModule) or any(
            m._compiled_call_impl is not None for m in self.model.modules()
        ):
            raise UsageError("is compiled", "model", "compiled code keeps its parameters in memory: give the model "
                             "without torch.compile to zt.offload()")  # fmt: skip
        budget, storages = self._store.statistics().tiers.host.budget, {}
        for p, names in places.items():
            place = f'parameter "{names[0]}"'
            if isinstance(p, _offload_tensors.Stored):
                raise UsageError("is offloaded already", place, "close the first zt.offload() before")
            if type(p) is not torch.nn.Parameter:
                raise UsageError(f"is a {type(p).__name__}", place, "plain torch.nn.Parameters can be moved to a store")
            if p.device.type not in ("cpu", "meta"):
                raise UsageError(f"is on {p.device}", place, "models on the processor can be offloaded: model.cpu()")
            if self._moves(p) and p.nbytes > budget:
                raise MemoryLimitError(f"is {budget} bytes", "host_bytes", f"{place} alone has {p.nbytes}, and an "
                                       "operation needs it whole")  # fmt: skip
            if not p.is_meta and p.numel() > 0:
                other = storages.setdefault(p.untyped_storage().data_ptr(), names[0])
                if other != names[0]:
                    raise UsageError(f'shares memory with "{other}" and is another parameter', place,
                                     "tie them as one torch.nn.Parameter, or give each its own memory")  # fmt: skip
        for name, b in self.model.named_buffers():
            if b.is_meta:
                raise UsageError("is on the meta device", f'buffer "{name}"', "make the model inside `with "
                                 "zt.empty_parameters():`, which makes buffers in memory")  # fmt: skip

    def _take_one(self, p, names, saved):
        if p.is_meta and saved is None:
            raise UsageError("is on the meta device", f'parameter "{names[0]}"', "name the files with its values: "
                             "zt.offload(model, files=...)")  # fmt: skip
        if not self._moves(p):
            if p.is_meta:
                values = torch.empty(p.shape, dtype=p.dtype)
                p = self._replace(names, torch.nn.Parameter(values, p.requires_grad))
            if saved is not None:
                saved.read(names, p.data_ptr(), p)
            return
        strides = torch.empty(p.shape, device="meta").stride() if p.is_meta else _dense_strides(p, names[0])
        slot = self._slot("weight", names[0], p, p.dtype, strides)
        with slot.overwritten() as (lease, whole):
            if saved is not None:
                saved.read(names, lease.address, p)
            else:
                with torch.no_grad():
                    whole.copy_(p)
            del whole
        if p.is_meta:
            p = self._replace(names, torch.nn.Parameter(slot.hole, p.requires_grad))
        _offload_tensors.make_stored(p, slot, self._gradient_slot)
        self._params[names[0]] = p

    def _replace(self, names, p):
        for name in names:
            module, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(module), leaf, p)
        return p

    def _slot(self, role, name, like, dtype, strides):
        return _offload_slots.Slot(self._store, f"{role}.{self._prefix}{name}", name, like, dtype, role, strides)

    def _gradient_slot(self, p):
        dtype = self._gradient_dtype or p.dtype
        return self._slot("gradient", p._slot.label, p, dtype, p._slot.strides)

    # ---- steps ----

    def _watch(self):
        """Hooks: of modules for what autograd saves, of the whole model and of optimizers for the steps."""
        hooks = self._hooks
        me = weakref.ref(self)
        for module in self.model.modules():
            if not any(isinstance(p, _offload_tensors.Stored) for p in module.parameters()):
                continue
            hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
            hooks.append(module.register_load_state_dict_pre_hook(_refuse_assignment))
        hooks.append(register_optimizer_step_post_hook(lambda *_: (off := me()) and off._optimizer_stepped()))

    def _enter(self, module, _inputs):
        calls = self._calls
        if calls.depth > 0 and not _runs(calls.outermost):
            self._left(calls)  # Ctrl-C passed it, of which hooks are not told
        calls.depth += 1
        if calls.depth > 1:
            return
        calls.outermost = sys._getframe(1)
        gradients = torch.is_grad_enabled()
        self._begin("training step" if gradients else "forward pass")
        if gradients and _offload_slots.unhooked():
            calls.hooked = True
            _offload_slots.push_hooks()

    def _leave(self, module, _inputs, _outputs):
        if self._calls.depth <= 1:
            self._left(self._calls)
        else:
            self._calls.depth -= 1

    def _left(self, calls):
        """The outermost call of a module has ended."""
        calls.depth, calls.outermost, hooked, calls.hooked = 0, None, calls.hooked, False
        if hooked:
            _offload_slots.pop_hooks()
        if self._step == "forward pass":
            self._end()

    def _begin(self, name):
        """A step of the store begins, unless one runs: of this model, of another, or of the caller's."""
        if self._step is None:
            self._step = name
            try:
                self._store._core.step_begin(f"{self._prefix}{name}")
            except UsageError:
                self._step = None

    def _end(self):
        step, self._step = self._step, None
        if step is not None:
            self._store._core.step_end()

    def _optimizer_stepped(self):
        if self._step == "training step":  # of any parameters: a frozen model is part of what another one learns
            self._end()

    # ---- what is told ----

    @property
    def store(self):
        """The store that holds the parameters: give it to an optimizer, and ask it for statistics."""
        return self._store

    def statistics(self):
        """What has moved so far: an OffloadStatistics."""
        slots = [p._slot for p in self._params.values()]
        resident = [t for t in (*self.model.parameters(), *self.model.buffers())
                    if not isinstance(t, _offload_tensors.Stored)]  # fmt: skip
        owns = [p._own for p in self._params.values()]
        return OffloadStatistics({
            "parameters": len(slots), "parameter_bytes": sum(s.nbytes for s in slots),
            "resident_bytes": sum(t.nbytes for t in resident), "lent": sum(s.lent for s in slots),
            "gradient_bytes": sum(own.slot.nbytes for own in owns if own.has_gradient),
            "store": self._store.statistics().as_dict(),
        })  # fmt: skip

    def explain(self, name=None):
        """Where the bytes of a parameter are, who holds them and when they are needed next, as text; None: of all."""
        if name is not None and name not in self._params:
            raise UsageError("is none of the parameters in the store", f'"{name}"',
                             "take a name of model.named_parameters()")  # fmt: skip
        those = self._params.values() if name is None else [self._params[name]]
        return "\n".join(p._slot.tensor.explain() for p in those)

    # ---- out ----

    def close(self, restore=True):
        """Gives the plain model back: parameters and gradients lie in memory again, and the hooks are gone.

        restore  False: parameters become meta tensors, for a model that memory has no room for
        Raises MemoryLimitError where memory has no room, and changes nothing then. UsageError while something still
        shares a parameter's bytes (a slice, the graph of a loss). Again: nothing.
        """
        if self._closed:
            return
        for p in self._params.values():
            if p._slot.before_use is not None:
                p._slot.before_use()
        if restore:
            self._check_memory()
        self._end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for name, p in list(self._params.items()):
            slot = p._slot
            values = torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device="cpu" if restore else "meta")
            if restore:
                values.copy_(slot.fetch())
                _offload_tensors.make_plain(p, values)
            else:
                names = [n for n, q in self.model.named_parameters(remove_duplicate=False) if q is p]
                self._replace(names, torch.nn.Parameter(values, p.requires_grad))
                _offload_tensors.forget(p)
            del self._params[name]
        self._closed = True
        if self._own_store:
            self._store.close()

    def _check_memory(self):
        slots = [s for p in self._params.values() for s in (p._slot, p._own.slot if p._own.has_gradient else None)]
        stored = sum(s.nbytes for s in slots if s is not None)
        host = self._store.statistics().tiers.host
        there = probe().available_memory + (host.used if self._own_store else 0)
        if stored > there:
            raise MemoryLimitError(f"has {there} bytes of room, and the plain model needs {stored}", "memory",
                                   "save the model, then close(restore=False)")  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            return self.close()
        with contextlib.suppress(Error):  # the error that passes must not be hidden
            self.close()

    def __repr__(self):
        state = "closed" if self._closed else f"{len(self._params)} parameters in {self._store!r}"
        return f"<Offloaded {type(self.model).__name__}, {state}>"


def _refuse_assignment(module, state_dict, prefix, local_metadata, *_):
    if local_metadata.get("assign_to_params_buffers"):
        raise UsageError("would put parameters in memory in place of those in the store", "load_state_dict(assign=True)",
                         "leave assign out: values are copied into the store")  # fmt: skip


def offload(model, *, store=None, host_bytes=None, drives=(), device=None, device_bytes=None, files=None,
            min_bytes=128 << 10, gradient_dtype=None):  # fmt: skip
    """Moves the parameters of any torch model into a store: host memory and NVMe, within budgets.

        off = zt.offload(model, host_bytes="8GiB", drives={"/mnt/nvme0": "200GiB"})
        optimizer = zt.AdamW(model.parameters(), lr=1e-4, store=off.store)

    and then the loop as it was. Each operation of torch that uses a parameter is lent its bytes, and gradients leave for
    the store as they are made; what comes next is fetched ahead along the order of the step before. A step that leaves
    the order is slower, never wrong. Results have the same bits as without.

    store           the Store for parameters and gradients; None: one of its own, with
    host_bytes      of host memory (bytes or "4GiB"; None: nine tenths of what is free) and
    drives          {directory: size} on NVMe, where what does not fit goes
    device          "cpu" or None: where the model runs. Others are refused, and so is
    device_bytes    a budget of memory on a device
    files           safetensors files, or a directory of them, with the values of the model's parameters by their names:
                    they are read straight into the store. The model may be made inside `with zt.empty_parameters():`
    min_bytes       smaller parameters stay in memory, as all buffers do
    gradient_dtype  torch.float32: gradients are accumulated so; None: in their parameter's type

    Returns an Offloaded: statistics(), explain(), store, close(). Raises UsageError for what cannot be offloaded, by
    name; MemoryLimitError where host_bytes does not hold the largest parameter; IoError.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"is a {type(model).__name__}", "model", "give a torch.nn.Module")
    if device is not None and torch.device(device).type != "cpu":
        raise UsageError(f'is "{device}"', "device", "offloaded models run on the processor: leave device out")
    if device_bytes is not None:
        raise UsageError(f"is {device_bytes}", "device_bytes", "offloaded models run on the processor: leave it out")
    if store is not None and (host_bytes is not None or drives):
        raise UsageError("is given beside store, whose budgets hold", "drives" if drives else "host_bytes",
                         "give a Store, or host_bytes and drives for one of its own")  # fmt: skip
    if store is None and host_bytes is None:
        if drives:
            raise UsageError("is not given", "host_bytes", "say how much host memory the parameters may take")
        host_bytes = probe().available_memory * 9 // 10
    if gradient_dtype not in (None, torch.float32):
        raise UsageError(f"is {gradient_dtype}", "gradient_dtype", "torch.float32, or None")
    own = store is None
    store = Store(host_bytes=host_bytes, drives=drives) if own else store
    off = Offloaded(model, store, own, bytes_of(min_bytes, "min_bytes"), gradient_dtype)
    try:
        off._take(files)
    except BaseException:
        with contextlib.suppress(Error):
            off.close(restore=files is None)
        raise
    return off


@contextlib.contextmanager
def empty_parameters():
    """Models made in this block have parameters without memory (meta tensors), and their buffers as always.

    For zt.offload(model, files=...), which reads the values into the store.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def without_memory(_module, _name, p):
        if type(p) is torch.nn.Parameter and not p.is_meta:
            return torch.nn.Parameter(p.to("meta"), p.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        yield
    finally:
        hook.remove()
