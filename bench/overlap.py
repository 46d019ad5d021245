#!/usr/bin/env python3
"""Does I/O hide behind compute? GPT-2 with its NVMe tier on the RAM back end, whose bandwidth is set so that a step's I/O
takes as long as its compute; a step should take as long as the longer of the two, not their sum.

    cmake --preset release -DZG_BENCH=ON && ninja -C build bench_train_step
    bench/overlap.py [--rounds 5] [--trace-dir DIR] [--out bench/results/NAME.json]

Three cases: without clipping (updates early, in backward), with it (deferred into the next forward, where only forward
time can hide what the host budget does not hold), and activations that travel instead of the optimizer's state. Compute is the same configuration with the tier as fast as memory
allows and everything cached; I/O is its bytes over the bandwidth that was set.
"""
import argparse
import json
import os
import pathlib
import subprocess

from serve import Served, provenance, take_turns

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = {
    # name: (settings, host budget)
    "early": (["--set", "gradient_clipping=0", "--set", "activation_checkpointing.recompute=true", "--set", "tiers.read_ahead=0.5"], "448MiB"),
    "deferred": (["--set", "gradient_clipping=1.0", "--set", "activation_checkpointing.recompute=true", "--set", "tiers.read_ahead=0.6"], "640MiB"),
    # Every block keeps what its backward needs: written in forward, read in backward; the optimizer's state at the host.
    "activations": (["--set", "gradient_clipping=0", "--set", "activation_checkpointing.recompute=false", "--set", "zero_optimization.stage=3",
                     "--set", "zero_optimization.offload_optimizer.device=cpu", "--set", "tiers.read_ahead=0.4"], "1100MiB"),
}
MODEL = ["--set", "model.n_layer=12", "--set", "model.n_embd=512", "--set", "model.n_head=8", "--set", "model.vocab_size=8192",
         "--set", "train_batch_size=16", "--set", "train_micro_batch_size_per_gpu=4"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="counted steps per turn")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one (may be repeated)")
    parser.add_argument("--device", default="130MiB")
    parser.add_argument("--host", help="host budget, instead of each case's own")
    parser.add_argument("--io-share", type=float, default=1.0, help="I/O time wanted, as a share of compute")
    parser.add_argument("--trace-dir", help="write a timeline of each case here")
    parser.add_argument("--out")
    args = parser.parse_args()
    program = [str(ROOT / "build/bench/bench_train_step"), str(ROOT / "configs/bench-gpt2-124m.json"), "--work", str(ROOT / "build/bench")]
    results = {}
    for case, (settings, host) in CASES.items():
        if args.case and case not in args.case:
            continue
        base = program + MODEL + settings
        tiers = ["--set", f"tiers.device={args.device}", "--set", f"tiers.host={args.host or host}", "--set", 'tiers.nvme=[{"path":"/tmp"}]',
                 "--set", "aio.backend=ram"]
        compute = Served("compute alone", base + ["--set", "zero_optimization.offload_optimizer.device=none", "--serve"])
        for i in range(6):
            compute.step(i > 1)
        # The bytes do not depend on the bandwidth: read them off a run that is not slowed down.
        free = Served("unthrottled", base + tiers + ["--serve"])
        for i in range(6):
            free.step(i > 2)
        moved = sum(s["nvme_read"] + s["nvme_write"] for s in free.steps) / len(free.steps)
        free.close()
        bandwidth = moved / (compute.median() * args.io_share)
        throttle = ["--set", f"tiers.ram={{\"bytes_per_second\":{bandwidth:.0f}}}"]
        throttled = Served("with I/O", base + tiers + throttle + ["--serve"])
        take_turns([compute, throttled], args.rounds, args.steps)
        io = moved / bandwidth
        longer = max(compute.median(), io)
        results[case] = {"compute_s": compute.median(), "io_s": io, "step_s": throttled.median(), "mad_s": throttled.mad(),
                         "ratio": throttled.median() / longer, "bytes_per_step": moved, "bandwidth": bandwidth,
                         "stall_s": throttled.median("stall_s"), "host_budget": args.host or host, "steps": len(throttled.steps)}
        compute.close()
        throttled.close()
        r = results[case]
        print(f"{case}: compute {r['compute_s']:.3f} s, I/O {r['io_s']:.3f} s ({moved / 1e6:.0f} MB at {bandwidth / 1e9:.2f} GB/s), "
              f"step {r['step_s']:.3f} s (MAD {r['mad_s']:.3f}): {r['ratio']:.2f} of the longer")
        if args.trace_dir:
            os.makedirs(args.trace_dir, exist_ok=True)
            subprocess.run(base + tiers + throttle + ["--steps", "5", "--trace", f"{args.trace_dir}/overlap-{case}.json"], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps({"benchmark": "overlap", "cases": results} | provenance(ROOT), indent=1) + "\n")


if __name__ == "__main__":
    main()
