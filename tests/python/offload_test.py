"""offload(): the same bits as plain PyTorch, within budgets, whatever a model does; life and errors. Needs torch."""
import copy
import gc
import json
import os
import struct
import warnings
import weakref

from support import InFolder, bits, need, same_bits

need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

torch.set_num_threads(1)
WIDTH = 64  # a layer's weight has 16 KiB in fp32


class Block(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.b(nn.functional.gelu(self.a(self.norm(x)))))


class Model(nn.Module):
    """Tied embeddings, batch norm, a ModuleList, and a parameter of its own; `checkpoint`: a torch.utils.checkpoint."""

    def __init__(self, layers=6, checkpoint=None):
        super().__init__()
        self.embed, self.scale = nn.Embedding(96, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 96, bias=False)
        self.head.weight, self.checkpoint = self.embed.weight, checkpoint

    def forward(self, x):
        x = self.embed(x) @ self.scale.t()
        for i in range(len(self.blocks)):
            block = self.blocks[i]
            x = self.checkpoint(block, x) if self.checkpoint else block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def loss_of(model, x):
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def train(model, store=None, steps=20, batches=1, clip=None, kind=None, **options):
    """Losses and norms of some steps; the optimizer is zt's, over the model's store or in memory."""
    options.update({"store": store} if store else {"host_bytes": "64MiB"})
    optimizer = (kind or zt.AdamW)(model.parameters(), lr=1e-3, **options)
    if options.get("overlap") == "forward":
        optimizer.attach(model)
    torch.manual_seed(1)
    told = []
    for _ in range(steps):
        for _ in range(batches):
            loss = loss_of(model, torch.randint(0, 96, (2, 12)))
            loss.backward()
            told.append(loss.item())
            del loss
        if clip:
            told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    return told, optimizer


class Case(InFolder):
    def offload(self, model, tenth=False, **options):
        options.setdefault("min_bytes", 4096)
        if tenth:  # of parameters, gradients and state, which are 2 + 2 + 12 bytes for bf16, 16 for fp32
            options["host_bytes"] = sum(p.numel() for p in model.parameters()) * 16 // 10
            options["drives"] = {self.folder: "64MiB"}
        options.setdefault("host_bytes", None if "store" in options else "64MiB")
        off = zt.offload(model, **options)
        self.addCleanup(off.close)
        return off

    def compare(self, dtype=torch.float32, tenth=False, model=None, steps=20, **options):
        """Trains beside plain PyTorch; returns the statistics before the end."""
        model = model or (lambda: make(dtype))
        plain, ours = model(), model()
        expected, optimizer = train(plain, steps=steps, **options)
        optimizer.close()
        off = self.offload(ours, tenth)
        found, optimizer = train(ours, off.store, steps=steps, segment_bytes=16384, **options)
        self.assertEqual(expected, found)
        out = off.statistics()
        host = out.store.tiers.host
        self.assertLessEqual(host.peak, host.budget)
        if tenth:  # each step reads what it uses: all but a budget of that was on the drive when it began
            absent = out.parameter_bytes + optimizer.state_bytes() - host.budget
            self.assertGreater(absent, 0)
            self.assertGreaterEqual(out.store.links.nvme_read.bytes, (steps - 1) * absent)
        optimizer.close()
        off.close()
        self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))
        return out


