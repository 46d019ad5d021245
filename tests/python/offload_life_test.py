"""Offloaded models in hard times: Ctrl-C anywhere, exceptions, views that hold memory while updates overlap. Needs torch.

ZG_TEST_SEED seeds when Ctrl-C comes (it is printed); ZG_TEST_INTERRUPTS says how often (30).
"""
import gc
import os
import random
import signal
import time
import weakref

from support import InFolder, SlowWorker, need, same_bits

need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

torch.set_num_threads(1)
WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(self.norm(x))))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(96, WIDTH), Block(), Block(), nn.Linear(WIDTH, 96))


X = torch.arange(24).view(2, 12) * 3 % 96


def loss_of(model):
    return nn.functional.cross_entropy(model(X).flatten(0, 1), X.flatten())


def hooks_are_left():
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Case(InFolder):
    def setUp(self):
        super().setUp()
        seed = int(os.environ.get("ZG_TEST_SEED", random.randrange(1 << 30)))
        print(f"ZG_TEST_SEED={seed}", flush=True)
        self.random = random.Random(seed)

    def pair(self, host_bytes=200 << 10, **options):
        """Plain PyTorch with its optimizer, and the offloaded model with its own: both zt's AdamW."""
        plain, ours = make(), make()
        self.off = zt.offload(ours, host_bytes=host_bytes, drives={self.folder: "16MiB"}, min_bytes=4096)
        self.addCleanup(self.off.close)
        out = []
        for model, where in ((plain, {"host_bytes": "16MiB"}), (ours, {"store": self.off.store, **options})):
            optimizer = zt.AdamW(model.parameters(), lr=1e-3, segment_bytes=8192, **where)
            self.addCleanup(optimizer.close)
            out.append((model, optimizer))
        return out

    @staticmethod
    def step(model, optimizer):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    def check_it_goes_on(self, pair):
        """Nothing is held, and the next step has the bits of plain PyTorch."""
        self.assertEqual(self.off.store._core.leases, 0)
        for model, optimizer in pair:
            self.step(model, optimizer)
            optimizer.flush()
        self.assertFalse(hooks_are_left())
        (plain, _), (ours, _) = pair
        self.assertTrue(same_bits(plain.parameters(), ours.parameters()))


