"""Parameters and activations of a GPU: copies and updates over streams that do everything late. Needs torch."""
import contextlib
import itertools
import threading
import time
from unittest import mock

from support import InFolder, need, same_bits

need("torch")

import fake_device  # noqa: E402
import torch  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402
from ziggurat import _activations, _staging  # noqa: E402

SIZES = [(257,), (64, 33), (1,), (300, 70), (5000,), (0,)]


class OnDevice(InFolder):
    def setUp(self):
        super().setUp()
        for name, stand_in in (("backend_of", lambda device: fake_device.backend),
                               ("pinned", lambda n: torch.full((n,), 0xFF, dtype=torch.uint8))):  # fmt: skip
            patch = mock.patch.object(_staging, name, stand_in)
            patch.start()
            self.addCleanup(patch.stop)
        fake_device.Tensor.recorded.clear()

    def look(self, tensors):
        """What a kernel that is begun now on the current stream sees."""
        seen = []
        fake_device.kernel(lambda: seen.extend(fake_device.plain(t).clone() for t in tensors))
        fake_device.backend.current_stream().synchronize()
        return seen


def values(step, dtype, first=1000):
    generator = torch.Generator().manual_seed(first + step)
    return [(torch.randn(s, generator=generator) * 0.1).to(dtype) for s in SIZES]


def set_gradients(params, step, dtype):
    """On the device by kernels of the current stream, over what no step may see."""
    for p, g in zip(params, values(step, dtype)):
        if not isinstance(p, fake_device.Tensor):
            p.grad = g
            continue
        p.grad = fake_device.to_device(torch.full(g.shape, float("nan"), dtype=dtype))
        there = fake_device.plain(p.grad)
        fake_device.kernel(lambda there=there, g=g: there.copy_(g))


class Steps(OnDevice):
    def train(self, device, dtype, steps=4, kind=zt.AdamW, **options):
        params = [torch.nn.Parameter(fake_device.to_device(v) if device else v) for v in values(0, dtype, 0)]
        if options.pop("nvme", False):
            options.update(drives={self.folder: "4MiB"}, host_bytes="64KiB")
        optimizer = kind(params, lr=1e-2, segment_bytes=8192, **{"host_bytes": "8MiB", **options})
        for step in range(steps):
            set_gradients(params, step, dtype)
            if options.get("overlap") == "backward":
                for p in params:
                    optimizer._after_backward(p)
            optimizer.step()
        optimizer.flush()
        seen = self.look(params) if device else params
        self.state = optimizer.state_dict()["state"]
        optimizer.close()
        return seen

    def test_bits_are_those_of_parameters_on_the_cpu(self):
        for dtype, state in itertools.product((torch.float32, torch.bfloat16, torch.float16),
                                              ("fp32", "split", "bf16", "int8")):  # fmt: skip
            expected = self.train(False, dtype, state=state)
            wanted = self.state
            for options in ({}, {"nvme": True}, {"overlap": "forward"}, {"overlap": "backward"}):
                with self.subTest(dtype=dtype, state=state, **options):
                    self.assertTrue(same_bits(expected, self.train(True, dtype, state=state, **options)))
                    for i, entry in wanted.items():
                        self.assertTrue(same_bits(entry.values(), self.state[i].values()))

    def test_other_kinds(self):
        for kind, options in ((zt.Lion, {}), (zt.SGD, {}), (zt.SGD, {"momentum": 0.9})):
            expected = self.train(False, torch.float32, kind=kind, **options)
            self.assertTrue(same_bits(expected, self.train(True, torch.float32, kind=kind, **options)))

    def test_pinned_memory_is_of_segments_and_not_of_parameters(self):
        taken = []

        def pinned(n):
            taken.append(n)
            return torch.empty(n, dtype=torch.uint8)

        with mock.patch.object(_staging, "pinned", pinned):
            self.train(True, torch.float32, steps=3)
        self.assertLessEqual(max(taken), 2 * 8192)
        self.assertLessEqual(len(taken), 12)  # three slots, which grow

    def test_a_norm_of_the_device_clips(self):
        expected = self.train(False, torch.float32, max_grad_norm=0.5)
        found = self.train(True, torch.float32, max_grad_norm=0.5)
        for x, y in zip(expected, found):
            torch.testing.assert_close(x.detach(), y, rtol=1e-6, atol=1e-7)

    def test_parameters_that_are_not_contiguous(self):
        start, gradient = torch.randn(300, 70), torch.randn(70, 300)
        found = []
        for device in (False, True):
            there = fake_device.to_device(start).t() if device else start.clone().t()
            p = torch.nn.Parameter(there)
            self.assertFalse(p.is_contiguous())
            with contextlib.closing(zt.AdamW([p], lr=1e-2, segment_bytes=8192, host_bytes="8MiB")) as optimizer:
                for _ in range(2):
                    p.grad = fake_device.to_device(gradient) if device else gradient.clone()
                    optimizer.step()
                found.append(self.look([p])[0] if device else p.detach())
        self.assertTrue(same_bits(found[:1], found[1:]))

    def test_weights_that_others_write_on_the_device(self):
        p = torch.nn.Parameter(fake_device.to_device(torch.ones(5000, dtype=torch.bfloat16)))
        with contextlib.closing(zt.AdamW([p], lr=0.0, host_bytes="8MiB", segment_bytes=8192)) as optimizer:
            p.grad = fake_device.to_device(torch.ones(5000, dtype=torch.bfloat16))
            optimizer.step()
            fake_device.kernel(lambda: fake_device.plain(p).fill_(3))
            torch.autograd.graph.increment_version(p)
            with self.assertLogs("ziggurat.torch", "INFO"):
                optimizer.step()
            self.assertEqual(self.look([p])[0].unique().tolist(), [3.0])

    def test_memory_of_the_weights_is_kept_from_the_stream_that_allocated_it(self):
        p = torch.nn.Parameter(fake_device.to_device(torch.ones(10)))
        with contextlib.closing(zt.AdamW([p], host_bytes="8MiB")) as optimizer:
            p.grad = fake_device.to_device(torch.ones(10))
            optimizer.step()
            (staged,) = optimizer._staged.values()
            self.assertIn((fake_device.plain(p).data_ptr(), staged._going), fake_device.Tensor.recorded)

    def test_two_steps_on_streams_of_the_callers(self):
        """The current stream is the caller's, not the worker's thread's."""
        for overlap in ("step", "forward"):
            expected = self.train(False, torch.bfloat16)
            with fake_device.backend.stream(fake_device.Stream()):
                self.assertTrue(same_bits(expected, self.train(True, torch.bfloat16, overlap=overlap)))


