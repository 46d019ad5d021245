#!/usr/bin/env python3
"""Training in parts of layers (tensor parallelism) and in stages (pipeline), by PyTorch's own plans over gloo.

Writes parts.txt next to this script (or into --out): for each model and case the loss and the gradient norm of every
step, and digests of some of the weights at the end, all as hexadecimal floats.  Models, weights and the hash are those
of make_ranks.py; README.md says what the batches and the cases are.

    python make_parts.py

Needs torch and numpy; starts as many processes as a case has ranks, on this machine; only the CPU is used.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)

import make_ranks as ranks
import make_reference as reference

STEPS = 10
TIME = 14  # two parts of sequences must be of the same length


@dataclasses.dataclass(frozen=True)
class Case:
    tensor: int = 1
    sequence: bool = False
    schedule: type | None = None  # without one, all layers are one stage
    chunks: int = 1  # of each stage
    dtype: torch.dtype = torch.float32

    @property
    def stages(self):
        return 2 if self.schedule else 1


CASES = {
    "fp64": Case(dtype=torch.float64),
    "one": Case(),
    "tensor": Case(tensor=2),
    "sequence": Case(tensor=2, sequence=True),
    "gpipe": Case(schedule=ScheduleGPipe),
    "1f1b": Case(schedule=Schedule1F1B),
    "interleaved": Case(schedule=ScheduleInterleaved1F1B, chunks=2),
    "tensor_1f1b": Case(tensor=2, schedule=Schedule1F1B),
    "sequence_interleaved": Case(tensor=2, sequence=True, schedule=ScheduleInterleaved1F1B, chunks=2),
}
# The parameters of which parts.txt has digests: each kind, and at least one on every stage and chunk.
FINAL = {
    "gpt2": ("wte.weight", "wpe.weight", "h.0.ln_1.bias", "h.1.attn.c_attn.weight", "h.2.attn.c_proj.bias",
             "h.3.mlp.c_fc.weight", "h.4.mlp.c_proj.weight", "ln_f.weight"),
    "llama": ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
              "model.layers.1.self_attn.k_proj.weight", "model.layers.2.self_attn.o_proj.weight",
              "model.layers.3.mlp.gate_proj.weight", "model.layers.4.mlp.down_proj.weight", "model.norm.weight",
              "lm_head.weight"),
}


# ---------------------------------------------------------------- the models, of modules that PyTorch can split

def attention(q, k, v, head_size, theta=None):
    """Of as many heads as there are: a part of a layer has a part of them."""
    q, k, v = (reference.split_heads(x, x.shape[-1] // head_size) for x in (q, k, v))
    if theta is not None:
        q, k = reference.rotate(q, theta), reference.rotate(k, theta)
    # Query head j reads key/value head j // (heads / kv_heads).
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return reference.join_heads(reference.attention(q, k, v))


class RmsNorm(torch.nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Gpt2Block(torch.nn.Module):
    # Hugging Face's name, and the modules here whose weights it has one after the other.
    NAMES = {"ln_1": "norm1", "attn.c_attn": "q k v", "attn.c_proj": "out", "ln_2": "norm2", "mlp.c_fc": "up",
             "mlp.c_proj": "down"}

    def __init__(self, c):
        super().__init__()
        n, inner = c["n_embd"], c["n_inner"]
        self.head_size = n // c["n_head"]
        self.norm1, self.norm2 = (torch.nn.LayerNorm(n, eps=c["layer_norm_epsilon"]) for _ in range(2))
        self.q, self.k, self.v, self.out = (torch.nn.Linear(n, n) for _ in range(4))
        self.up, self.down = torch.nn.Linear(n, inner), torch.nn.Linear(inner, n)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.out(attention(self.q(y), self.k(y), self.v(y), self.head_size))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaBlock(torch.nn.Module):
    NAMES = {"input_layernorm": "norm1", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
             "self_attn.o_proj": "out", "post_attention_layernorm": "norm2", "mlp.gate_proj": "gate",
             "mlp.up_proj": "up", "mlp.down_proj": "down"}

    def __init__(self, c):
        super().__init__()
        n, inner = c["hidden_size"], c["intermediate_size"]
        self.head_size, self.theta = c["head_dim"], c["rope_theta"]
        q, kv = (c[key] * self.head_size for key in ("num_attention_heads", "num_key_value_heads"))
        self.norm1, self.norm2 = (RmsNorm(n, c["rms_norm_eps"]) for _ in range(2))
        self.q, self.k, self.v = (torch.nn.Linear(n, size, bias=False) for size in (q, kv, kv))
        self.out = torch.nn.Linear(q, n, bias=False)
        self.gate, self.up = (torch.nn.Linear(n, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, n, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.out(attention(self.q(y), self.k(y), self.v(y), self.head_size, self.theta))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stage(torch.nn.Module):
    """Part `index` of `count` of a model's layers; the first one has the embedding, too, and the last one the head."""

    def __init__(self, name, index, count):
        super().__init__()
        _, shapes, c = ranks.MODELS[name]
        self.gpt2, self.shapes = name == "gpt2", shapes(c)
        layers, n = (c[key] for key in (("n_layer", "n_embd") if self.gpt2 else ("num_hidden_layers", "hidden_size")))
        own = range(layers * index // count, layers * (index + 1) // count)
        block, prefix = (Gpt2Block, "h.") if self.gpt2 else (LlamaBlock, "model.layers.")
        self.blocks = torch.nn.ModuleList(block(c) for _ in own)
        self.table = self.positions = self.norm = self.head = None
        # By Hugging Face's names, the modules whose parameters a tensor of its files has one after the other.
        self.places = {f"{prefix}{i}.{theirs}": [self.blocks[at].get_submodule(part) for part in ours.split()]
                       for at, i in enumerate(own) for theirs, ours in block.NAMES.items()}
        if index == 0:
            self.table = torch.nn.Embedding(c["vocab_size"], n)
            self.places["wte" if self.gpt2 else "model.embed_tokens"] = [self.table]
            if self.gpt2:
                self.positions = torch.nn.Embedding(c["n_positions"], n)
                self.places["wpe"] = [self.positions]
        if index + 1 == count:
            self.norm = torch.nn.LayerNorm(n, c["layer_norm_epsilon"]) if self.gpt2 else RmsNorm(n, c["rms_norm_eps"])
            self.head = torch.nn.Linear(n, c["vocab_size"], bias=False)
            self.places["ln_f" if self.gpt2 else "model.norm"] = [self.norm]
            self.places.setdefault("wte" if self.gpt2 else "lm_head", [self.head])
        self.tie()
        for tensor in self.files():
            whole = reference.weight(tensor, self.shapes[tensor])
            whole = whole.T if self.is_transposed(tensor) else whole
            pieces = self.pieces(tensor)
            for piece, values in zip(pieces, whole.chunk(len(pieces))):
                piece.data.copy_(values)

    def forward(self, x):
        """Activations or, at the first stage, tokens; gives activations or, at the last stage, logits."""
        if self.table is not None:
            tokens, x = x, self.table(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))

    def tie(self):
        """Makes the head's matrix of GPT-2 the embedding's, where the stage has both."""
        if self.gpt2 and self.table is not None and self.head is not None:
            self.head.weight = self.table.weight

    def tied(self):
        """GPT-2's matrix of the embedding and the head, or None where the stage has neither."""
        module = self.table if self.table is not None else self.head
        return module.weight if self.gpt2 and module is not None else None

    def files(self):
        """Names of the tensors that Hugging Face's files have of this stage."""
        return [tensor for tensor in self.shapes if tensor.rpartition(".")[0] in self.places]

    def pieces(self, tensor):
        module, _, kind = tensor.rpartition(".")
        return [getattr(part, kind) for part in self.places[module]]

    def is_transposed(self, tensor):
        return self.gpt2 and tensor.startswith("h.") and len(self.shapes[tensor]) == 2

    def whole(self, tensor):
        """The tensor as Hugging Face's files have it. All parts of the layer must ask for it."""
        pieces = [full(piece.detach()) for piece in self.pieces(tensor)]
        return torch.cat(pieces).T if self.is_transposed(tensor) else torch.cat(pieces)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def split(stage, mesh, sequence):
    """Gives each rank of the mesh its part of the stage's layers; with `sequence` also of norms and residual sums."""
    rows = Shard(1) if sequence else Replicate()
    plan = {}
    for name, module in stage.named_modules():
        last = name.rpartition(".")[2]
        if last in ("q", "k", "v", "gate", "up"):
            plan[name] = ColwiseParallel(input_layouts=rows)
        elif last in ("out", "down"):
            plan[name] = RowwiseParallel(output_layouts=rows)
        elif last == "table":
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
        elif last == "positions":
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0) if sequence else rows)
        elif last == "head":
            plan[name] = ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False)
        elif last.startswith("norm") and sequence:
            plan[name] = SequenceParallel()
    parallelize_module(stage, mesh, plan)
    stage.tie()


