"""A GPU that is none: tensors that say they are on cuda:0, and streams that do nothing before somebody waits for them.

What is begun on a stream is put off until an event of it is awaited, and then done in the order in which it was begun.
So a copy that did not wait for what it needs, or whose result is used too early, gives other bits every time. The
memory is the host's.
"""
import contextlib
import threading

import torch

DEVICE = torch.device("cuda", 0)
_lock = threading.RLock()


class Stream:
    def __init__(self, device=None):
        self.begun, self.done, self.work = 0, 0, {}

    def put_off(self, call):
        with _lock:
            self.work[self.begun] = call
            self.begun += 1

    def run(self, until):
        with _lock:
            while self.done < until:
                call = self.work.pop(self.done)
                self.done += 1
                call()

    def wait_event(self, event):
        self.put_off(event.synchronize)

    def synchronize(self):
        self.run(self.begun)


class Event:
    def __init__(self):
        self.stream, self.until = None, 0

    def record(self, stream):
        self.stream, self.until = stream, stream.begun

    def synchronize(self):
        if self.stream is not None:
            self.stream.run(self.until)


class Backend:
    """What torch.cuda has of streams."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.default, self.chosen = Stream(), threading.local()

    def current_stream(self, device=None):
        return getattr(self.chosen, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self.chosen.stream = stream
        try:
            yield
        finally:
            self.chosen.stream = before


backend = Backend()


def plain(t):
    """The memory of a tensor of the device, which the host may look at only after its stream.

    What a kernel does to it later counts as no new version: that was when it was begun.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach().as_subclass(torch.Tensor).data


def kernel(call):
    """Begins `call` on the current stream."""
    backend.current_stream().put_off(call)


class Tensor(torch.Tensor):
    """A tensor of the device. What only looks at its shape is done at once, and copies that do not block are put off.

    All else waits for the current stream, as .item() and .cpu() do.
    """

    AT_ONCE = {"detach", "view", "as_subclass", "data_ptr", "numel", "element_size", "is_contiguous", "stride", "size",
               "__getitem__", "__get__", "requires_grad_", "__hash__", "__set__", "register_post_accumulate_grad_hook",
               "storage_offset", "is_floating_point", "empty_like", "dim"}  # fmt: skip
    recorded = []  # (address, stream) of record_stream()

    def record_stream(self, stream):
        self.recorded.append((plain(self).data_ptr(), stream))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # each look makes it anew
            return DEVICE
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            to, source = (plain(t) if isinstance(t, Tensor) else t.detach() for t in args[:2])
            kernel(lambda: to.copy_(source))
            torch.autograd.graph.increment_version(args[0])
            return args[0]
        if func is torch.Tensor.contiguous and plain(args[0]).is_contiguous():
            return args[0]
        if func.__name__ not in cls.AT_ONCE:
            backend.current_stream().synchronize()
        if func is torch.Tensor.cpu:
            return plain(args[0]).clone()
        return super().__torch_function__(func, types, args, kwargs)


def to_device(t):
    return t.detach().clone().as_subclass(Tensor)