class Interrupts(Case):
    def interrupted(self, seconds, work):
        """Runs `work` again and again until Ctrl-C comes, at some time within `seconds`."""

        def press(*_):
            signal.raise_signal(signal.SIGINT)

        before = signal.signal(signal.SIGALRM, press)
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
        try:
            # A Ctrl-C that comes inside a finalizer is told by Python, and lost: the next comes later. Not soon: of two
            # in one step the second would end it.
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + self.random.random() * seconds, 5)
            try:
                while True:
                    work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGALRM, before)
            signal.signal(signal.SIGINT, usual)

    def seconds_of(self, work):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def test_forward_and_backward(self):
        for overlap in ("step", "forward"):
            pair = (plain, _), (ours, optimizer) = self.pair(overlap=overlap)
            if overlap == "forward":
                optimizer.attach(ours)
            self.check_it_goes_on(pair)

            def work():
                loss_of(ours).backward()
                ours.zero_grad()

            usual = self.seconds_of(work)
            for _ in range(int(os.environ.get("ZG_TEST_INTERRUPTS", "30")) // 2):
                self.interrupted(usual, work)
                ours.zero_grad()
                gc.collect()
                self.check_it_goes_on(pair)
            optimizer.close()
            self.off.close()
            self.assertTrue(same_bits(plain.parameters(), ours.parameters()))

    def test_between_the_parts_of_lending_and_taking_back(self):
        pair = _, (ours, _) = self.pair()
        slot = type(ours[0].weight._slot)
        for name in ("settle", "hold", "_over", "end"):
            for after in (False, True):
                for left in (0, 2, 4):
                    usual, calls = getattr(slot, name), []

                    def interrupted(self, *args, usual=usual, calls=calls, after=after, left=left):
                        calls.append(name)
                        out = usual(self, *args) if after or len(calls) != left + 1 else None
                        if len(calls) == left + 1:
                            raise KeyboardInterrupt
                        return out

                    setattr(slot, name, interrupted)
                    try:
                        with self.assertRaises(KeyboardInterrupt) as caught:
                            loss_of(ours).backward()
                    finally:
                        setattr(slot, name, usual)
                    del caught
                    ours.zero_grad()
                    gc.collect()
                    self.check_it_goes_on(pair)

    def test_a_step_is_made_as_a_whole(self):
        for overlap in ("step", "forward"):
            (plain, theirs), (ours, optimizer) = self.pair(overlap=overlap)
            if overlap == "forward":
                optimizer.attach(ours)
            for model, o in ((plain, theirs), (ours, optimizer)):
                self.step(model, o)
            loss_of(ours).backward()
            usual = self.seconds_of(optimizer.step)
            loss_of(plain).backward()
            theirs.step()
            made = torch.tensor(2.0)
            for _ in range(int(os.environ.get("ZG_TEST_INTERRUPTS", "30")) // 2):
                self.interrupted(usual, optimizer.step)
                while True:
                    try:
                        optimizer.flush()
                        break
                    except KeyboardInterrupt:
                        pass
                steps = {int(optimizer.state[p]["step"]) for p in ours.parameters()}
                self.assertEqual(len(steps), 1, steps)
                for _ in range(steps.pop() - int(made)):
                    theirs.step()
                    made += 1
                self.assertTrue(same_bits(plain.parameters(), ours.parameters()))
            optimizer.close()
            self.off.close()


class Exceptions(Case):
    def test_in_functions(self):
        """In a module's forward, and of a parameter alone, with gradients and without."""
        pair = _, (ours, _) = self.pair()
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                for fails in (lambda: ours[1].a(torch.ones(2, 3)), lambda: ours[1].a.weight @ torch.ones(3),
                              lambda: ours(torch.tensor([1000]))):  # fmt: skip
                    with self.assertRaises((RuntimeError, IndexError)) as caught:
                        fails()
                    self.assertFalse(hooks_are_left())
                    self.assertEqual(self.off.store._core.leases, 0)
                    del caught
        self.check_it_goes_on(pair)

    def test_in_backward(self):
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return x @ w.t()

            @staticmethod
            def backward(ctx, g):
                _ = ctx.saved_tensors
                raise ZeroDivisionError

        pair = _, (ours, _) = self.pair()
        for _ in range(2):
            with self.assertRaises(ZeroDivisionError):
                Fails.apply(ours[0](X).mean(1), ours[3].weight).sum().backward()
            handle = ours[1].a.weight.register_hook(lambda g: 1 / 0)
            with self.assertRaises(ZeroDivisionError):
                loss_of(ours).backward()
            handle.remove()
            ours.zero_grad()
            self.check_it_goes_on(pair)

    def test_updates_that_wait_for_what_this_thread_holds(self):
        """An error, and not two threads that wait for each other; the update is made when there is room."""
        pair = (plain, theirs), (ours, optimizer) = self.pair(host_bytes=120 << 10, overlap="forward")
        optimizer._patience = 0.5
        self.check_it_goes_on(pair)
        for begun, told in ((False, "the leases that are held fill the budget"), (True, "finds no room for its update")):
            loss_of(ours).backward()
            late = optimizer._worker.submit(time.sleep, 1)
            optimizer.step()
            held = [ours[0].weight[:], ours[1].a.weight[:]]  # this thread makes their updates
            if begun:
                late.result()
                time.sleep(0.5)
            with self.assertRaisesRegex(zg.MemoryLimitError, told):
                held.append(ours[1].b.weight[:])
            del held
            gc.collect()
            loss_of(plain).backward()
            theirs.step()
            optimizer.flush()
            self.assertTrue(same_bits(plain.parameters(), ours.parameters()))
            for model, o in pair:
                o.zero_grad()
            self.check_it_goes_on(pair)

    def test_what_was_changed_in_place_before_backward(self):
        (plain, _), (ours, _) = self.pair()
        for model in (plain, ours):
            x = model[0](X)
            y = model[1](torch.exp(x) if model is plain else torch.exp(x))
            z = torch.exp(y)
            with torch.no_grad():
                z.mul_(2)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                z.sum().backward()
        bias = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        with zt.offload(bias, host_bytes="1MiB", min_bytes=4096):
            out = bias(torch.ones(1, WIDTH))
            with torch.no_grad():
                bias[1].weight.add_(1)  # in memory: it is small
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                out.sum().backward()


class Activations(Case):
    def test_graphs_that_are_dropped_leave_nothing(self):
        """Neither what goes to the store, nor what is too small and stays."""
        with zg.Store(host_bytes="8MiB") as store:
            for least in (0, 1 << 20):
                with zt.offload_activations(store, min_bytes=least):
                    w = torch.ones(64, 64, requires_grad=True)
                    out = [torch.exp(w), torch.exp(w) * 2, w.norm()]
                gone = [weakref.ref(t) for t in out]
                out.clear()
                gc.collect()
                self.assertEqual([r() for r in gone], [None] * 3)

    def test_they_go_to_the_store_beside_an_offloaded_model(self):
        (plain, _), (ours, _) = self.pair()
        with zg.Store(host_bytes="8MiB") as store:
            for model in (plain, ours):
                with zt.offload_activations(store, min_bytes=1024):
                    loss = loss_of(model)
                stored = len(list(store))
                self.assertGreater(stored, 8)
                loss.backward()
                del loss
            gc.collect()
            self.assertEqual(len(list(store)), stored)  # the same again: parameters are not among them
        self.assertTrue(same_bits([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()]))


class Updates(Case):
    def test_overlapping_ones_are_seen_by_all_who_use_the_parameter(self):
        """With a worker that is late: parameters, gradients of the next step, a graph that is older, norms."""
        (plain, theirs), (ours, optimizer) = self.pair(host_bytes="2MiB", overlap="forward", max_grad_norm=1e-3)
        theirs._max_grad_norm = 1e-3
        optimizer._worker = SlowWorker(0.02)
        optimizer.attach(ours)  # for the small ones
        sums = {plain: [], ours: []}
        for _ in range(3):
            for model, o in ((plain, theirs), (ours, optimizer)):
                older = model[2].a.weight.square().sum()
                loss_of(model).backward()
                norms = [p.grad.double().norm() for p in model.parameters()]
                o.step()
                o.zero_grad()
                if model is ours:
                    self.assertGreater(len(o._jobs), 4)
                sums[model].append(model[2].a.weight.sum().item())  # outside of a forward pass
                loss_of(model).backward()  # the next gradients, while updates still read those before
                with self.assertRaisesRegex(RuntimeError, "modified"):
                    older.backward()
                o.zero_grad()
                del older
            self.assertEqual(sums[plain], sums[ours])
            self.assertEqual(theirs.grad_norm, optimizer.grad_norm)
            self.assertAlmostEqual(optimizer.grad_norm / torch.stack(norms).norm().item(), 1, delta=1e-6)
            self.assertTrue(same_bits(plain.parameters(), ours.parameters()))
        optimizer.step()
        self.assertTrue(all(p.grad is None for p in ours.parameters()))


class LaterTrainable(Case):
    def test_updates_in_backward_of_what_was_frozen(self):
        plain, ours = make().requires_grad_(False), make().requires_grad_(False)
        off = zt.offload(ours, host_bytes="1MiB", drives={self.folder: "16MiB"}, min_bytes=4096)
        self.addCleanup(off.close)
        for model, where in ((plain, {"host_bytes": "8MiB"}), (ours, {"store": off.store})):
            model[1].requires_grad_(True)
            optimizer = zt.AdamW(model[1].parameters(), lr=1e-3, overlap="backward", **where)
            for _ in range(3):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
        self.assertTrue(same_bits(plain.parameters(), ours.parameters()))


if __name__ == "__main__":
    import unittest

    unittest.main()