class Bits(Case):
    def test_resident_host_and_nvme(self):
        for dtype in (torch.float32, torch.bfloat16):
            told = self.compare(dtype)
            self.assertEqual(told.store.links.nvme_read.bytes, 0)
            told = self.compare(dtype, tenth=True)
            self.assertGreater(told.store.links.nvme_read.bytes, 0)
            self.assertEqual(told.gradient_bytes, 0)
            self.assertEqual(told.store.left_record, 0)

    def test_accumulation_and_clipping(self):
        for dtype in (torch.float32, torch.bfloat16):
            self.compare(dtype, tenth=True, batches=3, clip=0.5)
            self.compare(dtype, tenth=True, batches=3, max_grad_norm=0.5)

    def test_overlaps(self):
        self.compare(torch.bfloat16, tenth=True, overlap="forward", batches=2, max_grad_norm=0.5)
        self.compare(torch.bfloat16, tenth=True, overlap="backward")

    def test_other_optimizers(self):
        for kind in (zt.SGD, zt.Lion):
            self.compare(tenth=True, kind=kind)

    def test_torch_optimizers(self):
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            plain, ours = make(), make()
            off = self.offload(ours, tenth=True)
            for model in (plain, ours):
                optimizer = kind(model.parameters(), lr=1e-2)
                torch.manual_seed(1)
                for _ in range(5):
                    loss_of(model, torch.randint(0, 96, (2, 12))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            off.close()
            self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))

    def test_checkpoints_of_activations(self):
        from torch.utils.checkpoint import checkpoint

        for reentrant in (False, True):
            self.compare(tenth=True, model=lambda: make(
                checkpoint=lambda block, x: checkpoint(block, x, use_reentrant=reentrant)), batches=2)  # fmt: skip

    def test_activations_in_the_store(self):
        plain, ours = make(), make()
        off = self.offload(ours, tenth=True)
        other = os.path.join(self.folder, "other")
        os.mkdir(other)
        with zg.Store(host_bytes="1MiB", drives={other: "16MiB"}) as store:
            offload = zt.offload_activations(store, min_bytes=1024)
            for model in (plain, ours):
                torch.manual_seed(1)
                with offload:
                    loss = loss_of(model, torch.randint(0, 96, (2, 12)))
                loss.backward()
                del loss
            gc.collect()
        self.assertTrue(same_bits([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()]))

    def test_autocast_and_grad_scaler(self):
        plain, ours = make(), make()
        off = self.offload(ours, tenth=True)
        for model, store in ((plain, None), (ours, off.store)):
            optimizer = zt.AdamW(model.parameters(), lr=1e-3, **({"store": store} if store else {"host_bytes": "9MiB"}))
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            torch.manual_seed(1)
            for step in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, torch.randint(0, 96, (2, 12)))
                scaler.scale(loss).backward()
                if step > 1:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                del loss
            optimizer.close()
        off.close()
        self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))

    def test_frozen_parameters_are_never_written_back(self):
        def model():
            out = make()
            for p in out.parameters():
                p.requires_grad_(p is out.scale)
            return out

        plain, ours = model(), model()
        train(plain)[1].close()
        off = self.offload(ours, tenth=True)
        train(ours, off.store, steps=4)[1].close()
        written = off.statistics().store.links.nvme_write.bytes
        read = off.statistics().store.links.nvme_read.bytes
        _, optimizer = train(model := ours, off.store, steps=8)
        told = off.statistics().store.links
        self.assertGreater(told.nvme_read.bytes, read + 8 * 100_000)
        # The one that is trained, its gradient and its state: nothing else.
        self.assertLessEqual(told.nvme_write.bytes - written, 8 * 5 * model.scale.numel() * 4)
        self.assertTrue(all(p.grad is None for p in ours.parameters()))
        optimizer.close()

    def test_fp32_gradients_of_bf16_parameters(self):
        model = make(torch.bfloat16)
        off = self.offload(model, gradient_dtype=torch.float32)
        exact = {}
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randint(0, 96, (2, 12))
            names, params = zip(*[(n, p) for n, p in model.named_parameters() if isinstance(p, zt.Stored)])
            torch.manual_seed(seed)
            for name, g in zip(names, torch.autograd.grad(loss_of(model, x), params)):
                exact[name] = exact.get(name, 0) + g.float()
            torch.manual_seed(seed)
            loss_of(model, x).backward()
        for name, p in zip(names, params):
            self.assertEqual(p.grad.dtype, torch.float32)
            self.assertTrue(torch.equal(p.grad, exact[name]), name)
        del params, p
        off.close()

    def test_second_derivatives(self):
        def penalty(model):
            torch.manual_seed(2)
            x = torch.randn(3, WIDTH)
            (g,) = torch.autograd.grad(model(x).square().sum(), [model.a.weight], create_graph=True)
            g.square().sum().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        torch.manual_seed(0)
        plain = Block(0.0)
        ours = copy.deepcopy(plain)
        off = self.offload(ours)
        expected, found = penalty(plain), penalty(ours)
        self.assertTrue(same_bits(expected, found))
        del expected, found
        off.close()


