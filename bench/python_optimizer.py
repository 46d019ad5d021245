#!/usr/bin/env python3
"""step() of ziggurat.torch.AdamW beside torch.optim.AdamW(fused=True), DeepSpeedCPUAdam, DeepSpeed's whole step with
state in host memory (ZeRO-Offload, bf16), and its optimizer on NVMe (ZeRO-3, pipeline_read, pipeline_write), in turns.

    python bench/python_optimizer.py [--parameters 250000000] [--rounds 3] [--nvme DIR] [--out bench/results/NAME.json]

Needs the package (docs/python.md) and torch; DeepSpeed is measured where it is installed (it compiles its optimizer
and its I/O at the first use: ninja, g++, libaio-dev). Each optimizer updates the same parameters by the same gradients
in a process of its own, whose resident memory is in the last column. Parameters are in fp32, except in the rows that
say bf16. Gradients that DeepSpeed moves in its backward pass are not counted.
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ["torch fused", "DeepSpeedCPUAdam", "ziggurat fp32", "ziggurat bf16 split", "ziggurat int8",
        "DeepSpeed offload bf16",
        "ziggurat fp32 on NVMe", "DeepSpeed on NVMe"]  # fmt: skip
SIZE = 16 << 20  # elements of a parameter


def make(row, params, nvme):
    import torch

    if row == "torch fused":
        return torch.optim.AdamW(params, fused=True)
    if row == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True)
    import ziggurat.torch as zt

    state = "split" if "split" in row else "int8" if "int8" in row else "fp32"
    if "NVMe" not in row:
        return zt.AdamW(params, state=state)
    size = 10 * sum(p.numel() for p in params)
    return zt.AdamW(params, state=state, host_bytes=max(64 << 20, size // 10), drives={nvme: size})


def engine_of_deepspeed(sizes, nvme, bf16):
    """DeepSpeed's engine with the state of such parameters on NVMe, or in host memory with weights and gradients in bf16
    (ZeRO-Offload); what a backward pass and a step of it are."""
    import deepspeed
    import torch

    class Part(torch.nn.Module):
        def __init__(self, n):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((n,), 0.5))

        def forward(self, x):
            return x + self.weight.sum() * 1e-3

    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "RANK": "0", "LOCAL_RANK": "0",
                       "WORLD_SIZE": "1"}.items():  # fmt: skip
        os.environ[key] = value
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(*(Part(n) for n in sizes))
    # Of fewer buffers its swapper runs out.
    where = {"device": "nvme", "nvme_path": nvme, "pipeline_read": True, "pipeline_write": True, "buffer_count": 16,
             "pin_memory": False}  # fmt: skip
    if bf16:
        where = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": where, "offload_param": {"device": "cpu"},
                              "sub_group_size": SIZE},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                "overlap_events": True},
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.zeros((), dtype=torch.bfloat16 if bf16 else torch.float32)
    return (lambda: engine.backward(engine(x))), engine.step


def measure(row, count, steps, nvme):
    import torch

    dtype = torch.bfloat16 if "bf16" in row else torch.float32
    sizes = [min(SIZE, count - i) for i in range(0, count, SIZE)]
    optimizer = None
    if row in ("DeepSpeed on NVMe", "DeepSpeed offload bf16"):
        backward, step = engine_of_deepspeed(sizes, nvme, "bf16" in row)
    else:
        params = [torch.nn.Parameter(torch.full((n,), 0.5, dtype=dtype)) for n in sizes]
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        optimizer = make(row, params, nvme)
        backward, step = (lambda: None), optimizer.step
    times = []
    for _ in range(steps + 2):
        backward()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    times = times[2:]  # the first ones make the state, and learn
    print(json.dumps({"seconds": statistics.median(times), "least": min(times),
                      "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))  # fmt: skip
    if hasattr(optimizer, "close"):
        optimizer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=250_000_000,
                        help="parameters that are updated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each optimizer (default: %(default)s)")
    parser.add_argument("--out", help="write the results here as JSON")
    parser.add_argument("--nvme", help="a directory on a drive, for the last rows")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.row:
        return measure(a.row, a.parameters, a.steps, a.nvme)
    print(f"{a.parameters:,} parameters: median step and its MAD, ns a parameter, resident memory, of {a.rounds} rounds")
    rows = [row for row in ROWS if a.nvme or "NVMe" not in row]
    runs = {row: [] for row in rows}
    for _ in range(a.rounds):
        for row in list(rows):
            with tempfile.TemporaryDirectory(dir=a.nvme) as folder:
                command = [sys.executable, os.path.abspath(__file__), "--row", row, "--parameters", str(a.parameters),
                           "--steps", str(a.steps), "--nvme", folder]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"{row:24} not measured: {done.stderr.strip().splitlines()[-1]}")
                rows.remove(row)
                continue
            runs[row].append(json.loads(done.stdout.splitlines()[-1]))
    cells = []
    for row in rows:
        seconds = [r["seconds"] for r in runs[row]]
        cells.append({"row": row, "seconds": statistics.median(seconds), "mad_s": mad(seconds),
                      "resident": max(r["resident"] for r in runs[row])})  # fmt: skip
        c = cells[-1]
        print(f"{row:24} {c['seconds'] * 1e3:9.1f} ms {c['mad_s'] * 1e3:7.1f} ms "
              f"{c['seconds'] / a.parameters * 1e9:7.2f} ns {c['resident'] / 2**30:6.2f} GiB")  # fmt: skip
    if a.out:
        with open(a.out, "w", encoding="utf-8") as file:
            settings = {"parameters": a.parameters, "steps": a.steps, "rounds": a.rounds}
            json.dump(provenance(ROOT) | {"benchmark": "python_optimizer", "load": os.getloadavg(), "settings": settings,
                                          "cells": cells}, file, indent=1)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
