"""Saved tensors of a torch model in a store, from the forward pass until the backward pass needs them."""
import contextlib
import ctypes
import threading
import weakref

import torch

from . import _offload_slots, _staging
from ._errors import UsageError
from ._store import Store, bytes_of


class _Heap:
    """Gives memory that tensors have left back to the system, while tensors come and go.

    glibc takes blocks of up to 32 MiB from its heap, and keeps what is freed before others that live: without this the
    memory of offloaded tensors would stay the process's. A threshold for mmap() (mallopt) would do too, but for all
    blocks of the process and for ever, and each block would have its pages made anew.
    """

    _EVERY = 64 << 20  # bytes of tensors that came or went

    def __init__(self):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none, and need none
        self._trim, self._bytes = trim, 0

    def passed(self, nbytes):
        self._bytes += nbytes
        if self._trim is not None and self._bytes >= self._EVERY:
            self._bytes = 0
            self._trim(ctypes.c_size_t(0))  # without the GIL


class _Slots:
    """Tensors of a store that hold one activation each, kept for the next of the same size."""

    def __init__(self, store, lowest):
        self._store, self._lowest, self._free, self._made, self._departures = store, lowest, {}, 0, {}
        # One thread at a time is inside the store, which add() needs alone. A finalizer may run inside take().
        self.lock = store.__dict__.setdefault("_activation_lock", threading.RLock())
        self.heap = _Heap()

    def take(self, nbytes):
        size = -(-nbytes // 4096) * 4096
        with self.lock:
            if self._free.get(size):
                return self._free[size].pop()
            self._made += 1
            name = f"activation.{id(self):x}.{self._made}"
            return self._store.add(name, "u8", (size,), role="activation", segment_bytes=0, lowest=self._lowest)

    def give_back(self, slot):
        with self.lock:
            self._free.setdefault(slot.nbytes, []).append(slot)

    def departures(self, device):
        with self.lock:
            if device not in self._departures:
                self._departures[device] = _staging.Departures(device)
            return self._departures[device]


class _Activation:
    """One tensor that autograd saved. Its slot is free again when autograd drops it."""

    def __init__(self, slots, t, order):
        self.shape, self.dtype, self.device, self.order = t.shape, t.dtype, t.device, order
        self.strides = torch.empty_like(t, device="meta").stride()  # kernels may add in another order for others
        self.nbytes = t.numel() * t.element_size()
        self.slots, self.slot = slots, slots.take(self.nbytes)
        weakref.finalize(self, slots.give_back, self.slot)
        if t.device.type == "cpu":
            self._job = None
            self._keep(t.detach())
            slots.heap.passed(self.nbytes)
        else:  # the job holds this object, and so the slot
            self._job = slots.departures(t.device).send(t, self._keep)

    def _keep(self, values):
        with self.slots.lock, self.slot.acquire(0, "overwrite") as lease:
            view = torch.frombuffer(lease, dtype=torch.uint8, count=self.nbytes)
            view.view(self.dtype).view(self.shape).copy_(values)

    def prefetch(self):
        if self._job is None or self._job.done():
            with self.slots.lock:
                self.slot.prefetch()

    def fetch(self):
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if self._job is None:
            self.slots.heap.passed(self.nbytes)
            self._read(lambda stored: out.copy_(stored.view(self.dtype).view(self.shape)))
            return out
        self._job.result()  # what failed on the way to the store is raised here, in the backward pass
        return _staging.fetch_to_device(lambda pinned: self._read(pinned.copy_), self.nbytes, out)

    def _read(self, use):
        with self.slots.lock, self.slot.acquire(0, "read") as lease:
            use(torch.from_dlpack(lease)[: self.nbytes])


class offload_activations(contextlib.ContextDecorator):
    """What autograd saves for the backward pass of the block's forward goes to the store, and comes back in time.

        with zt.offload_activations(store):
            loss = model(batch)
        loss.backward()

    min_bytes  smaller tensors stay where they are; bytes, or a text such as "1MiB"
    lowest     "nvme", or "host"
    skip       tensors for which it returns True stay where they are
    Weights stay too, as do tensors of other classes than torch.Tensor (DTensors), and what is saved several times is
    stored once. Gradients have the same bits as without. The store must stay open until the graph is gone, and its host
    budget holds at least the largest two tensors. It must not be the store of an optimizer whose updates overlap.
    From a GPU they come through pinned memory, by a stream and a thread of their own. A tensor that is then modified
    in place while it is on its way is an error of the backward pass, as it is without offloading.

    One object may serve all steps, one block after the other, and be a decorator of a function that is a forward pass.
    """

    def __init__(self, store, *, min_bytes=1 << 20, lowest="nvme", skip=lambda t: False):
        if not isinstance(store, Store):
            raise UsageError(f"is a {type(store).__name__}", "store", "give a ziggurat.Store")
        # The slots outlive the block: the next forward pass takes them again.
        pools = store.__dict__.setdefault("_activation_slots", {})
        self._slots = pools.setdefault(lowest, _Slots(store, lowest))
        self._min_bytes, self._skip, self._entered = bytes_of(min_bytes, "min_bytes"), skip, []

    def __enter__(self):
        hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks())
        hooks.__enter__()
        self._entered.append(hooks)

    def __exit__(self, *error):
        self._entered.pop().__exit__(*error)

    def _stays(self, t):
        base = t if t._base is None else t._base
        weight = isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)
        plain = type(t) is torch.Tensor and t.layout == torch.strided
        return weight or not plain or t.numel() * t.element_size() < self._min_bytes or self._skip(t)

    def _hooks(self):
        """For one block: what autograd calls with a tensor that it saves, and when it needs that again."""
        known, order = {}, []

        def pack(t):
            stored = _offload_slots.saved_of(t)  # a parameter that lies in a store
            if stored is not None or self._stays(t):
                return stored or _offload_slots.Kept(t)
            storage = t.untyped_storage()
            key = (storage._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version)
            saved, alive = known.get(key, (None, None))
            found = saved() if saved is not None and not alive.expired() else None
            if found is None:
                found = _Activation(self._slots, t, len(order))
                known[key] = (weakref.ref(found), torch.multiprocessing.reductions.StorageWeakRef(storage))
                order.append(weakref.ref(found))
            return found

        def unpack(saved):
            if not isinstance(saved, _Activation):
                return _offload_slots.unpack(saved)
            for earlier in order[max(0, saved.order - 2) : saved.order]:  # mostly backward goes the other way
                if (ahead := earlier()) is not None:
                    ahead.prefetch()
            return saved.fetch()

        return pack, unpack
