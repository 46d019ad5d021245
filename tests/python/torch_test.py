"""The optimizers for torch: bits, state, clipping, scaling, overlap, life; and activations. Needs torch."""
import copy
import math
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings

try:
    import torch
except ImportError:
    print("skipped: torch is not installed")
    sys.exit(77)

from support import SlowWorker  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

SIZES = [(257,), (64, 33), (1,), (300, 70), (5000,)]  # odd ones, and one of several segments


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]


def set_gradients(params, step, dtype=None, leave_out=()):
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator) * 0.1
        p.grad = None if i in leave_out else g.to(dtype or p.dtype)


def bits(tensors):
    return [t.detach().clone().contiguous().view(torch.uint8) for t in tensors]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def make(self, params, kind=None, nvme=False, **options):
        options.setdefault("segment_bytes", 8192)
        options.setdefault("host_bytes", "64KiB" if nvme else "64MiB")
        if nvme:
            options["drives"] = {tempfile.mkdtemp(dir=self.folder): "4MiB"}
        optimizer = (kind or zt.AdamW)(params, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def assert_same(self, a, b):
        for i, (x, y) in enumerate(zip(bits(a), bits(b))):
            self.assertTrue(torch.equal(x, y), f"tensor {i}")

    def run_steps(self, steps, dtype=torch.float32, kind=None, first=0, params=None, optimizer=None, **options):
        params = params or parameters(dtype)
        optimizer = optimizer or self.make(params, kind, **options)
        for step in range(first, first + steps):
            set_gradients(params, step)
            optimizer.step()
        optimizer.flush()
        return params, optimizer


class Values(Case):
    def compare(self, ours, theirs, steps=20, lr=1e-2, **both):
        a, b = parameters(torch.float32), parameters(torch.float32)
        mine = self.make(a, ours, lr=lr, **both)
        other = theirs(b, lr=lr, **both)
        for step in range(steps):
            out = (1,) if step == 3 else ()  # a parameter without a gradient
            set_gradients(a, step, leave_out=out)
            set_gradients(b, step, leave_out=out)
            mine.step()
            other.step()
        for x, y in zip(a, b):
            ulp = torch.nextafter(y.abs(), torch.tensor(math.inf)) - y.abs()
            excess = ((x - y).abs() - (1e-6 * lr * steps + 4 * ulp)).max().item()
            self.assertLessEqual(excess, 0)

    def test_adamw_within_the_documented_bound_of_torch(self):
        self.compare(zt.AdamW, torch.optim.AdamW, weight_decay=0.1)

    def test_adam(self):
        self.compare(zt.Adam, torch.optim.Adam, weight_decay=0.1)

    def test_sgd(self):
        self.compare(zt.SGD, torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.01)
        self.compare(zt.SGD, torch.optim.SGD, momentum=0.9, nesterov=True)
        self.compare(zt.SGD, torch.optim.SGD)

    def test_lion_by_its_definition(self):
        params, _ = self.run_steps(5, kind=zt.Lion, lr=1e-2, weight_decay=0.1)
        expected = parameters(torch.float32)
        moments = [torch.zeros_like(p) for p in expected]
        for step in range(5):
            set_gradients(expected, step)
            for p, m in zip(expected, moments):
                u = 0.9 * m + 0.1 * p.grad
                m.mul_(0.99).add_(p.grad, alpha=0.01)
                p.data.mul_(1 - 1e-3).sub_(u.sign(), alpha=1e-2)
        for x, y in zip(params, expected):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)

    def test_the_same_bits_over_host_and_nvme_and_every_overlap(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for state in ("fp32", "split", "bf16", "int8"):
                reference, _ = self.run_steps(4, dtype, state=state, lr=1e-2)
                for options in ({"nvme": True}, {"overlap": "forward", "nvme": True}):
                    params, optimizer = self.run_steps(4, dtype, state=state, lr=1e-2, **options)
                    self.assert_same(reference, params)
                moved = optimizer.store.statistics().links.nvme_read.bytes
                if optimizer.state_bytes() > 2 * 65536:
                    self.assertGreater(moved, 0)

    def test_small_states_stay_near_the_full_one(self):
        full, _ = self.run_steps(10, torch.bfloat16, lr=1e-2)
        split, _ = self.run_steps(10, torch.bfloat16, state="split", lr=1e-2)
        self.assert_same(full, split)  # exact, not only near
        for state in ("bf16", "int8"):
            other, _ = self.run_steps(10, torch.bfloat16, state=state, lr=1e-2)
            for x, y in zip(full, other):
                self.assertLess((x.float() - y.float()).abs().max().item(), 0.1)

    def test_masters_keep_what_the_parameter_rounds_away(self):
        p = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = self.make([p], zt.SGD, lr=1e-4)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        self.assertAlmostEqual(p[0].item(), 0.99, delta=0.004)

    def test_state_takes_the_documented_bytes(self):
        table = {torch.float32: (8, 8, 4, 2.03), torch.bfloat16: (12, 10, 6, 4.03), torch.float16: (12, 12, 8, 6.03)}
        for dtype, sizes in table.items():
            for state, size in zip(("fp32", "split", "bf16", "int8"), sizes):
                p = torch.nn.Parameter(torch.zeros(1 << 20, dtype=dtype))
                optimizer = self.make([p], state=state, segment_bytes="1MiB")
                self.assertAlmostEqual(optimizer.state_bytes() / (1 << 20), size, delta=0.06)


class Interface(Case):
    def test_groups_schedulers_hooks_and_closures(self):
        a, b = parameters(torch.float32), parameters(torch.float32)
        for params, kind in ((a, self.make), (b, torch.optim.AdamW)):
            frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            optimizer = kind([{"params": params[:2], "lr": 0.1}, {"params": params[2:4], "weight_decay": 0}], lr=1e-3)
            optimizer.add_param_group({"params": [params[4], frozen]})
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
            calls = []
            optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
            optimizer.register_step_post_hook(lambda *_: calls.append("post"))
            for step in range(3):
                loss = optimizer.step(lambda: (set_gradients(params, step), 5)[1])
                self.assertEqual(loss, 5)
                schedule.step()
            self.assertEqual(calls, ["pre", "post"] * 3)
            optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
            set_gradients(params, 4)
            optimizer.step()
            self.assertIsNone(frozen.grad)
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)

    def test_one_cycle(self):
        params = parameters(torch.float32)
        optimizer = self.make(params)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
            schedule.step()

    def test_clipping_by_the_optimizer_is_clipping_by_torch(self):
        a, b = parameters(torch.float32), parameters(torch.float32)
        mine, other = self.make(a, max_grad_norm=0.5), self.make(b)
        for step in range(3):
            set_gradients(a, step)
            set_gradients(b, step)
            norm = torch.nn.utils.clip_grad_norm_(b, 0.5)
            mine.step()
            other.step()
            self.assertAlmostEqual(mine.grad_norm, norm.item(), delta=1e-5 * norm.item())
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        a[0].grad[0] = math.inf
        before = bits(a)
        with self.assertRaises(zg.NumericError):
            mine.step()
        self.assertTrue(all(torch.equal(x, y) for x, y in zip(before, bits(a))))

    def test_grad_scaler_unscales_and_skips(self):
        a, b = parameters(torch.float32), parameters(torch.float32)
        mine, other = self.make(a), self.make(b)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(4):
            set_gradients(a, step)
            set_gradients(b, step)
            scaler.scale(torch.zeros(()))
            for p in a:
                p.grad *= 1024  # as the backward pass of a scaled loss leaves them
            if step == 2:
                a[3].grad[0, 0] = math.inf
                before, state = bits(a), copy.deepcopy(mine.state_dict())
                scaler.step(mine)
                self.assertTrue(all(torch.equal(x, y) for x, y in zip(before, bits(a))))
                self.assertTrue(torch.equal(state["state"][3]["exp_avg"], mine.state_dict()["state"][3]["exp_avg"]))
                scaler.update(1024.0)
                continue
            scaler.step(mine)
            scaler.update(1024.0)
            other.step()
        self.assert_same(a, b)

    def test_a_scaler_and_clipping_by_torch(self):
        a, b = parameters(torch.float32), parameters(torch.float32)
        mine, other = self.make(a), self.make(b)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            set_gradients(a, step)
            set_gradients(b, step)
            scaler.scale(torch.zeros(()))
            for p in a:
                p.grad *= 1024
            scaler.unscale_(mine)
            torch.nn.utils.clip_grad_norm_(a, 0.5)
            torch.nn.utils.clip_grad_norm_(b, 0.5)
            scaler.step(mine)
            scaler.update(1024.0)
            other.step()
        self.assert_same(a, b)

    def test_a_scaler_and_clipping_by_the_optimizer(self):
        a, b = parameters(torch.float32), parameters(torch.float32)
        mine, other = self.make(a, max_grad_norm=0.5), self.make(b, max_grad_norm=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            set_gradients(a, step)
            set_gradients(b, step)
            scaler.scale(torch.zeros(()))
            for p in a:
                p.grad *= 1024
            scaler.step(mine)
            scaler.update(1024.0)
            other.step()
            self.assertEqual(mine.grad_norm, other.grad_norm)
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)

    def test_overlap_in_the_backward_pass(self):
        def train(**options):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Tanh(), torch.nn.Linear(60, 7))
            optimizer = self.make(model.parameters(), lr=1e-2, **options)
            attached = optimizer.attach(model) if options.get("overlap") == "forward" else []
            losses = []
            for step in range(6):
                x = torch.randn(16, 50, generator=torch.Generator().manual_seed(step))
                loss = model(x).square().mean() / options.get("accumulation_steps", 1)
                loss.backward()
                losses.append(loss.item())
                if (step + 1) % options.get("accumulation_steps", 1) == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            state = model.state_dict()  # waits for what was begun
            for hook in attached:
                hook.remove()
            return [*state.values()], losses

        for extra in ({}, {"accumulation_steps": 3}):
            weights, losses = train(overlap="step", **extra)
            for overlap in ("forward", "backward"):
                for nvme in (False, True):
                    other, again = train(overlap=overlap, nvme=nvme, **extra)
                    self.assertEqual(losses, again)
                    self.assert_same(weights, other)

    def test_updates_that_wait_come_before_what_is_loaded(self):
        model = torch.nn.Linear(50, 7)
        optimizer = self.make(model.parameters(), lr=1e-2, overlap="forward")
        optimizer.attach(model)
        optimizer._worker = SlowWorker(0.1)
        loaded = {name: torch.full_like(t, 0.5) for name, t in model.state_dict().items()}
        model(torch.ones(3, 50)).square().mean().backward()
        optimizer.step()
        model.load_state_dict(loaded)
        optimizer.flush()
        self.assert_same(model.parameters(), [*loaded.values()])

    def test_weights_that_modules_share(self):
        def train(kind, **options):
            torch.manual_seed(4)
            head = torch.nn.Linear(16, 40, bias=False)
            model = torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Tanh(), head)
            head.weight = model[0].weight
            optimizer = kind(model.parameters(), lr=1e-2, **options)
            if options.get("overlap") == "forward":
                optimizer.attach(model)
            for step in range(4):
                ids = torch.randint(0, 40, (32,), generator=torch.Generator().manual_seed(step))
                torch.nn.functional.cross_entropy(model(ids), ids.flip(0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [*model.state_dict().values()]

        expected = train(self.make)
        for overlap in ("forward", "backward"):
            self.assert_same(expected, train(self.make, overlap=overlap))
        for x, y in zip(expected, train(torch.optim.AdamW)):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)

    def test_what_cannot_be_is_refused(self):
        store = zg.Store(host_bytes="1MiB")
        self.addCleanup(store.close)
        p = parameters(torch.float32)
        for options, place in (
            ({"overlap": "backward", "max_grad_norm": 1.0}, "max_grad_norm"),
            ({"overlap": "sideways"}, "overlap"),
            ({"state": "fp8"}, "state"),
            ({"eps": 0}, "eps"),
            ({"lr": -1}, "lr"),
            ({"betas": (0.9, 1.0)}, "betas"),
            ({"drives": {"/tmp": "1GiB"}, "host_bytes": None}, "host_bytes"),
            ({"store": store, "host_bytes": "1MiB"}, "host_bytes"),
            ({"store": store, "drives": {"/tmp": "1GiB"}}, "drives"),
        ):
            with self.assertRaises(zg.UsageError) as caught:
                zt.AdamW(p, **options)
            self.assertIn(place, caught.exception.place)
        with self.assertRaises(zg.UsageError):
            self.make([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))])
        with warnings.catch_warnings(), self.assertRaisesRegex(zg.UsageError, "twice"):
            warnings.simplefilter("ignore")  # torch's own, that this will be an error one day
            self.make([p[0], p[0]])
        optimizer = self.make(p)
        for how in (copy.deepcopy, pickle.dumps):
            with self.assertRaises(TypeError):
                how(optimizer)
        q = torch.nn.Parameter(torch.zeros(4, 3))
        sparse = self.make([q])
        q.grad = torch.zeros(4, 3).to_sparse()
        with self.assertRaises(zg.UsageError):
            sparse.step()
        with self.assertRaises(zg.UsageError):
            self.make([{"params": [torch.nn.Parameter(torch.zeros(2))], "maximize": True}])

    def test_weights_that_others_write_become_the_masters(self):
        for state in ("fp32", "split"):
            params, optimizer = self.run_steps(2, torch.bfloat16, state=state)
            with torch.no_grad():
                for p in params:
                    p.fill_(3)
            for p in params:
                p.grad = torch.zeros_like(p)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            with self.assertLogs("ziggurat.torch", "INFO") as told:
                optimizer.step()
            self.assertEqual(len(told.records), len(params))
            for p in params:
                self.assertEqual(p.unique().tolist(), [3.0])

    def test_parameters_that_are_not_contiguous_and_backward_sees_the_change(self):
        p = torch.nn.Parameter(torch.randn(30, 20).t())
        q = torch.nn.Parameter(p.detach().contiguous())
        a, b = self.make([p]), self.make([q])
        p.grad = torch.randn(20, 30)
        q.grad = p.grad.clone()
        losses = [(x * x).sum() for x in (p, q)]
        a.step()
        b.step()
        self.assert_same([p], [q])
        for loss in losses:
            with self.assertRaises(RuntimeError):
                loss.backward()  # needs values that the step has overwritten

    def test_forwards_that_do_not_wait_are_told(self):
        model = torch.nn.Linear(50, 7)
        optimizer = self.make(model.parameters(), overlap="forward")
        for told in (False, True):  # only a second forward pass can meet an update
            model(torch.ones(3, 50)).square().mean().backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            self.assertEqual([w.filename for w in caught], [__file__] * told)
        optimizer.attach(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                model(torch.ones(3, 50)).square().mean().backward()
                optimizer.step()

    def test_a_store_of_ones_own_with_two_optimizers(self):
        with zg.Store(host_bytes="8MiB", drives={self.folder: "16MiB"}) as store:
            a, b = parameters(torch.float32), parameters(torch.float32)
            first, second = zt.AdamW(a, store=store), zt.AdamW(b, store=store)
            for step in range(2):
                set_gradients(a, step)
                set_gradients(b, step)
                with store.step():
                    first.step()
                    second.step()
            self.assert_same(a, b)
            first.close()
            second.close()
            self.assertEqual(store.statistics().tiers.host.used, 0)

    def test_other_threads_run_during_a_step(self):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)
        self.addCleanup(sys.setswitchinterval, interval)
        params = [torch.nn.Parameter(torch.zeros(4 << 20))]
        optimizer = self.make(params, segment_bytes="1MiB")
        ticks, stop = [], threading.Event()
        thread = threading.Thread(target=lambda: [ticks.append(0) for _ in iter(lambda: stop.wait(0.001), True)])
        thread.start()
        for _ in range(5):
            set_gradients(params, 0)
            optimizer.step()
        stop.set()
        thread.join()
        self.assertGreater(len(ticks), 2)

    def test_a_store_takes_tensors_of_torch(self):
        with zg.Store(host_bytes="8MiB") as store:
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
                values = (torch.randn(30, 20) * 9).to(dtype)
                t = store.add(str(dtype), dtype, (20, 30))
                t.write(values.t())  # not contiguous
                with t.acquire() as lease:
                    self.assertTrue(torch.equal(lease.torch((20, 30)), values.t()))
            with self.assertRaises(zg.UsageError):
                t.write(values.float())

    def test_a_forked_loader_beside_it(self):
        params, optimizer = self.run_steps(1, nvme=True)
        data = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
        self.assertEqual(sum(len(batch) for batch in data), 8)
        set_gradients(params, 1)
        optimizer.step()
        pid = os.fork()
        if pid == 0:
            try:
                optimizer.state_dict()
                os._exit(1)
            except zg.ForkError:
                os._exit(0)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)