# ---------------------------------------------------------------- training

class Run:
    """A rank of a run."""

    def __init__(self, name, case):
        self.case = case
        mesh = dist.init_device_mesh("cpu", (case.stages, case.tensor), mesh_dim_names=("pipeline", "tensor"))
        self.pipeline = mesh.get_group("pipeline")
        count = case.stages * case.chunks
        own = range(mesh.get_local_rank("pipeline"), count, case.stages)
        self.stages = [Stage(name, i, count).to(case.dtype) for i in own]
        if case.tensor > 1:
            for stage in self.stages:
                split(stage, mesh["tensor"], case.sequence)
        self.parameters = [p for stage in self.stages for p in stage.parameters()]
        if case.schedule:
            parts = [PipelineStage(stage, i, count, torch.device("cpu"), group=self.pipeline)
                     for i, stage in zip(own, self.stages)]
            # The loss is divided by the targets of all micro-batches, so their gradients are added, not averaged.
            self.schedule = case.schedule(parts if case.chunks > 1 else parts[0], ranks.MICRO_BATCHES,
                                          loss_fn=self.loss, scale_grads=False)
        adamw = reference.ADAMW
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for p in self.parameters if p.ndim == 2], "weight_decay": adamw["weight_decay"]},
             {"params": [p for p in self.parameters if p.ndim == 1], "weight_decay": 0.0}],
            lr=adamw["lr"], betas=adamw["betas"], eps=adamw["eps"], foreach=False)

    def loss(self, logits, targets):
        """The micro-batch's share of the mean over the valid targets of all micro-batches."""
        return full(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=reference.IGNORE,
                                    reduction="sum")) / self.valid

    def gradients(self, batch):
        """Computes them; returns the loss, which the last stage alone knows, of each micro-batch."""
        losses = []
        if not self.case.schedule:
            for tokens, targets in batch:
                loss = self.loss(self.stages[0](tokens), targets)
                loss.backward()
                losses.append(loss)
            return losses
        inputs = {}
        if self.stages[0].table is not None:
            inputs["arg_mbs"] = [(tokens,) for tokens, _ in batch]
        if self.stages[-1].head is not None:
            inputs |= {"target_mbs": [targets for _, targets in batch], "losses": losses}
        self.schedule.step(return_outputs=False, **inputs)
        return losses

    def step(self, batch):
        """Returns the loss and the gradient norm before clipping."""
        self.valid = float(sum((targets >= 0).sum() for _, targets in batch))
        self.optimizer.zero_grad(set_to_none=True)
        with loss_parallel() if self.case.tensor > 1 else contextlib.nullcontext():
            losses = self.gradients(batch)
        loss = sum((x.detach().double() for x in losses), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(loss, group=self.pipeline)
        norm = self.clip()
        self.optimizer.step()
        return loss.item(), norm

    @torch.no_grad()
    def clip(self):
        """Clips all gradients of all stages together; returns their norm."""
        counted = self.parameters
        if self.case.stages > 1:
            # Embedding and head are tied over stages, which PyTorch leaves to its users. The norm has them once.
            for stage in self.stages:
                weight = stage.tied()
                if isinstance(weight, DTensor):  # whose gradient may lie otherwise, or be no sum yet
                    weight.grad = weight.grad.redistribute(placements=weight.placements)
                    dist.all_reduce(weight.grad.to_local(), group=self.pipeline)
                elif weight is not None:
                    dist.all_reduce(weight.grad, group=self.pipeline)
            copies = [stage.tied() for stage in self.stages if stage.table is None]
            counted = [p for p in counted if not any(p is copy for copy in copies)]
        square = torch.zeros((), dtype=torch.float64)
        for distributed in (False, True):
            those = [p.grad for p in counted if isinstance(p.grad, DTensor) == distributed]
            if those:
                square += full(torch.nn.utils.get_total_norm(those, foreach=False)).double().square()
        dist.all_reduce(square, group=self.pipeline)
        norm = square.sqrt().to(self.case.dtype)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, reference.ADAMW["max_norm"], norm, foreach=False)
        return norm.item()

    def digests(self, names):
        """Norm, sum and signed sum of the whole tensors, of all stages."""
        mine = {name: reference.pack(stage.whole(name))[:3].tolist()
                for stage in self.stages for name in names if name in stage.files()}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        merged = {}
        for those in everyone:
            for name, values in those.items():
                assert merged.setdefault(name, values) == values, f"two ranks differ at {name}"
        return {name: merged[name] for name in names}