class Uses(Case):
    """What others do with parameters, in and out of forward passes."""

    def pair(self, **options):
        plain, ours = make(), make()
        return plain, ours, self.offload(ours, tenth=True, **options)

    def test_parameters_outside_of_their_modules(self):
        plain, ours, _ = self.pair()
        for model in (plain, ours):
            w = model.blocks[1].a.weight
            model.out = [w.norm(), w.sum(0), w[3:5].clone(), (w.t() @ w).detach(), torch.stack([w, w]), w.tolist()[0][0],
                         torch.nn.functional.linear(torch.ones(2, WIDTH), w, model.blocks[0].a.bias)]  # fmt: skip
        for a, b in zip(plain.out, ours.out):
            self.assertTrue(a == b if isinstance(a, float) else torch.equal(a, b))
        self.assertEqual(repr(plain.blocks[0].a.weight), repr(ours.blocks[0].a.weight))
        self.assertEqual(plain.scale.detach().numpy().tobytes(), ours.scale.detach().numpy().tobytes())

    def test_writes_in_place(self):
        plain, ours, off = self.pair()
        with torch.no_grad():
            for model in (plain, ours):
                model.scale.mul_(2)
                model.scale[3] = 7
                model.scale.data.add_(1)
                model.scale.data[5:7] = 3
                model.blocks[0].a.weight.copy_(torch.ones(2 * WIDTH, WIDTH))
                torch.manual_seed(5)
                nn.init.normal_(model.blocks[1].a.weight)
                model.blocks[2].a.weight.data = torch.full((2 * WIDTH, WIDTH), 0.5)
                torch.add(torch.ones(WIDTH, 2 * WIDTH), 1, out=model.blocks[3].b.weight.data)
        off.store.demote()
        off.close()
        self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))

    def test_a_write_through_a_view_is_told_by_name(self):
        _, ours, _ = self.pair()
        with torch.no_grad():
            ours.scale[0].zero_()
        with self.assertRaisesRegex(zg.UsageError, r'"scale".*written through a view'):
            ours(torch.zeros(2, 3, dtype=torch.long))
        ours(torch.zeros(2, 3, dtype=torch.long))  # told once; the model goes on

    def test_lent_for_code_that_takes_addresses(self):
        _, ours, _ = self.pair()
        with self.assertRaisesRegex(zg.UsageError, r'"scale".*no address.*\n.*zt.lent'):
            ours.scale.data_ptr()
        with zt.lent(ours.scale, mode="write"):
            self.assertNotEqual(ours.scale.data_ptr(), 0)
            ours.scale.detach()[0] = 3  # a view, but of bytes that are lent for writing
        self.assertEqual(ours.scale[0].sum().item(), 3 * WIDTH)
        with zt.lent(ours.scale), torch.no_grad(), self.assertRaisesRegex(zg.UsageError, "lent for reading"):
            ours.scale.detach().zero_()

    def test_a_parameter_that_changed_before_backward(self):
        _, ours, _ = self.pair()
        loss = loss_of(ours, torch.zeros(2, 3, dtype=torch.long))
        with torch.no_grad():
            ours.scale.mul_(2)
        with self.assertRaisesRegex(RuntimeError, r'"scale".*modified after the forward pass'):
            loss.backward()

    def test_a_graph_that_waits_holds_no_memory(self):
        _, ours, off = self.pair()
        losses = [loss_of(ours, torch.zeros(2, 3, dtype=torch.long)) for _ in range(2)]
        self.assertEqual(off.store._core.leases, 0)
        sum(losses).backward()
        self.assertEqual(off.store._core.leases, 0)

    def test_a_graph_that_is_dropped_leaves_nothing(self):
        _, ours, _ = self.pair()
        x = ours.embed(torch.zeros(2, 3, dtype=torch.long)).detach()
        out = [ours.scale.exp(), ours.blocks[0](x)]
        norm = ours.scale.norm()  # its backward needs the norm itself
        gone = [weakref.ref(t) for t in (*out, norm)]
        out.clear()
        del norm
        gc.collect()
        self.assertEqual([r() for r in gone], [None] * 3)

    def test_hooks_of_others_and_their_exceptions(self):
        plain, ours, off = self.pair()
        seen = {}
        for model in (plain, ours):
            seen[model] = []
            model.blocks[0].a.register_forward_hook(lambda m, i, o, s=seen[model]: s.append(m.weight.sum().item()))
            model.scale.register_hook(lambda g, s=seen[model]: s.append(g.norm().item()))
            model.scale.register_post_accumulate_grad_hook(lambda p, s=seen[model]: s.append(p.grad.sum().item()))
            torch.manual_seed(3)
            loss_of(model, torch.zeros(2, 3, dtype=torch.long)).backward()
        self.assertEqual(seen[plain], seen[ours])
        self.assertEqual(len(seen[ours]), 3)
        handle = ours.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with self.assertRaises(ZeroDivisionError):
            loss_of(ours, torch.zeros(2, 3, dtype=torch.long))
        handle.remove()
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
        loss_of(ours, torch.zeros(2, 3, dtype=torch.long)).backward()

    def test_gradients_are_tensors(self):
        plain, ours, _ = self.pair()
        for model in (plain, ours):
            torch.manual_seed(3)
            for _ in range(2):
                loss_of(model, torch.zeros(2, 3, dtype=torch.long)).backward()
            model.scale.grad.mul_(2)
            model.blocks[0].a.weight.grad = torch.ones(2 * WIDTH, WIDTH)
            model.blocks[1].a.weight.grad = None
        for (name, a), b in zip(plain.named_parameters(), ours.parameters()):
            self.assertEqual(a.grad is None, b.grad is None, name)
            self.assertTrue(a.grad is None or torch.equal(a.grad, b.grad), name)
        ours.zero_grad(set_to_none=False)
        self.assertEqual(ours.scale.grad.abs().max().item(), 0)

    def test_trainable_later(self):
        plain, ours = make(), make()
        for model in (plain, ours):
            model.requires_grad_(False)
        self.offload(ours)
        for model in (plain, ours):
            model.scale.requires_grad_(True)
            torch.manual_seed(3)
            loss_of(model, torch.zeros(2, 3, dtype=torch.long)).backward()
        self.assertIsInstance(ours.scale.grad, zt.Stored)
        self.assertTrue(torch.equal(plain.scale.grad, ours.scale.grad))


