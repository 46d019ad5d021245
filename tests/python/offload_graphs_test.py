"""offload() of random module graphs beside the same in memory: shared, skipped, repeated and reordered modules.

ZG_TEST_SEED names one seed; ZG_TEST_SEEDS says how many there are (50). Needs torch.
"""
import os
import random

from support import InFolder, need, same_bits

need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ziggurat.torch as zt  # noqa: E402

torch.set_num_threads(1)


class Layer(nn.Module):
    """Uses its weight as drawn: by linear(), transposed, sliced, or through another module's parameter."""

    def __init__(self, width, kind):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / width**0.5), nn.Parameter(torch.zeros(width))
        self.kind, self.other = kind, None

    def forward(self, x):
        w = self.weight
        if self.kind == "transposed":
            return torch.tanh(x @ w.t() + self.bias)
        if self.kind == "sliced":
            half = len(w) // 2
            return torch.cat([x @ w[:half].t(), x @ w[half:].t()], -1)
        if self.kind == "other's":
            return nn.functional.linear(torch.relu(x), self.other[0].weight, self.bias) + x
        if self.kind == "detached":
            return x + nn.functional.linear(x, w.detach() * w, self.bias)
        return nn.functional.gelu(nn.functional.linear(x, w, self.bias))


class Graph(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.width = draw.choice([16, 32, 48])
        kinds = ["linear", "transposed", "sliced", "other's", "detached"]
        self.layers = nn.ModuleList(Layer(self.width, draw.choice(kinds)) for _ in range(draw.randint(3, 7)))
        for layer in self.layers:
            layer.other = [draw.choice(self.layers)]  # a list: not a submodule
        for _ in range(draw.randint(0, 2)):
            self.layers[draw.randrange(len(self.layers))].weight = draw.choice(self.layers).weight
        for layer in draw.sample(list(self.layers), draw.randint(0, 2)):
            layer.weight.requires_grad_(False)

    def forward(self, x, order, checkpointed):
        for i in order:
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if i in checkpointed else layer(x)
        return x


def run(seed, folder=None):
    """The told numbers and the final weights of a few steps."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Graph(draw)
    if draw.random() < 0.3:
        model.bfloat16()
    dtype = model.layers[0].weight.dtype
    usual = draw.choices(range(len(model.layers)), k=draw.randint(2, 9))
    checkpointed = set(draw.sample(range(len(model.layers)), draw.randint(0, 2)))
    overlap = draw.choice(["step", "step", "forward"])
    clip, budget = draw.choice([None, 0.5]), draw.randint(40, 120) << 10
    off = zt.offload(model, host_bytes=budget, drives={folder: "16MiB"}, min_bytes=512) if folder else None
    overlap = overlap if off else "step"  # attach() has nobody wait for another module's parameter; offload() has
    optimizer = zt.AdamW(model.parameters(), lr=1e-2, overlap=overlap, segment_bytes=8192,
                         **({"store": off.store} if off else {"host_bytes": "16MiB"}))  # fmt: skip
    if overlap == "forward":
        optimizer.attach(model)
    told = []
    for _ in range(6):
        order = list(usual)
        if draw.random() < 0.5:  # repeated, skipped and reordered
            draw.shuffle(order)
            order = order[: draw.randint(1, len(order))] + draw.choices(order, k=2)
        for _ in range(draw.randint(1, 3)):
            loss = model(torch.randn(3, model.width, dtype=dtype), order, checkpointed).float().square().mean()
            if loss.requires_grad:
                loss.backward()
            told.append(loss.item())
            del loss
        if draw.random() < 0.3:
            optimizer.flush()
            with torch.no_grad():
                told.append(model(torch.ones(1, model.width, dtype=dtype), order, ()).float().sum().item())
        grads = [p for p in model.parameters() if p.grad is not None]
        if clip and grads:
            told.append(torch.nn.utils.clip_grad_norm_(grads, clip).item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    if off:
        host = off.statistics().store.tiers.host
        assert host.peak <= host.budget, (host.peak, host.budget)
        assert off.store._core.leases == 0, off.store.state()
        off.close()
    return told, list(model.parameters())


class Graphs(InFolder):
    def test_seeds(self):
        one = os.environ.get("ZG_TEST_SEED")
        for seed in [int(one)] if one else range(int(os.environ.get("ZG_TEST_SEEDS", "50"))):
            with self.subTest(seed=seed):
                told, weights = run(seed)
                found, ours = run(seed, self.folder)
                self.assertEqual(told, found)
                self.assertTrue(same_bits(weights, ours))


if __name__ == "__main__":
    import unittest

    unittest.main()
