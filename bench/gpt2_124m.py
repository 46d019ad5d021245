#!/usr/bin/env python3
"""GPT-2 124M (context 256, 8 sequences, bf16) in turns: all in memory, through NVMe with device and host budgets of a
quarter of the model's state, and PyTorch (bf16 autocast, SDPA, AdamW) where a Python with torch is named.

    cmake --preset release -DZG_BENCH=ON && ninja -C build bench_train_step
    bench/gpt2_124m.py [--torch-python venv/bin/python] [--rounds 5] [--nvme DIR] [--out bench/results/NAME.json]

Prints medians, their spread, the share of this machine's matrix-product roof, and ratios; --out keeps them as JSON.
Without PyTorch the rest is measured all the same. --tiny takes a model that trains in milliseconds instead, to see that
all works, not to conclude from.
"""
import argparse
import contextlib
import json
import os
import pathlib
import subprocess

from serve import Served, drive_directories, provenance, take_turns

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUARTER = "474MiB"  # of 1.85 GiB: 124.4M parameters, 16 bytes each
SEQUENCES, CONTEXT = 8, 256
TINY = {"model.n_layer": 2, "model.n_embd": 64, "model.n_head": 2, "model.n_positions": 64, "model.vocab_size": 515, "data.seq_len": 64}
TINY_TORCH = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--positions", "64", "--vocab", "515"]
TINY_DEVICE, TINY_HOST = "5MiB", "2MiB"  # less than there is, so that the drive has work


def why_no_torch(python):
    """Why this Python cannot be asked for PyTorch's steps, in one line; None if it can."""
    if not python:
        return "no --torch-python was named"
    try:
        done = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    except OSError as failure:
        return f"{python} cannot be run ({failure.strerror})"
    return None if done.returncode == 0 else f"{python} cannot import torch ({(done.stderr.strip().splitlines() or ['no reason given'])[-1]})"


def programs_of(args, new_drive):
    """(name, command) of each contestant, and the directory of a drive for each that has an NVMe tier."""
    ours = [str(ROOT / "build/bench/bench_train_step"), str(ROOT / "configs/bench-gpt2-124m.json"), "--serve", "--work", args.work]
    if args.tiny:
        ours += [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    device, host = (TINY_DEVICE, TINY_HOST) if args.tiny else (QUARTER, QUARTER)

    def tiers():
        drives = json.dumps([{"path": new_drive()}])
        return ["--set", f"tiers.device={device}", "--set", f"tiers.host={host}", "--set", f"tiers.nvme={drives}"]

    recompute = ["--set", "activation_checkpointing.recompute=true"]
    programs = [("memory", ours), ("nvme", ours + tiers()), ("memory, recompute", ours + recompute), ("nvme, recompute", ours + tiers() + recompute)]
    missing = why_no_torch(args.torch_python)
    if missing:
        print(f"PyTorch is not compared: {missing}", flush=True)
        return programs
    for optimizer in ("fused", "foreach"):
        programs.append((f"torch {optimizer}", [
            args.torch_python, str(ROOT / "bench/pytorch_gpt2.py"), "--serve", "--optimizer", optimizer, "--dtype", "bf16", "--clip", "1",
            "--warmup", "3", "--threads", str(os.cpu_count()), *(TINY_TORCH if args.tiny else [])]))
    return programs


def results_of(programs, tokens):
    """A row for each program, ratios by their names, and the roof."""
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
    return rows, ratios, roof


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="a Python that can import torch; without it PyTorch is left out")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="counted steps per turn")
    parser.add_argument("--nvme", default=str(ROOT / "build" / "nvme"),
                        help="on the drive of the NVMe tier: each program gets a directory of its own in it, which is removed at the end")
    parser.add_argument("--work", default=str(ROOT / "build/bench"), help="directory of the tokens")
    parser.add_argument("--tiny", action="store_true", help="another, tiny model, to see that all works")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    with drive_directories(args.nvme) as new_drive, contextlib.ExitStack() as running:
        programs = []
        for name, command in programs_of(args, new_drive):
            programs.append(Served(name, command))
            running.callback(programs[-1].close)
        take_turns(programs, args.rounds, args.steps)
    tokens = SEQUENCES * (TINY["data.seq_len"] if args.tiny else CONTEXT)
    rows, ratios, roof = results_of(programs, tokens)
    result = {"benchmark": "gpt2_124m", "tiny": args.tiny, "roof_gflops": roof, "programs": rows, "ratios": ratios} | provenance(ROOT)
    for r in rows:
        share = f"  {100 * r['roof_share']:.0f}% of the roof" if "roof_share" in r else ""
        print(f"{r['name']:20} {r['median_step_s']:.3f} s (MAD {r['mad_s']:.3f})  {r['tokens_per_s']:.0f} tokens/s{share}")
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
