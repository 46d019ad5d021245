#!/usr/bin/env python3
"""A training step through the NVMe tier by several ranks, beside one rank's on the same cores.

    cmake --preset release -DZG_BENCH=ON && ninja -C build bench_train_step
    bench/ranks_nvme.py [--ranks 1,2,4] [--stage 3] [--rounds 5] [--drive DIR] [--out bench/results/NAME.json]

The programs are one configuration with other numbers of ranks: the same global batch, the same host tier together, and
for each rank a device that holds little more than what an operation needs. They take turns, so that all see the same
machine. The drive is one of memory, at --rate bytes per second, or with --drive a directory of a real one.
"""
import argparse
import contextlib
import json
import os
import pathlib

from serve import Served, drive_directories, provenance, take_turns

ROOT = pathlib.Path(__file__).resolve().parent.parent
AIM = 1.1
MODELS = {
    # name: (settings, device of each rank, host of all)
    "small": ({"model.n_layer": 8, "model.n_embd": 384, "model.n_head": 6, "model.vocab_size": 4096, "data.seq_len": 64,
               "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}, "48MiB", "64MiB"),
    "tiny": ({"model.n_layer": 2, "model.n_embd": 64, "model.n_head": 2, "model.n_positions": 64, "model.vocab_size": 515,
              "data.seq_len": 64, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}, "6MiB", "2MiB"),
}


def settings_of(args, ranks, drive):
    model, device, host = MODELS[args.model]
    return model | {
        "gradient_clipping": 1.0, "activation_checkpointing.recompute": "true", "devices": f"host:{ranks}",
        "zero_optimization.stage": args.stage, "tiers.device": args.device or device, "tiers.host": args.host or host,
        "tiers.nvme": json.dumps([{"path": drive}])} | (
            {} if args.drive else {"aio.backend": "ram", "tiers.ram": json.dumps({"bytes_per_second": args.rate})})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="the first is what the others are compared with")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--model", choices=MODELS, default="small", help="the model (default: %(default)s)")
    parser.add_argument("--device", help="budget of each rank, e.g. 96MiB")
    parser.add_argument("--host", help="budget of all ranks together")
    parser.add_argument("--rate", type=float, default=1.5e9, help="of the drive of memory")
    parser.add_argument("--drive", help="directory on a real drive, in place of one of memory")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="counted in each round")
    parser.add_argument("--work", default=str(ROOT / "build/bench"),
                        help="directory of the tokens (default: %(default)s)")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    program = [str(ROOT / "build/bench/bench_train_step"), str(ROOT / "configs/bench-gpt2-124m.json"), "--serve"]
    with drive_directories(args.drive or args.work) as new_drive, contextlib.ExitStack() as running:
        programs = []
        for ranks in map(int, args.ranks.split(",")):
            words = [w for key, value in settings_of(args, ranks, new_drive()).items() for w in ("--set", f"{key}={value}")]
            programs.append(Served(f"{ranks} rank(s)", program + ["--work", os.path.join(args.work, f"ranks{ranks}")] + words))
            running.callback(programs[-1].close)
        take_turns(programs, args.rounds, args.steps)
        first, cells = programs[0].median(), []
        for p in programs:
            cells.append({"ranks": p.name, "step_s": p.median(), "mad_s": p.mad(), "of_the_first": p.median() / first,
                          "stall_s_of_the_first_rank": p.median("stall_s"), "loss": p.steps[-1]["loss"],
                          "description": p.ready["description"]})
            print(f"{p.name}: step {p.median():.3f} s (MAD {p.mad():.3f}), {p.median() / first:.3f} of {programs[0].name}; "
                  f"the aim is {AIM}", flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(provenance(ROOT) | {"benchmark": "ranks_nvme", "load": os.getloadavg(), "settings": vars(args), "aim": AIM, "cells": cells},
                      file, indent=1)


if __name__ == "__main__":
    main()