def work(rank, world, name, case, where):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}/meet", rank=rank, world_size=world)
    run = Run(name, CASES[case])
    results = {f"step {i}": run.step(batch) for i, batch in enumerate(ranks.micro_batches(STEPS, TIME))}
    results |= {f"final {tensor}": values for tensor, values in run.digests(FINAL[name]).items()}
    if rank == 0:
        lines = (f"{name} {case} {what} {' '.join(x.hex() for x in values)}\n" for what, values in results.items())
        pathlib.Path(where, "lines").write_text("".join(lines))
    dist.destroy_process_group()


def run_case(name, case):
    world = CASES[case].tensor * CASES[case].stages
    with tempfile.TemporaryDirectory() as where:
        processes.spawn(work, args=(world, name, case, where), nprocs=world)
        return pathlib.Path(where, "lines").read_text()


def farthest(a, b, which):
    """The largest relative difference of two runs' losses (which = 0) or norms (1)."""
    values = [[float.fromhex(line.split()[4 + which]) for line in text.splitlines() if line.split()[2] == "step"]
              for text in (a, b)]
    return max(abs(x / y - 1) for x, y in zip(*values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    text = f"# torch {torch.__version__}, by: python make_parts.py\n"
    for name in ranks.MODELS:
        exact = None
        for case in CASES:
            lines = run_case(name, case)
            exact = exact or lines
            text += lines
            print(f"{name}, {case}: losses differ from fp64's by {farthest(lines, exact, 0):.1e},"
                  f" norms by {farthest(lines, exact, 1):.1e}", flush=True)
    (args.out / "parts.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
