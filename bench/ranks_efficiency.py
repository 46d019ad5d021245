#!/usr/bin/env python3
"""What is lost where several ranks share the cores that one rank had, and pipelines' bubbles beside their formula.

    cmake --preset release && ninja -C build ziggurat
    bench/ranks_efficiency.py [--what efficiency|bubbles] [--model gpt2-124m|small] [--fp32] [--rounds 3] [--steps 4]
                              [--old PROGRAM] [--out bench/results/NAME.json]

Each case is `ziggurat train` of the same model, data and global batch, in turns, on two cores. The first step of a run
is not counted. Each figure is a ratio to the case that is named behind it. The run's own log says what is lost: the
shares of the step in which the compute streams of the ranks had no work, by cause (a mean over the ranks), and how
long the axis of parts was busy.

`efficiency`: ZeRO-3, parts of layers and stages on two ranks of one core each, beside one rank of two cores. `bubbles`:
schedules of 2 and 4 stages; the formula assumes a processor for each stage, so more stages than cores must wait for
longer. `--old`: another build's program, whose cases take turns with this one's, and must end with the same losses.
"""
import argparse
import array
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import tempfile

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = {
    "gpt2-124m": {"model.n_layer": 12, "model.n_embd": 768, "model.n_head": 12, "model.vocab_size": 50257, "data.seq_len": 256},
    "small": {"model.n_layer": 8, "model.n_embd": 256, "model.n_head": 8, "model.vocab_size": 1024, "data.seq_len": 128},
    "tiny": {"model.n_layer": 4, "model.n_embd": 64, "model.n_head": 2, "model.vocab_size": 515, "data.seq_len": 32},
}
CONFIG, BATCH = ROOT / "configs/bench-gpt2-124m.json", 8
CORES = 2
TWO = {"devices": "host:2"}
EFFICIENCY = {
    "1 rank": {"devices": "host"},
    "1 rank, micro-batches of 1": {"devices": "host", "train_micro_batch_size_per_gpu": 1},
    "ZeRO-3": TWO | {"zero_optimization.stage": 3, "train_micro_batch_size_per_gpu": 4},
    "TP 2": TWO | {"parallel.tensor": 2},
    "TP 2, sequence": TWO | {"parallel.tensor": 2, "parallel.sequence": "true"},
    "PP 2, breadth first": TWO | {"parallel.pipeline": 2, "train_micro_batch_size_per_gpu": 1},
    "PP 2, zero bubble": TWO | {"parallel.pipeline": 2, "train_micro_batch_size_per_gpu": 1,
                                "parallel.pipeline_schedule": "zero_bubble"},
}
BUBBLES = {
    f"{stages} stages, {schedule}": {
        "devices": f"host:{stages}", "parallel.pipeline": stages, "train_micro_batch_size_per_gpu": 1,
        "parallel.pipeline_schedule": schedule, "parallel.chunks": 2 if schedule == "depth_first" else 1}
    for stages in (2, 4) for schedule in ("1f1b", "breadth_first", "depth_first", "zero_bubble")
}


def run(program, case, args, work):
    """The steps that count, as the log has them."""
    settings = {"model.n_positions": MODELS[args.model]["data.seq_len"], "data.train": work / "tokens.bin",
                "data.validation": 0, "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH, "steps": args.steps + 1,
                "output.dir": work / "out",
                "bf16.enabled": "false" if args.fp32 else "true"} | MODELS[args.model] | case
    words = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
    shutil.rmtree(work / "out", ignore_errors=True)
    done = subprocess.run([program, "train", CONFIG, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{program} {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return [json.loads(line) for line in (work / "out/log.jsonl").read_text().splitlines()][1:]


def cell_of(name, steps):
    """What the steps of a case come to."""
    times = [s["step_ms"] for s in steps]
    share = lambda value: statistics.median(value(s) / s["step_ms"] for s in steps)
    cell = {"case": name, "step_ms": statistics.median(times), "mad_ms": mad(times), "loss": steps[-1]["loss"],
            "phase_share": {p: share(lambda s, p=p: s["phase_ms"][p]) for p in ("forward", "backward", "optimizer")},
            "stall_share": {c: share(lambda s, c=c: s["stall_ms"][c]) for c in steps[0]["stall_ms"]}}
    if "tensor" in steps[0].get("comm", {}):
        cell["tensor_axis_share"] = share(lambda s: s["comm"]["tensor"]["ms"])
    if "pipeline" in steps[0]:
        cell["bubble"] = statistics.median(s["pipeline"]["bubble"] for s in steps)
        cell["bubble_formula"] = steps[0]["pipeline"]["bubble_formula"]
    return cell


def base_of(name):
    """What a case is compared with."""
    return f"1 rank, micro-batches of 1{', old' * name.endswith(', old')}" if name.startswith("PP") else None


def text_of(cell, base):
    causes = ", ".join(f"{c} {100 * v:.1f}%" for c, v in cell["stall_share"].items() if v >= 0.0005)
    text = f"{cell['case']:<34} {cell['step_ms']:8.0f} ms (MAD {cell['mad_ms']:.0f})  {cell['step_ms'] / base['step_ms']:.3f} of {base['case']}  stall: {causes}"
    if "tensor_axis_share" in cell:
        text += f"; tensor axis {100 * cell['tensor_axis_share']:.1f}%"
    if "bubble" in cell:
        text += f"; bubble {100 * cell['bubble']:.1f}%, by formula {100 * cell['bubble_formula']:.1f}%"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("efficiency", "bubbles"), default="efficiency",
                        help="which cases (default: %(default)s)")
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m", help="the model (default: %(default)s)")
    parser.add_argument("--fp32", action="store_true", help="in place of bf16")
    parser.add_argument("--only", default="", help="cases whose name has this part")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the cases (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="counted in each run")
    parser.add_argument("--program", default=str(ROOT / "build/ziggurat"), help="the program (default: %(default)s)")
    parser.add_argument("--old", help="the same program of another build")
    parser.add_argument("--note", help="what else the machine did")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    cases = {n: c for n, c in (EFFICIENCY if args.what == "efficiency" else BUBBLES).items() if args.only in n}
    if not cases:
        parser.error(f"--only {args.only}: no case has this in its name")
    if len(os.sched_getaffinity(0)) != CORES:
        parser.error(f"needs {CORES} cores: begin the command with taskset -c 0-{CORES - 1}")
    programs = {"": args.program} | ({", old": args.old} if args.old else {})
    steps = {name + which: [] for name in cases for which in programs}
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        number = random.Random(1)
        vocabulary = MODELS[args.model]["model.vocab_size"]
        (work / "tokens.bin").write_bytes(array.array("H", (number.randrange(vocabulary) for _ in range(1 << 16))).tobytes())
        for _ in range(args.rounds):
            for name, case in cases.items():
                for which, program in programs.items():
                    steps[name + which] += run(program, case, args, work)
    cells = [cell_of(name, of) for name, of in steps.items()]
    by_name = {cell["case"]: cell for cell in cells}
    for cell in cells:
        print(text_of(cell, by_name.get(base_of(cell["case"]), cells[0])), flush=True)
    for name in cases if args.old else ():
        losses = [[s["loss"] for s in steps[name + which]] for which in programs]
        if losses[0] != losses[1]:
            raise SystemExit(f"{name}: the two programs have other losses: {losses}")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(provenance(ROOT) | {"benchmark": "ranks_efficiency", "load": os.getloadavg(), "settings": vars(args), "cells": cells},
                      file, indent=1)


if __name__ == "__main__":
    main()