class Saved(OnDevice):
    def setUp(self):
        super().setUp()
        self.store = zg.Store(host_bytes="1MiB", drives={self.folder: "16MiB"})
        self.addCleanup(self.store.close)
        self.slots = _activations._Slots(self.store, "nvme")

    def pack(self, value):
        """A tensor that a kernel of the current stream makes, saved."""
        t = fake_device.to_device(torch.full(value.shape, float("nan")))
        there = fake_device.plain(t)
        fake_device.kernel(lambda: there.copy_(value))
        return t, _activations._Activation(self.slots, t, 0)

    def unpack(self, saved):
        with mock.patch.object(torch, "empty_strided", lambda shape, strides, dtype, device: fake_device.to_device(
                torch.zeros(shape, dtype=dtype))):  # fmt: skip
            return saved.fetch()

    def test_what_comes_back_is_what_the_kernel_made(self):
        made = [torch.randn(100, 1000, generator=torch.Generator().manual_seed(n)) for n in range(6)]
        saved = [self.pack(value)[1] for value in made]
        for value, s in reversed(list(zip(made, saved))):
            self.assertTrue(same_bits([value], self.look([self.unpack(s)])))

    def test_pinned_memory_is_bounded(self):
        with mock.patch.object(_staging, "_IN_FLIGHT", 500_000):
            self.test_what_comes_back_is_what_the_kernel_made()
        departures = self.slots.departures(fake_device.DEVICE)
        self.assertLessEqual(departures._bytes, 500_000)

    def test_the_forward_pass_does_not_wait(self):
        hold = threading.Event()
        fake_device.kernel(lambda: hold.wait(10))
        begin = time.monotonic()
        packed = self.pack(torch.ones(1000))[1]
        self.assertFalse(packed._job.done())
        self.assertLess(time.monotonic() - begin, 5)
        hold.set()
        self.assertTrue(same_bits([torch.ones(1000)], self.look([self.unpack(packed)])))

    def test_a_tensor_that_changes_on_its_way_is_an_error(self):
        hold = threading.Event()
        fake_device.kernel(lambda: hold.wait(10))
        t, packed = self.pack(torch.ones(1000))
        torch.autograd.graph.increment_version(t)  # as mul_() does when it is begun
        hold.set()
        with self.assertRaisesRegex(RuntimeError, "in-place"):
            self.unpack(packed)


if __name__ == "__main__":
    import unittest

    unittest.main()
