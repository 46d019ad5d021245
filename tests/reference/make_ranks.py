#!/usr/bin/env python3
"""Losses and norms of training on several ranks, by PyTorch's DistributedDataParallel over gloo.

Writes ranks.txt next to this script (or into --out): a line for each model, number of ranks and step, with the loss
and the gradient norm as hexadecimal floats.  Models, weights and the hash are those of make_reference.py; README.md
says what the batches are.

    python make_ranks.py

Needs torch and numpy; starts as many processes as there are ranks, on this machine; only the CPU is used.
"""

import argparse
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import make_reference as reference

STEPS = 20
MICRO_BATCHES = 8  # of all ranks together, in a step
BATCH, TIME = 2, 13
WORLDS = (2, 4)
GPT2 = dict(reference.GPT2, n_layer=5, n_embd=176, n_head=8, n_inner=704)
MODELS = {"gpt2": (reference.gpt2, reference.gpt2_shapes, GPT2),
          "llama": (reference.llama, reference.llama_shapes, reference.LLAMA)}
ADAMW = reference.ADAMW


def micro_batches(steps=STEPS, time=TIME):
    """[step][micro-batch]: (tokens, targets), each int64 [BATCH, time]. From 0 to BATCH * time targets are valid."""
    rows, count = BATCH * time, steps * MICRO_BATCHES
    ids = (torch.from_numpy((reference.hashed(name, count * rows) % 257).astype("int64")).view(count, rows)
           for name in ("tokens", "targets"))
    tokens, targets = ids
    for i, valid in enumerate(reference.hashed("valid", count) % (rows + 1)):
        targets[i, int(valid):] = reference.IGNORE
    shape = (steps, MICRO_BATCHES, BATCH, time)
    return [list(zip(x, y)) for x, y in zip(tokens.view(shape), targets.view(shape))]


class Module(torch.nn.Module):
    """A model of make_reference.py, with its parameters where PyTorch looks for them."""

    def __init__(self, forward, shapes, config):
        super().__init__()
        self.run, self.config = forward, config
        self.names = list(shapes)
        self.all = torch.nn.ParameterList([reference.weight(n, s) for n, s in shapes.items()])

    def forward(self, tokens, targets):
        """The sum of the losses of the valid targets."""
        logits = self.run(self.config, dict(zip(self.names, self.all)), tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=reference.IGNORE, reduction="sum")


def train(rank, world, name, sharded, where):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}/meet", rank=rank, world_size=world)
    forward, shapes, config = MODELS[name]
    module = Module(forward, shapes(config), config)
    if sharded:
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    else:
        module = DistributedDataParallel(module)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.ndim == 2], "weight_decay": ADAMW["weight_decay"]},
         {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}],
        lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"], foreach=False)
    lines = []
    for step, batch in enumerate(micro_batches()):
        mine = batch[rank::world]  # micro-batch m of rank r is number m * world + r of the step
        valid = torch.tensor(float(sum((targets >= 0).sum() for _, targets in mine)))
        dist.all_reduce(valid)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for i, (tokens, targets) in enumerate(mine):
            # Both average gradients over the ranks, and the loss is a mean over the targets of all ranks.
            last = i + 1 == len(mine)
            if sharded:
                module.set_requires_gradient_sync(last)
            else:
                module.require_backward_grad_sync = last
            part = module(tokens, targets) / valid
            (part * world).backward()
            loss += part.detach().double()
        dist.all_reduce(loss)
        norm = torch.nn.utils.clip_grad_norm_(parameters, ADAMW["max_norm"], foreach=False)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        lines.append(f"{name} {world} {step} {loss.item().hex()} {norm.item().hex()}\n")
    if rank == 0:
        pathlib.Path(where, "lines").write_text("".join(lines))
    dist.destroy_process_group()


def run(name, world, sharded):
    with tempfile.TemporaryDirectory() as where:
        processes.spawn(train, args=(world, name, sharded, where), nprocs=world)
        return pathlib.Path(where, "lines").read_text()


def farthest(a, b):
    """The largest relative difference of two runs' losses."""
    losses = [[float.fromhex(line.split()[3]) for line in text.splitlines()] for text in (a, b)]
    return max(abs(x / y - 1) for x, y in zip(*losses))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    text = ""
    for name in MODELS:
        for world in WORLDS:
            replicated = run(name, world, sharded=False)
            text += replicated
            try:
                far = f"{farthest(replicated, run(name, world, sharded=True)):.1e}"
            except Exception as error:  # gloo lacks some collectives in some versions
                far = f"not run: {str(error).splitlines()[-1]}"
            print(f"{name}, {world} ranks: FSDP2's losses differ from DDP's by {far}")
    (args.out / "ranks.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
