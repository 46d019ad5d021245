#!/usr/bin/env python3
"""step() of ziggurat.torch.AdamW beside torch.optim.AdamW(fused=True) and DeepSpeedCPUAdam, in one run.

    python bench/python_optimizer.py [--parameters 250000000] [--nvme DIR]

Needs the package (docs/python.md) and torch; DeepSpeed is measured where it is installed. Each optimizer updates the
same parameters by the same gradients in a process of its own, whose resident memory is in the last column. Parameters
are in fp32, except in the row that says bf16.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROWS = ["torch fused", "DeepSpeedCPUAdam", "ziggurat fp32", "ziggurat bf16 split", "ziggurat int8",
        "ziggurat fp32 on NVMe"]  # fmt: skip


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


def measure(row, count, steps, nvme):
    import torch

    dtype = torch.bfloat16 if "bf16" in row else torch.float32
    sizes = [min(16 << 20, count - i) for i in range(0, count, 16 << 20)]
    params = [torch.nn.Parameter(torch.full((n,), 0.5, dtype=dtype)) for n in sizes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = make(row, params, nvme)
    times = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    times = times[2:]  # the first ones make the state, and learn
    print(json.dumps({"seconds": statistics.median(times), "least": min(times),
                      "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))  # fmt: skip
    if hasattr(optimizer, "close"):
        optimizer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=250_000_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--nvme", help="a directory on a drive, for the last row")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.row:
        return measure(a.row, a.parameters, a.steps, a.nvme)
    print(f"{a.parameters:,} parameters, {a.steps} steps: median and least step, ns a parameter, resident memory")
    for row in ROWS:
        if "NVMe" in row and not a.nvme:
            continue
        with tempfile.TemporaryDirectory(dir=a.nvme) as folder:
            command = [sys.executable, os.path.abspath(__file__), "--row", row, "--parameters", str(a.parameters),
                       "--steps", str(a.steps), "--nvme", folder]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"{row:24} not measured: {done.stderr.strip().splitlines()[-1]}")
            continue
        r = json.loads(done.stdout.splitlines()[-1])
        print(f"{row:24} {r['seconds'] * 1e3:9.1f} ms {r['least'] * 1e3:9.1f} ms "
              f"{r['seconds'] / a.parameters * 1e9:7.2f} ns {r['resident'] / 2**30:6.2f} GiB")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
