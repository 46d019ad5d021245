#!/usr/bin/env python3
"""GPT-2 training steps in PyTorch on one GPU, timed: the baseline for Ziggurat's GPU benchmark (bench/gpu.sh).

    python pytorch_gpu.py --model 124m --steps 10        # or 1.5b
    python pytorch_gpu.py --model 1.5b --compile blocks  # compiles one block once, not the whole model
    python pytorch_gpu.py --serve                        # one step per line "step" on stdin

The model is pytorch_gpt2.py's: torch.compile, scaled_dot_product_attention, fused AdamW, gradient clipping. The weights
are bf16 copies of fp32 masters (autocast), as Ziggurat's are; --weights bf16 trains in bf16 without masters, which is
less work and another result. The vocabulary is padded to a multiple of 64, which is faster, and the padding's logits
take no part in the loss, as with Ziggurat's; the FLOPs that count are those of the model without padding, by the formula
of training_flops() (src/model/model.cpp).

A step is everything a trainer does: forward and backward for all micro-batches, clipping, AdamW, and reading the loss.
Each prints one JSON line {"event": "step", "step_s", "tokens_per_s", "flops", "loss"}; with --serve, after
{"event": "ready", ...}. Where torch, or a GPU that it can use, is missing, the program says so on stderr and ends with
code 3. Where torch.compile fails, it says why and goes on without.
"""
import argparse
import contextlib
import json
import statistics
import sys
import time

UNAVAILABLE = 3
MODELS = {
    # layers, width, heads, sequences in a step
    "124m": (12, 768, 12, 32),
    "1.5b": (48, 1600, 25, 8),
    "tiny": (2, 64, 2, 2),
}


def training_flops(layers, width, inner, vocab, tokens, context):
    """FLOPs of the matrix products of a step without recomputation; of attention, the half that is not masked."""
    block = width * (4 * width + 2 * inner)
    attention = width * context
    return 2 * tokens * (3 * layers * (block + attention) + 3 * width * vocab)


def unavailable(why):
    print(f"pytorch_gpu.py: {why}; there is no PyTorch baseline in this run", file=sys.stderr)
    sys.exit(UNAVAILABLE)


class Trainer:
    def __init__(self, args):
        import torch
        from pytorch_gpt2 import GPT2

        self.torch, self.args = torch, args
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.device = torch.device(args.device)
        rows = -(-args.vocab // args.vocab_multiple) * args.vocab_multiple
        with self.device:
            self.model = GPT2(args.vocab, args.context, args.layers, args.width, args.heads, rows)
        if args.weights == "bf16":
            self.model.to(torch.bfloat16)
        self.compiled = args.compile
        self.forward = self.compile()
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        # Eight batches, taken in turn.
        self.tokens = torch.randint(args.vocab, (8, args.sequences, args.context + 1), device=self.device)
        self.steps_done = 0

    def compile(self):
        if self.args.compile == "whole":
            return self.torch.compile(self.model)
        if self.args.compile == "blocks":  # all blocks share one compiled piece of code
            for block in self.model.blocks:
                block.compile()
        return self.model

    def autocast(self):
        if self.args.weights == "autocast":
            return self.torch.autocast(self.device.type, dtype=self.torch.bfloat16)
        return contextlib.nullcontext()

    def warm_up(self, steps):
        """The first step compiles; without a compiler for it the rest goes on in eager mode."""
        try:
            self.step()
        except Exception as failure:  # whatever the compiler throws
            if self.args.compile == "off" or isinstance(failure, self.torch.cuda.OutOfMemoryError):
                raise
            why = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"
            print(f"pytorch_gpu.py: torch.compile failed, going on without it: {why}", file=sys.stderr)
            self.compiled = "off: " + why[:200]
            self.args.compile = "off"
            self.torch._dynamo.reset()
            self.optimizer.zero_grad(set_to_none=True)
            self.torch._dynamo.config.disable = True
            self.forward = self.model
            self.step()
        for _ in range(steps - 1):
            self.step()

    def step(self):
        """One optimiser step; returns its JSON record."""
        begin = time.perf_counter()
        batch = self.tokens[self.steps_done % len(self.tokens)]
        micro = self.args.micro_batch or len(batch)
        total = 0.0
        for part in batch.split(micro):
            with self.autocast():
                loss = self.forward(part[:, :-1], part[:, 1:]) * (len(part) / len(batch))
            loss.backward()
            total = total + loss.detach()
        if self.args.clip > 0:
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(total)  # waits for the device
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self.steps_done += 1
        return {"event": "step", "step": self.steps_done, "step_s": seconds, "tokens_per_s": self.tokens_per_step() / seconds,
                "flops": self.flops(), "loss": loss}

    def tokens_per_step(self):
        return self.args.sequences * self.args.context

    def flops(self):
        a = self.args
        return training_flops(a.layers, a.width, 4 * a.width, a.vocab, self.tokens_per_step(), a.context)

    def settings(self):
        cuda = self.device.type == "cuda"
        return {"trainer": "pytorch", "torch": self.torch.__version__, "cuda": self.torch.version.cuda,
                "gpu": self.torch.cuda.get_device_name() if cuda else "none",
                "peak_device_bytes": self.torch.cuda.max_memory_allocated() if cuda else 0,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "tokens_per_step": self.tokens_per_step(), "flops": self.flops(), **vars(self.args), "compile": self.compiled}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="124m", help="the model (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--vocab", type=int, default=50257, help="tokens of the vocabulary (default: %(default)s)")
    parser.add_argument("--vocab-multiple", type=int, default=64, help="rows of the table are a multiple of it")
    parser.add_argument("--sequences", type=int, default=0, help="in one step; 0: the model's")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at a time; 0: all")
    parser.add_argument("--weights", choices=("autocast", "bf16"), default="autocast",
                        help="autocast: bf16 copies of fp32 masters; bf16: no masters (default: %(default)s)")
    parser.add_argument("--compile", choices=("whole", "blocks", "off"), default="whole",
                        help="what torch.compile gets: the model, one block, or nothing (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    parser.add_argument("--device", default="cuda", help="the GPU (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=10, help="measured steps (without --serve)")
    parser.add_argument("--serve", action="store_true", help='one step per line "step" on stdin')
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and tokens (default: %(default)s)")
    args = parser.parse_args()
    args.layers, args.width, args.heads, sequences = MODELS[args.model]
    args.sequences = args.sequences or sequences
    return args


def main():
    args = parse_args()
    try:
        import torch
    except ImportError as failure:
        unavailable(f"torch cannot be imported ({failure})")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        unavailable(f"torch {torch.__version__} sees no GPU")
    trainer = Trainer(args)
    trainer.warm_up(max(1, args.warmup))
    from pytorch_gpt2 import requests
    if args.serve:
        print(json.dumps({"event": "ready", **trainer.settings()}), flush=True)
    times = []
    for _ in requests() if args.serve else range(args.steps):
        record = trainer.step()
        times.append(record["step_s"])
        print(json.dumps(record), flush=True)
    if times and not args.serve:
        middle = statistics.median(times)
        print(json.dumps({"event": "summary", **trainer.settings(), "median_step_s": middle,
                          "tokens_per_s": trainer.tokens_per_step() / middle, "step_s": times}), flush=True)


if __name__ == "__main__":
    main()