class Examples(Case):
    def test_the_example_goes_on_as_if_it_had_not_stopped(self):
        example = pathlib.Path(__file__).resolve().parents[2] / "tools" / "examples" / "train_torch.py"
        lines = []
        for nvme in ([], ["--nvme", self.folder]):
            command = [sys.executable, example, "--steps", "20", *nvme]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            lines.append(done.stdout)
        self.assertIn("step 20: loss", lines[0])
        self.assertEqual(*lines)


class StateDict(Case):
    def save_and_load(self, state_dict):
        path = os.path.join(self.folder, "state.pt")
        torch.save(state_dict, path)
        return torch.load(path, weights_only=True)

    def test_goes_on_bit_for_bit(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for state in ("fp32", "split", "bf16", "int8"):
                params, optimizer = self.run_steps(3, dtype, state=state, lr=1e-2)
                saved = self.save_and_load(optimizer.state_dict())
                others = [torch.nn.Parameter(p.detach().clone()) for p in params]
                other = self.make(others, state=state, nvme=True)
                other.load_state_dict(saved)
                self.assertEqual(other.param_groups[0]["lr"], 1e-2)
                again = other.state_dict()
                for i, entry in saved["state"].items():
                    for name, value in entry.items():
                        self.assertTrue(torch.equal(value, again["state"][i][name]), (dtype, state, i, name))
                self.run_steps(5, params=params, optimizer=optimizer, first=3)
                self.run_steps(5, params=others, optimizer=other, first=3)
                self.assert_same(params, others)

    def test_to_torch_and_back(self):
        params, optimizer = self.run_steps(3, weight_decay=0.1)
        saved = self.save_and_load(optimizer.state_dict())
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        theirs = torch.optim.AdamW(copies, lr=1)
        self.assertEqual(set(saved["param_groups"][0]), set(theirs.state_dict()["param_groups"][0]))
        theirs.load_state_dict(saved)
        self.assertEqual(theirs.param_groups[0]["weight_decay"], 0.1)
        returned = theirs.state_dict()
        for i, entry in saved["state"].items():
            self.assertEqual(set(entry), set(returned["state"][i]))
            for name, value in entry.items():
                self.assertTrue(torch.equal(value, returned["state"][i][name]), (i, name))
        for step in range(3):
            set_gradients(copies, step)
            theirs.step()
        back = self.make(copies)
        back.load_state_dict(theirs.state_dict())
        for i, entry in theirs.state_dict()["state"].items():
            for name, value in entry.items():
                self.assertTrue(torch.equal(value, back.state_dict()["state"][i][name]), (i, name))
        set_gradients(copies, 9)
        back.step()

    def test_moments_of_bf16_parameters_keep_their_bits(self):
        params, optimizer = self.run_steps(1, torch.bfloat16)
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"].fill_(1.001)
        optimizer.load_state_dict(saved)
        self.assertEqual(optimizer.state_dict()["state"][0]["exp_avg"][0].item(), torch.tensor(1.001).item())

    def test_limit_and_misfits(self):
        params, optimizer = self.run_steps(1, state_dict_limit=1000)
        with self.assertRaises(RuntimeError):
            optimizer.state_dict()
        _, other = self.run_steps(1)
        with self.assertRaises(zg.UsageError):
            self.make(parameters(torch.float32)[:2]).load_state_dict(other.state_dict())
        wrong = other.state_dict()
        wrong["state"][0]["exp_avg"] = torch.zeros(3)
        with self.assertRaises(zg.UsageError):
            other.load_state_dict(wrong)

    def test_hooks(self):
        _, optimizer = self.run_steps(1)
        calls = []
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
        optimizer.register_state_dict_post_hook(lambda o, d: d.update(mine=1))
        optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
        saved = optimizer.state_dict()
        self.assertEqual(saved.pop("mine"), 1)
        optimizer.load_state_dict(saved)
        self.assertEqual(calls, ["pre", "load", "loaded"])


class Activations(Case):
    def gradients(self, offload, checkpoint=False, retain=False):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)]
        model = torch.nn.Sequential(*layers)
        x = torch.randn(512, 256, requires_grad=True)
        run = model
        if checkpoint:
            run = lambda v: torch.utils.checkpoint.checkpoint(model, v, use_reentrant=False)  # noqa: E731
        if offload is None:
            loss = run(x).square().sum()
        else:
            with offload:
                loss = run(x).square().sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    def store(self):
        store = zg.Store(host_bytes="2MiB", drives={self.folder: "64MiB"})
        self.addCleanup(store.close)
        return store

    def test_gradients_have_the_same_bits(self):
        for options in ({}, {"checkpoint": True}, {"retain": True}):
            store = self.store() if not options else zg.Store(host_bytes="32MiB")
            expected = self.gradients(None, **options)
            self.assert_same(expected, self.gradients(zt.offload_activations(store, min_bytes=1024), **options))
            if not options:
                self.assertGreater(store.statistics().links.nvme_read.bytes, 0)

    def test_weights_stay_and_duplicates_are_stored_once(self):
        store = zg.Store(host_bytes="32MiB")
        w = torch.nn.Parameter(torch.randn(512, 512))
        x = torch.randn(512, 512, requires_grad=True)
        y = x * 2  # a saved tensor that is no leaf
        with zt.offload_activations(store):
            z = (y @ w.t()).sum() + (y * y).sum()
        self.assertEqual(len(list(store)), 1)
        z.backward()

    def test_a_graph_that_is_dropped_frees_its_slots(self):
        store = zg.Store(host_bytes="32MiB")
        offload = zt.offload_activations(store)
        with offload:
            for _ in range(3):
                y = (torch.randn(512, 512, requires_grad=True) * 1.5).exp()
                del y
        self.assertLessEqual(len(list(store)), 2)

    def test_each_forward_pass_takes_the_slots_of_the_one_before(self):
        store = zg.Store(host_bytes="32MiB")
        made = []
        for _ in range(3):
            x = torch.randn(512, 512, requires_grad=True)
            with zt.offload_activations(store):
                y = (x * 2).exp().sum()
            y.backward()
            del y
            made.append(len(list(store)))
        self.assertEqual(made, made[:1] * 3)

    def test_one_object_serves_all_steps_and_decorates(self):
        store = zg.Store(host_bytes="32MiB")
        expected = self.gradients(None)
        offload = zt.offload_activations(store, min_bytes="1KiB")
        for _ in range(2):
            self.assert_same(expected, self.gradients(offload))
        made = len(list(store))
        self.assertGreater(made, 0)
        store = zg.Store(host_bytes="32MiB")
        self.assert_same(expected, zt.offload_activations(store, min_bytes="1KiB")(self.gradients)(None))
        self.assertEqual(len(list(store)), made)

    def test_what_it_cannot_take(self):
        for arguments, options, place in (
            (("store",), {}, "store"),
            ((zg.Store(host_bytes="1MiB"),), {"min_bytes": "much"}, "min_bytes"),
        ):
            with self.assertRaises(zg.UsageError) as caught:
                zt.offload_activations(*arguments, **options)
            self.assertEqual(caught.exception.place, place)

    def test_memory_that_was_freed_goes_back_to_the_system(self):
        """While tensors pass, what glibc has kept of earlier ones between live blocks is given back."""
        script = """if True:
            import torch, ziggurat as zg, ziggurat.torch as zt

            def resident():
                with open("/proc/self/statm") as f:
                    return int(f.read().split()[1]) * 4096

            store = zg.Store(host_bytes="160MiB")
            x = torch.ones(64 << 18, requires_grad=True) * 0.5
            torch.ones(31 << 18)  # is freed at once: from now on glibc takes blocks of up to 31 MiB from its heap
            large, small = zip(*((torch.ones(4 << 18), torch.ones(1 << 14)) for _ in range(64)))
            full = resident()
            del large
            kept = resident()
            with zt.offload_activations(store):
                y = x.exp()  # saves its result of 64 MiB
            print(full - kept >> 20, kept + y.nbytes - resident() >> 20)
            """
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                              env=environment)  # fmt: skip
        at_once, later = map(int, done.stdout.split())
        self.assertLess(at_once, 64)  # of 256 MiB: the rest was kept
        self.assertGreater(later, 128)

    def test_what_is_skipped_stays(self):
        store = zg.Store(host_bytes="32MiB")
        with zt.offload_activations(store, skip=lambda t: True):
            (torch.randn(512, 512, requires_grad=True) * 2).exp().sum().backward()
        self.assertEqual(list(store), [])


if __name__ == "__main__":
    unittest.main()
