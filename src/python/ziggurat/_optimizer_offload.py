"""Updates of the parameters of an offloaded model, whose bytes the store lends for the length of an update."""
import concurrent.futures
import contextlib
import signal
import threading
import weakref

import torch

from . import _offload_slots
from ._errors import MemoryLimitError
from ._offload_tensors import is_stored, lent  # lent() leaves parameters alone that are not stored

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # names of what an optimizer updates


@contextlib.contextmanager
def interrupts_later():
    """Ctrl-C in this block comes at its end, so that no step is made by halves; a second one comes at once."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return
    seen = []

    def later(number, frame):
        if seen:
            usual(number, frame)
        seen.append(number)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if seen:
        raise KeyboardInterrupt


class OffloadedUpdates:
    """The steps of StoredOptimizer for parameters of an offloaded model. StoredOptimizer is its only subclass."""

    _patience = 60.0  # seconds without an access to the store, after which an update that is awaited stands still

    def _update_stored(self, trained, factor, record):
        """Updates the parameters of an offloaded model one after the other, so that one at a time is in memory."""
        stored = [(p, group) for p, group in trained if is_stored(p)]
        began = bool(stored) and record and self._core.begin_step()
        try:
            for p, group in stored:
                with lent(p, mode="write"), lent(p.grad):
                    item, kept = self._item(p, group, factor)
                    self._core.update([item], False)
                    self.state[p]["step"] += 1
                    self._written(p, kept[0])
                    del kept
                self._versions[p] = p._version
        finally:
            if began:
                self._core.end_step()

    def _begin_stored(self, p, group, factor):
        """Hands the update of an offloaded parameter to the worker thread, which leases its bytes there.

        Until it is done nobody is lent the parameter: who asks waits for it (before_use).
        """
        self._finish(p)
        with lent(p):
            self._ready(p)
            self._versions[p] = p._version
        rule = self._rule(group, int(self.state[p]["step"]) + 1, factor)
        slot, own, number = p._slot, p._own, self._numbers[p]
        gradient, finish, owner, done = own.slot, weakref.WeakMethod(self._finish), weakref.ref(p), []

        def update():
            if not done:  # Ctrl-C comes after calls: one call makes the update and remembers that
                with _offload_slots.addresses([(slot, "write"), (gradient, "read")]) as (weights, grad):
                    item = (number, weights, grad, TYPES[gradient.dtype], rule, -1)
                    done.extend(map(self._core.update, [[item]], [False]))

        own.pending = True
        slot.before_use = lambda: (call := finish()) and (p := owner()) is not None and call(p)
        self._jobs[p] = (self._worker.submit(update), (update, rule.step))

    def _finish_stored(self, p):
        """Ends an update of _begin_stored(), and may be called again after Ctrl-C."""
        job, (update, step) = self._jobs[p]
        # This thread makes an update that has not begun: the store can tell then whether the leases that this thread
        # has leave room for it, and raises MemoryLimitError instead of waiting for ever.
        if job.cancel():
            update()
        else:
            self._await_stored(p, job)
        failed = None if job.cancelled() else job.exception()
        if failed is None:
            self.state[p]["step"].fill_(step)
            p._slot.epoch += 1
            torch.autograd.graph.increment_version(p)
            self._versions[p] = p._version
        p._slot.before_use = None
        p._own.update_done()
        del self._jobs[p]
        if failed is not None:
            raise failed

    def _await_stored(self, p, job):
        """Waits for an update on the worker; an error where it stands still, since views of this thread hold the memory."""
        seen = None
        while not concurrent.futures.wait([job], self._patience).done:
            told = self._store.statistics()
            now = [(t.hits, t.misses) for t in (told.tiers.host, told.tiers.nvme)], told.links.nvme_read.bytes
            if now == seen:
                raise MemoryLimitError(f"finds no room for its update since {self._patience:g} s", p._slot.place,
                                       "views of parameters that live on hold the budget: drop them, or raise host_bytes")
            seen = now
