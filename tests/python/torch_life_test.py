"""The optimizers and offloaded activations in hard times: failing drives, signals, threads. Needs torch."""
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref

from support import InFolder, need, same_bits

need("torch")

import torch  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402


def break_drive(folder):
    """What was written to the drives' files of the folder is gone."""
    for file in pathlib.Path(folder).rglob("*.tier"):
        with open(file, "r+b") as f:
            for at in range(0, os.path.getsize(file), 65536):
                f.seek(at)
                f.write(bytes(65536))


class FailingDrives(InFolder):
    def optimizer(self, params, **options):
        return zt.AdamW(params, drives={self.folder: "64MiB"}, host_bytes="1MiB", segment_bytes="128KiB", **options)

    def params(self):
        return [torch.nn.Parameter(torch.ones(300_000)) for _ in range(3)]

    def test_a_step_says_so(self):
        params = self.params()
        optimizer = self.optimizer(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        optimizer.store.demote()
        optimizer.store.drain()
        break_drive(self.folder)
        with self.assertRaises(zg.IoError) as caught:
            for _ in range(3):
                optimizer.step()
        self.assertTrue(caught.exception.place)

    def test_backward_says_so(self):
        params = self.params()
        optimizer = self.optimizer(params, overlap="backward")
        for _ in range(2):
            sum(p.sum() for p in params).backward()
            optimizer.step()
        optimizer.store.demote()
        optimizer.store.drain()
        break_drive(self.folder)
        with self.assertRaises(zg.IoError):
            for _ in range(3):  # the update of one backward pass fails, and the next one finds it
                sum(p.sum() for p in params).backward()


class Dropped(InFolder):
    def test_an_optimizer_that_is_dropped_takes_its_store_with_it(self):
        for overlap in ("step", "forward", "backward"):
            params = [torch.nn.Parameter(torch.ones(5000))]
            optimizer = zt.AdamW(params, drives={self.folder: "4MiB"}, host_bytes="64KiB", overlap=overlap,
                                 segment_bytes=4096)  # fmt: skip
            params[0].sum().backward()
            optimizer.step()
            optimizer.flush()
            gone = weakref.ref(optimizer.store)
            del optimizer
            gc.collect()
            self.assertIsNone(gone(), overlap)
            self.assertEqual(list(pathlib.Path(self.folder).glob("*.tier")), [], overlap)


class Interrupts(InFolder):
    def test_ctrl_c_in_a_step_leaves_it_whole(self):
        params = [torch.nn.Parameter(torch.zeros(2_000_000))]
        optimizer = zt.AdamW(params, drives={self.folder: "64MiB"}, host_bytes="2MiB", segment_bytes="256KiB", lr=1.0,
                             weight_decay=0)  # fmt: skip
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            for _ in range(10_000):
                optimizer.step()
            time.sleep(1)
        optimizer.flush()
        self.assertEqual(len(params[0].unique()), 1)  # all of it has as many steps
        optimizer.step()
        optimizer.close()


class OffloadedGraphs(InFolder):
    def model(self):
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(4)))

    def store(self):
        store = zg.Store(host_bytes="2MiB", drives={self.folder: "64MiB"})
        self.addCleanup(store.close)
        return store

    def test_two_backward_threads(self):
        models, store = [self.model(), self.model()], self.store()
        inputs = [torch.randn(256, 128, generator=torch.Generator().manual_seed(n)) for n in range(2)]
        expected = []
        for model, x in zip(models, inputs):
            model(x).square().sum().backward()
            expected.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for _ in range(5):
            failures = []

            def work(n):
                try:
                    with zt.offload_activations(store, min_bytes=1024):
                        loss = models[n](inputs[n]).square().sum()
                    loss.backward()
                except BaseException as e:  # noqa: BLE001
                    failures.append(e)

            threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(failures, [])
            for model, gradients in zip(models, expected):
                self.assertTrue(same_bits([p.grad for p in model.parameters()], gradients))
                model.zero_grad()

    def test_nested_checkpoints(self):
        from torch.utils.checkpoint import checkpoint

        model = self.model()
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))

        def inner(v):
            return checkpoint(model[2:], checkpoint(model[1], v, use_reentrant=False), use_reentrant=False)

        for reentrant in (False, True):
            run = lambda: checkpoint(inner, model[0](x), use_reentrant=reentrant).square().sum()  # noqa: B023, E731
            run().backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            with zt.offload_activations(self.store_of_memory(), min_bytes=1024):
                loss = run()
            loss.backward()
            self.assertTrue(same_bits([p.grad for p in model.parameters()], expected))
            model.zero_grad()

    def store_of_memory(self):
        store = zg.Store(host_bytes="32MiB")
        self.addCleanup(store.close)
        return store

    def test_backward_in_another_order(self):
        model, store = self.model(), self.store()
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
        with zt.offload_activations(store, min_bytes=1024):
            losses = [model(x * n).square().sum() for n in (1, 2, 3)]
        for n in (0, 2, 1):  # torch does not promise the reverse of the forward's order
            losses[n].backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        losses = [model(x * n).square().sum() for n in (1, 2, 3)]
        for n in (0, 2, 1):
            losses[n].backward()
        self.assertTrue(same_bits(found, [p.grad for p in model.parameters()]))

    def test_what_was_changed_since_is_stored_anew(self):
        store = self.store_of_memory()
        x = torch.randn(512, 512)
        w = torch.nn.Parameter(torch.ones(512, 512))
        with zt.offload_activations(store):
            a = (x * w).sum()  # saves x
            x.mul_(2)
            b = (x * w).sum()
        (a + b).backward()
        self.assertTrue(torch.equal(w.grad, x / 2 + x))

    def test_a_failing_drive_in_backward(self):
        store = zg.Store(host_bytes="1MiB", drives={self.folder: "64MiB"})
        model = self.model()
        x = torch.randn(2048, 128)
        with zt.offload_activations(store, min_bytes=1024):
            loss = model(x).square().sum()
        store.demote()
        store.drain()
        break_drive(self.folder)
        with self.assertRaises(zg.IoError):
            loss.backward()
        del loss
        gc.collect()


class Imports(InFolder):
    def test_torch_before_and_after(self):
        work = ("p = torch.nn.Parameter(torch.ones(5000)); p.grad = torch.ones(5000); "
                "o = zt.AdamW([p], host_bytes='4MiB'); o.step(); print((p @ p).item(), o.state_bytes())")  # fmt: skip
        said = set()
        for first in ("import torch, ziggurat", "import ziggurat, torch"):
            code = f"{first}; import ziggurat.torch as zt; {work}"
            said.add(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        self.assertEqual(len(said), 1, said)


class Compiled(InFolder):
    def test_a_compiled_model(self):
        model = torch.nn.Linear(8, 8)
        copy = torch.nn.Linear(8, 8)
        copy.load_state_dict(model.state_dict())
        a, b = (zt.AdamW(m.parameters(), lr=1e-2, host_bytes="4MiB") for m in (model, copy))
        compiled = torch.compile(model, backend="eager")
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for run, optimizer in ((compiled, a), (copy, b)):
                run(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.assertTrue(same_bits(model.parameters(), copy.parameters()))
        a.close(), b.close()


if __name__ == "__main__":
    import unittest

    unittest.main()
