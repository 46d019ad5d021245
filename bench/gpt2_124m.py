#!/usr/bin/env python3
"""GPT-2 124M (context 256, 8 sequences, bf16) in turns: all in memory, through NVMe with device and host budgets of a
quarter of the model's state, and PyTorch (bf16 autocast, SDPA, AdamW) where a Python with torch is named.

    cmake --preset release -DZG_BENCH=ON && ninja -C build bench_train_step
    bench/gpt2_124m.py [--torch-python venv/bin/python] [--rounds 5] [--nvme DIR] [--out bench/results/NAME.json]

Prints medians, their spread, the share of this machine's matrix-product roof, and ratios; --out keeps them as JSON.
"""
import argparse
import json
import os
import pathlib

from serve import Served, provenance, take_turns

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUARTER = "474MiB"  # of 1.85 GiB: 124.4M parameters, 16 bytes each


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="a Python that can import torch; without it PyTorch is left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted steps per turn")
    parser.add_argument("--nvme", default=str(ROOT / "build" / "nvme"), help="directory of the NVMe tier")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    os.makedirs(args.nvme, exist_ok=True)

    ours = [str(ROOT / "build/bench/bench_train_step"), str(ROOT / "configs/bench-gpt2-124m.json"), "--serve", "--work", str(ROOT / "build/bench")]
    tiers = ["--set", f"tiers.device={QUARTER}", "--set", f"tiers.host={QUARTER}", "--set", f'tiers.nvme=[{{"path":"{args.nvme}"}}]']
    recompute = ["--set", "activation_checkpointing.recompute=true"]
    programs = [
        Served("memory", ours),
        Served("nvme", ours + tiers),
        Served("memory, recompute", ours + recompute),
        Served("nvme, recompute", ours + tiers + recompute),
    ]
    if args.torch_python:
        for optimizer in ("fused", "foreach"):
            programs.append(Served(f"torch {optimizer}", [
                args.torch_python, str(ROOT / "bench/pytorch_gpt2.py"), "--serve", "--optimizer", optimizer, "--dtype", "bf16", "--clip", "1",
                "--warmup", "3", "--threads", str(os.cpu_count())]))
    take_turns(programs, args.rounds, args.steps)
    tokens = 8 * 256
    rows = []
    for p in programs:
        row = {"name": p.name, "median_step_s": p.median(), "mad_s": p.mad(), "tokens_per_s": tokens / p.median(), "steps": len(p.steps)}
        if "roof_flops" in p.ready:
            row |= {"roof_share": p.median("roof_share"), "stall_s": p.median("stall_s"), "nvme_read": p.median("nvme_read"), "nvme_write": p.median("nvme_write")}
            row["roof_gflops"] = p.ready["roof_flops"] / 1e9
        rows.append(row)
    # Each program measured the roof when it started, the others waiting: the best is the machine's.
    roof = max(r["roof_gflops"] for r in rows if "roof_gflops" in r)
    for r in rows:
        if "roof_share" in r:
            r["roof_share"] *= r.pop("roof_gflops") / roof
    by_name = {r["name"]: r for r in rows}
    ratios = {"nvme / memory": by_name["nvme"]["median_step_s"] / by_name["memory"]["median_step_s"],
              "nvme / memory, both with recompute": by_name["nvme, recompute"]["median_step_s"] / by_name["memory, recompute"]["median_step_s"]}
    for p in programs[4:]:
        ratios[f"{p.name} / memory"] = by_name[p.name]["median_step_s"] / by_name["memory"]["median_step_s"]
    for p in programs:
        p.close()
    result = {"benchmark": "gpt2_124m", "roof_gflops": roof, "programs": rows, "ratios": ratios} | provenance(ROOT)
    for r in rows:
        share = f"  {100 * r['roof_share']:.0f}% of the roof" if "roof_share" in r else ""
        print(f"{r['name']:20} {r['median_step_s']:.3f} s (MAD {r['mad_s']:.3f})  {r['tokens_per_s']:.0f} tokens/s{share}")
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
