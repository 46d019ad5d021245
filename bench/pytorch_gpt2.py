#!/usr/bin/env python3
"""GPT-2 training steps in PyTorch on the CPU, timed: the baseline for Ziggurat's benchmark.

    python pytorch_gpt2.py --steps 5 --threads 2             # the 124M model, bfloat16
    python pytorch_gpt2.py --layers 2 --width 128 --heads 4  # something small
    python pytorch_gpt2.py --serve                           # one step per line "step" on stdin

Each step prints one JSON line {"event": "step", "step", "step_s", "tokens_per_s", "loss",
"grad_norm"}, and the last line is {"event": "summary", ...} with the settings, the median and all
step times.  Warm-up steps are run, and not printed.

With --serve the program prints {"event": "ready", ...} once built and warmed up, and then answers
every line "step" with one step line.  End of input, or the line "quit", ends it with the summary.
Between steps it sleeps on stdin, so a driver can alternate steps of two trainers on one machine.
Where torch is missing, the program says so on stderr and ends with code 3.

A step is everything a trainer does: forward and backward for all micro-batches, the optional
gradient clipping, AdamW, and reading the loss.  Tokens are random and lie in memory beforehand.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import time

try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError as failure:
    print(f"pytorch_gpt2.py: torch cannot be imported ({failure}); there is no PyTorch baseline in this run", file=sys.stderr)
    sys.exit(3)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.fc_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The table has `rows` rows, `vocab` of them for tokens. The rest is padding: its logits are -inf, by a bias, which
    the product adds at no cost, so they take no part in the loss."""

    def __init__(self, vocab, positions, layers, width, heads, rows=0):
        super().__init__()
        rows = rows or vocab
        self.wte = nn.Embedding(rows, width)
        self.register_buffer("padding", torch.zeros(rows).index_fill(0, torch.arange(vocab, rows), -torch.inf) if rows > vocab else None)
        self.wpe = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith("proj.weight")
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight, self.padding)  # the head shares the embedding
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args = args
        self.micro = args.micro_batch or args.sequences
        if args.sequences % self.micro:
            raise SystemExit("--sequences must be a multiple of --micro-batch")
        self.model = GPT2(args.vocab, max(args.positions, args.context), args.layers, args.width, args.heads)
        self.forward = torch.compile(self.model) if args.compile else self.model
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=3e-4, betas=(0.9, 0.95), eps=1e-8, **{args.optimizer: True})
        # Eight batches, taken in turn.
        self.tokens = torch.randint(args.vocab, (8, args.sequences, args.context + 1))
        self.steps_done = 0

    def autocast(self):
        if self.args.dtype == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def step(self):
        """One optimiser step; returns its JSON record."""
        begin = time.perf_counter()
        batch = self.tokens[self.steps_done % len(self.tokens)]
        share = self.micro / len(batch)
        total = 0.0
        for part in batch.split(self.micro):
            with self.autocast():
                loss = self.forward(part[:, :-1], part[:, 1:]) * share
            loss.backward()
            total += loss.item()
        grad_norm = None
        if self.args.clip > 0:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            grad_norm = norm.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begin
        self.steps_done += 1
        return {"event": "step", "step": self.steps_done, "step_s": round(seconds, 6),
                "tokens_per_s": round(self.tokens_per_step() / seconds, 2),
                "loss": total, "grad_norm": grad_norm}

    def tokens_per_step(self):
        return self.args.sequences * self.args.context

    def settings(self):
        return {"trainer": "pytorch", "torch": torch.__version__,
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "tokens_per_step": self.tokens_per_step(), **vars(self.args)}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="width of the model (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=12, help="heads of attention (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--positions", type=int, default=1024, help="rows of the position embedding")
    parser.add_argument("--vocab", type=int, default=50257, help="tokens of the vocabulary (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in one optimiser step")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at a time; 0: all")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16",
                        help="bf16: autocast, with weights and optimiser state in float32")
    parser.add_argument("--optimizer", choices=("foreach", "fused"), default="fused",
                        help="implementation of AdamW (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: no clipping")
    parser.add_argument("--compile", action="store_true", help="torch.compile (needs a C++ compiler)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="threads that compute (default: one a core)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=5, help="measured steps (without --serve)")
    parser.add_argument("--serve", action="store_true", help='one step per line "step" on stdin')
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and tokens (default: %(default)s)")
    return parser.parse_args()


def requests():
    """One item per "step" line of stdin, until "quit" or the end."""
    for line in iter(sys.stdin.readline, ""):
        command = line.strip()
        if command == "quit":
            return
        if command == "step":
            yield command
        elif command:
            print(json.dumps({"event": "error", "message": f"unknown command: {command}"}), flush=True)


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    trainer = Trainer(args)
    for _ in range(args.warmup):
        trainer.step()
    if args.serve:
        print(json.dumps({"event": "ready", **trainer.settings()}), flush=True)
    times = []
    for _ in requests() if args.serve else range(args.steps):
        record = trainer.step()
        times.append(record["step_s"])
        print(json.dumps(record), flush=True)
    median = statistics.median(times) if times else None
    print(json.dumps({
        "event": "summary", **trainer.settings(), "measured_steps": len(times),
        "median_step_s": median,
        "tokens_per_s": round(trainer.tokens_per_step() / median, 2) if median else None,
        "step_s": times,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    main()
