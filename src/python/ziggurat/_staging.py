"""Between a GPU and the store: pinned memory, and copies beside the GPU's work on streams of their own.

Who calls runs the model on the current stream. What was begun there is awaited by events, never by the host in the
caller's thread; what is given back there is awaited by that stream. The host waits in a thread of its own.
"""
import collections
import concurrent.futures
import threading

import torch

_SLOTS = 3  # one segment on its way here, one being updated, one on its way back
_IN_FLIGHT = 256 << 20  # bytes of activations in pinned memory


def backend_of(device):
    """torch.cuda, or what another accelerator has in its place."""
    return getattr(torch, device.type)


def pinned(nbytes):
    """Bytes of pinned host memory; torch keeps them until the copies that were begun with them are done."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _Item:
    """One parameter in a step: flat views of weights and gradient on the GPU, and the rule of its update."""

    def __init__(self, number, local, weights, gradient, rule, reads):
        self.number, self.local, self.weights, self.gradient = number, local, weights, gradient
        self.rule, self.reads = rule, reads


class _Slot:
    """Pinned memory for one segment. `sent`: an event after which its weights are back on the GPU."""

    def __init__(self):
        self.bytes, self.sent = None, None

    def views(self, item, count):
        """Weights and gradient of `count` elements in it."""
        width = item.weights.element_size()
        gradient = -(-count * width // 64) * 64
        size = gradient + count * item.gradient.element_size()
        if self.bytes is None or self.bytes.numel() < size:
            self.bytes = pinned(size)
        return (self.bytes[: count * width].view(item.weights.dtype),
                self.bytes[gradient:size].view(item.gradient.dtype))  # fmt: skip


class Updates:
    """Updates parameters of one GPU: segment by segment through pinned memory, the next ones coming meanwhile.

    One stream brings weights and gradients, one takes weights back, so that both directions of the bus are busy.
    """

    def __init__(self, core, device, names):
        self._core, self._backend, self._names = core, backend_of(device), names
        self._device = device
        self._coming, self._going = self._backend.Stream(device), self._backend.Stream(device)
        self._slots, self._turn = [_Slot() for _ in range(_SLOTS)], 0

    def item(self, number, local, gradient, rule, reads):
        """What run() takes for one parameter; begins what that needs on the current stream.

        reads: the update reads the weights, and not only writes them.
        """
        local, gradient = local.detach(), gradient.detach()
        if gradient.dtype not in self._names:
            gradient = gradient.float()
        weights = local.contiguous()
        # Who drops the model after a step leaves their memory to the stream that it was allocated on, which does not
        # wait for the stream that still writes it.
        for t in (local, weights):
            t.record_stream(self._going)
        return _Item(number, local, weights.view(-1), gradient.contiguous().view(-1), rule, reads)

    def ready(self):
        """An event on the current stream: all that was begun there so far."""
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        return event

    def await_on_current_stream(self, done):
        """What is begun on the current stream from now on sees what run() has written."""
        self._backend.current_stream(self._device).wait_event(done)

    @torch.no_grad()
    def run(self, items, ready, record):
        """Updates all items after the event `ready`; returns an event after which the weights are new.

        For the worker's thread, which has a current stream of its own and does not use it. When it returns, no
        gradient is read any more.
        """
        self._coming.wait_event(ready)
        began = record and self._core.begin_step()
        try:
            coming = collections.deque()
            for item in items:
                count, per_segment, _ = self._core.extent(item.number)
                for segment, first in enumerate(range(0, count, per_segment)):
                    coming.append(self._fetch(item, segment, first, min(per_segment, count - first)))
                    if len(coming) == _SLOTS - 1:
                        self._update(*coming.popleft())
            while coming:
                self._update(*coming.popleft())
            with self._backend.stream(self._going):
                for item in items:
                    if item.weights.data_ptr() != item.local.data_ptr():  # it was not contiguous
                        item.local.copy_(item.weights.view(item.local.shape), non_blocking=True)
        finally:
            if began:
                self._core.end_step()
        done = self._backend.Event()
        done.record(self._going)
        return done

    def _fetch(self, item, segment, first, count):
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        if slot.sent is not None:
            self._coming.wait_event(slot.sent)
        weights, gradient = slot.views(item, count)
        here = slice(first, first + count)
        with self._backend.stream(self._coming):
            if item.reads:
                weights.copy_(item.weights[here], non_blocking=True)
            gradient.copy_(item.gradient[here], non_blocking=True)
        loaded = self._backend.Event()
        loaded.record(self._coming)
        return item, segment, here, slot, weights, gradient, loaded

    def _update(self, item, segment, here, slot, weights, gradient, loaded):
        # It comes after `ready`, so nothing that was begun before the step still reads the weights on the GPU.
        loaded.synchronize()
        self._core.update([(item.number, weights.data_ptr(), gradient.data_ptr(), self._names[gradient.dtype],
                            item.rule, segment)], False)  # fmt: skip
        with self._backend.stream(self._going):
            item.weights[here].copy_(weights, non_blocking=True)
        slot.sent = self._backend.Event()
        slot.sent.record(self._going)


class Departures:
    """Saved tensors of one GPU on their way: a stream copies them to pinned memory, and a thread stores them."""

    def __init__(self, device):
        self._backend, self._device = backend_of(device), device
        self._stream = self._backend.Stream(device)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "ziggurat-activations")
        self._lock, self._pending, self._bytes = threading.Lock(), collections.deque(), 0

    def send(self, t, keep):
        """keep(copy) is called on the thread, with t in pinned memory. Returns the future of that call."""
        nbytes = t.numel() * t.element_size()
        with self._lock:
            while self._pending and self._bytes + nbytes > _IN_FLIGHT:
                job, bytes_of_job = self._pending.popleft()
                concurrent.futures.wait([job])
                self._bytes -= bytes_of_job
            t, version = t.detach(), t._version
            copy = pinned(nbytes).view(t.dtype).view(t.shape)
            before = self._backend.Event()
            before.record(self._backend.current_stream(self._device))
            self._stream.wait_event(before)
            with self._backend.stream(self._stream):
                copy.copy_(t, non_blocking=True)
            copied = self._backend.Event()
            copied.record(self._stream)
            job = self._worker.submit(self._store, t, version, copy, copied, keep)
            self._pending.append((job, nbytes))
            self._bytes += nbytes
        return job

    @staticmethod
    def _store(t, version, copy, copied, keep):
        # t is held until here: its memory is nobody else's while it is read.
        copied.synchronize()
        if t._version != version:
            raise RuntimeError("a tensor needed for the gradient was modified by an in-place operation while it was "
                               "on its way to the store; skip= leaves it where it is")
        del t
        keep(copy)


def fetch_to_device(read, nbytes, out):
    """Fills `out` on its GPU by the current stream; read(bytes) fills pinned memory."""
    copy = pinned(nbytes)
    read(copy)
    out.copy_(copy.view(out.dtype).view(out.shape), non_blocking=True)
    return out
