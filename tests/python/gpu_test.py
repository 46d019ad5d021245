"""Parameters, scalers and activations on a real GPU: bits beside the CPU's. Needs torch with CUDA, and a GPU."""
import contextlib
import itertools
import math
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS gives the same bits each time

from support import InFolder, need, same_bits  # noqa: E402

need("torch")

import torch  # noqa: E402

if not torch.cuda.is_available():
    print("skipped: torch sees no GPU")
    sys.exit(77)

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

SIZES = [(257,), (64, 33), (1,), (300, 70), (50_000,), (0,)]
SEGMENT = 8192


def values(step, dtype, first=1000):
    generator = torch.Generator().manual_seed(first + step)
    return [(torch.randn(s, generator=generator) * 0.1).to(dtype) for s in SIZES]


class Steps(InFolder):
    def train(self, device, dtype, steps=4, kind=zt.AdamW, **options):
        params = [torch.nn.Parameter(v.to(device)) for v in values(0, dtype, 0)]
        if options.pop("nvme", False):
            options.update(drives={self.folder: "4MiB"}, host_bytes="64KiB")
        optimizer = kind(params, lr=1e-2, segment_bytes=SEGMENT, **{"host_bytes": "8MiB", **options})
        for step in range(steps):
            for p, g in zip(params, values(step, dtype)):
                if device == "cpu":
                    p.grad = g
                    continue
                # Over what no step may see, late in a stream that is busy.
                p.grad = torch.full_like(p, math.nan)
                torch.cuda._sleep(1_000_000)
                p.grad.copy_(g.pin_memory() if g.numel() else g, non_blocking=True)
            if options.get("overlap") == "backward":
                for p in params:
                    optimizer._after_backward(p)
            optimizer.step()
        optimizer.flush()
        seen = [p.detach().cpu() for p in params]
        self.state = optimizer.state_dict()["state"]
        optimizer.close()
        return seen

    def test_bits_are_those_of_parameters_on_the_cpu(self):
        for dtype, state in itertools.product((torch.float32, torch.bfloat16, torch.float16),
                                              ("fp32", "split", "bf16", "int8")):  # fmt: skip
            expected = self.train("cpu", dtype, state=state)
            wanted = self.state
            for options in ({}, {"nvme": True}, {"overlap": "forward"}, {"overlap": "backward", "nvme": True}):
                with self.subTest(dtype=dtype, state=state, **options):
                    self.assertTrue(same_bits(expected, self.train("cuda", dtype, state=state, **options)))
                    for i, entry in wanted.items():
                        self.assertTrue(same_bits(entry.values(), self.state[i].values()))

    def test_other_kinds(self):
        for kind, options in ((zt.Lion, {}), (zt.SGD, {}), (zt.SGD, {"momentum": 0.9})):
            expected = self.train("cpu", torch.float32, kind=kind, **options)
            self.assertTrue(same_bits(expected, self.train("cuda", torch.float32, kind=kind, **options)))

    def test_a_norm_of_the_device_clips(self):
        expected = self.train("cpu", torch.float32, max_grad_norm=0.5)
        for x, y in zip(expected, self.train("cuda", torch.float32, max_grad_norm=0.5)):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)

    def test_within_the_documented_bound_of_torch(self):
        found = self.train("cuda", torch.float32, steps=20)
        params = [torch.nn.Parameter(v.cuda()) for v in values(0, torch.float32, 0)]
        theirs = torch.optim.AdamW(params, lr=1e-2)
        for step in range(20):
            for p, g in zip(params, values(step, torch.float32)):
                p.grad = g.cuda()
            theirs.step()
        for x, p in zip(found, params):
            y = p.detach().cpu()
            ulp = torch.nextafter(y.abs(), torch.tensor(math.inf)) - y.abs()
            self.assertTrue(((x - y).abs() <= 1e-6 * 1e-2 * 20 + 4 * ulp).all())

    def test_a_scaler_skips(self):
        p = torch.nn.Parameter(torch.ones(5000, device="cuda"))
        with contextlib.closing(zt.AdamW([p], lr=1e-2, host_bytes="8MiB", segment_bytes=SEGMENT)) as optimizer:
            scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
            for infinite in (False, True, False):
                before = p.detach().clone()
                scaler.scale(torch.zeros((), device="cuda"))
                p.grad = torch.full_like(p, math.inf if infinite else 102.4)
                scaler.step(optimizer)
                scaler.update(1024.0)
                self.assertEqual(torch.equal(before, p), infinite)
            self.assertEqual(int(optimizer.state[p]["step"]), 2)

    def test_training_on_streams_of_the_caller(self):
        """A model in bf16 under overlap="forward": its forward waits for the new weights on the caller's stream."""

        def train(overlap, stream):
            torch.manual_seed(3)
            layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
            model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
            with contextlib.closing(zt.AdamW(model.parameters(), lr=1e-2, host_bytes="64MiB", overlap=overlap,
                                             state="split", segment_bytes="64KiB")) as optimizer:  # fmt: skip
                if overlap == "forward":
                    optimizer.attach(model)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    for step in range(6):
                        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
                        model(x.to("cuda", torch.bfloat16)).float().square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    optimizer.flush()
                    stream.synchronize()
                return [p.detach().cpu() for p in model.parameters()]

        expected = train("step", torch.cuda.current_stream())
        for overlap in ("step", "forward", "backward"):
            self.assertTrue(same_bits(expected, train(overlap, torch.cuda.Stream())), overlap)


class Activations(InFolder):
    def gradients(self, offload):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)]
        model = torch.nn.Sequential(*layers).cuda()
        x = torch.randn(2048, 512, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with offload:
            loss = model(x).square().sum()
        torch.cuda.synchronize()
        self.held = torch.cuda.memory_allocated() - before
        loss.backward()
        return [t.grad.cpu() for t in (x, *model.parameters())]

    def test_gradients_have_the_same_bits_and_the_gpu_is_free_of_them(self):
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        expected = self.gradients(contextlib.nullcontext())
        plain = self.held
        with zg.Store(host_bytes="32MiB", drives={self.folder: "512MiB"}) as store:
            for _ in range(2):
                self.assertTrue(same_bits(expected, self.gradients(zt.offload_activations(store))))
            self.assertLess(self.held, plain // 2)
            self.assertGreater(store.statistics().links.nvme_read.bytes, 0)


if __name__ == "__main__":
    import unittest

    unittest.main()