class Dictionaries(Case):
    def test_state_dict_is_lazy_and_loads(self):
        plain, ours = make(), make()
        off = self.offload(ours, tenth=True)
        saved = ours.state_dict()
        self.assertEqual(off.store._core.leases, 0)
        self.assertTrue(same_bits(plain.state_dict().values(), saved.values()))
        torch.manual_seed(9)
        other = Model()
        ours.load_state_dict(other.state_dict())
        again = copy.deepcopy(other.state_dict())
        self.assertTrue(same_bits(again.values(), ours.state_dict().values()))
        third = Model()
        third.load_state_dict(ours.state_dict())
        self.assertTrue(same_bits(again.values(), third.state_dict().values()))
        with self.assertRaisesRegex(zg.UsageError, "assign=True"):
            ours.load_state_dict(again, assign=True)
        path = os.path.join(self.folder, "saved.pt")
        torch.save(ours.state_dict(), path)
        self.assertTrue(same_bits(again.values(), torch.load(path, weights_only=True).values()))

    def write_files(self, model, dtype=None):
        """The model's tensors in two files, written by hand."""
        tensors = {n: t.to(dtype or t.dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()}
        del tensors["head.weight"]  # tied: one of its names
        kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
        folder = os.path.join(self.folder, "files")
        os.makedirs(folder, exist_ok=True)
        for part in range(2):
            table, data = {}, b""
            for name, t in list(tensors.items())[part::2]:
                raw = bits([t])[0].numpy().tobytes()
                table[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
            header = json.dumps(table).encode()
            with open(os.path.join(folder, f"{part}.safetensors"), "wb") as f:
                f.write(struct.pack("<Q", len(header)) + header + data)
        return folder

    def test_files_are_read_into_the_store(self):
        plain = make()
        for dtype in (torch.float32, torch.bfloat16):
            folder = self.write_files(plain, dtype)
            expected = copy.deepcopy(plain).to(dtype).to(torch.float32)
            with zt.empty_parameters():
                ours = Model()
            self.assertTrue(all(p.is_meta for p in ours.parameters()))
            self.assertIs(ours.head.weight, ours.embed.weight)
            off = self.offload(ours, tenth=True, files=folder)
            self.assertIs(ours.head.weight, ours.embed.weight)
            self.assertTrue(same_bits(expected.state_dict().values(), ours.state_dict().values()))
            x = torch.randint(0, 96, (2, 5))
            with torch.no_grad():
                self.assertTrue(torch.equal(expected.eval()(x), ours.eval()(x)))
            off.close(restore=False)
            self.assertTrue(all(p.is_meta for p in ours.parameters() if p.nbytes >= 4096))

    def test_files_that_do_not_fit(self):
        folder = self.write_files(make(layers=3))

        def opened(files=folder, **options):
            with zt.empty_parameters():
                model = Model(**options)
            return self.offload(model, files=files)

        with self.assertRaisesRegex(zg.UsageError, r'blocks\.3\.norm\.weight.*none of the files'):
            opened()
        with self.assertRaisesRegex(zg.UsageError, "no file that ends in"):
            opened(self.folder)
        path = os.path.join(folder, "0.safetensors")
        with open(path, "r+b") as f:
            content = f.read()
            f.truncate(len(content) - 8)
        with self.assertRaisesRegex(zg.UsageError, "0.safetensors.*no safetensors file"):
            opened(layers=3)
        with open(path, "wb") as f:
            f.write(b"\xff" * 64)
        with self.assertRaisesRegex(zg.UsageError, "0.safetensors.*header does not fit"):
            opened(layers=3)
        with zt.empty_parameters():
            model = Model()
        with self.assertRaisesRegex(zg.UsageError, r'scale.*meta device'):
            self.offload(model)


class Life(Case):
    def test_close_gives_the_plain_model_back(self):
        model = make()
        before, kept = copy.deepcopy(model), model.scale
        with self.offload(model, tenth=True) as off:
            self.assertIsInstance(model.scale, zt.Stored)
            self.assertEqual(model.scale.shape, before.scale.shape)
            loss_of(model, torch.zeros(2, 3, dtype=torch.long)).backward()
            gradient = model.scale.grad.clone()
            self.assertIn("scale", off.explain("scale"))
        self.assertIs(model.scale, kept)
        self.assertIs(type(kept), nn.Parameter)
        self.assertTrue(torch.equal(kept.grad, gradient))
        self.assertFalse(any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
        self.assertTrue(same_bits(before.parameters(), model.parameters()))
        off.close()
        self.assertEqual(os.listdir(self.folder), [])

    def test_two_models_in_one_store(self):
        with zg.Store(host_bytes="256KiB", drives={self.folder: "64MiB"}) as store:
            plain, a, b = make(), make(), make()
            offs = [self.offload(m, store=store) for m in (a, b)]
            x = torch.randint(0, 96, (2, 5))
            for model in (plain, a, b):
                torch.manual_seed(4)
                model(x).sum().backward()
            for other in (a, b):
                self.assertTrue(same_bits([p.grad for p in plain.parameters()], [p.grad for p in other.parameters()]))
            for off in offs:
                off.close()

    def test_errors_name_the_parameter(self):
        with self.assertRaisesRegex(zg.MemoryLimitError, r"host_bytes.*\n.*embed\.weight.*24576"):
            self.offload(make(), host_bytes=16384)
        model = make()
        model.other = nn.Parameter(model.scale.data.view(-1))
        with self.assertRaisesRegex(zg.UsageError, r'"other".*shares memory with "scale"'):
            self.offload(model)
        model = make()
        self.offload(model)
        with self.assertRaisesRegex(zg.UsageError, r'"scale".*offloaded already'):
            self.offload(model)
        with self.assertRaisesRegex(zg.UsageError, r'embed\.weight.*is to become torch.bfloat16'):
            model.bfloat16()
        with self.assertRaisesRegex(zg.UsageError, "compiled"):
            self.offload(torch.compile(make()))
        with self.assertRaisesRegex(zg.UsageError, "meta"):
            self.offload(make().to("meta"))
        for option in ({"device": "cuda"}, {"device_bytes": "1GiB"}):
            with self.assertRaisesRegex(zg.UsageError, next(iter(option)) + ".*\n.*on the processor"):
                self.offload(make(), **option)
        model = nn.Sequential(nn.Embedding(64, WIDTH, sparse=True))
        self.offload(model)
        with self.assertRaisesRegex(zg.UsageError, r'"0\.weight": is sparse'):
            model(torch.zeros(3, dtype=torch.long)).sum().backward()

    def test_no_room_for_what_views_hold(self):
        model = make()
        off = self.offload(model, tenth=True)
        with self.assertRaisesRegex(zg.MemoryLimitError, r'parameter "blocks'):
            held = [p.view(-1) for p in model.parameters()]
            del held
        gc.collect()
        loss_of(model, torch.zeros(2, 3, dtype=torch.long)).backward()
        self.assertEqual(off.store._core.leases, 0)

    def test_a_step_that_leaves_the_order(self):
        plain, ours = make(), make()
        off = self.offload(ours, tenth=True)
        for model in (plain, ours):
            optimizer = zt.AdamW(model.parameters(), lr=1e-3, **({"store": off.store} if model is ours else {"host_bytes": "9MiB"}))
            torch.manual_seed(1)
            for step in range(8):
                random = torch.Generator().manual_seed(step)
                x = model.embed(torch.randint(0, 96, (2, 12))) @ model.scale
                for i in torch.randint(0, 4, (step % 3 + 2,), generator=random).tolist():
                    x = model.blocks[i](x)
                model.head(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
        off.close()
        self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))

    def test_counters_of_passes_in_the_same_order(self):
        """12 equal parameters and room for 6: each is lent once a pass, written once for all, read at most once a pass,
        and no policy reads less than Belady's, which keeps 5 or 6 of them from one pass to the next."""
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)))
        each = model[0].weight.nbytes
        off = self.offload(model, host_bytes=6 * each, drives={self.folder: "16MiB"})
        told = []
        with torch.no_grad():
            for _ in range(8):
                model(torch.ones(2, WIDTH))
                off.store.drain()
                told.append(off.statistics())
        links = [t.store.links for t in told]
        for before, after in zip(told[1:], told[2:]):
            self.assertEqual(after.lent - before.lent, 12)
            read = after.store.links.nvme_read.bytes - before.store.links.nvme_read.bytes
            self.assertGreaterEqual(read, 5 * each)
            self.assertLessEqual(read, 12 * each)
        self.assertEqual(links[-1].nvme_write.bytes, 12 * each)
        self.assertGreater(told[-1].store.prefetches, 6 * 5)

    def test_evaluation_between_steps(self):
        model = make()
        off = self.offload(model, tenth=True)
        with torch.no_grad():
            first = model.eval()(torch.zeros(2, 3, dtype=torch.long))
            for _ in range(3):
                self.assertTrue(torch.equal(first, model(torch.zeros(2, 3, dtype=torch.long))))
        self.assertGreater(off.statistics().store.prefetches, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.state_dict()


if __name__ == "__main__":
    import unittest

    unittest.main()
