#!/usr/bin/env python3
"""Does I/O hide behind compute? A model with its NVMe tier on the RAM back end, whose bandwidth is set so that a step's I/O
takes a given share of its compute; a step should take as long as the longer of the two, not their sum.

    cmake --preset release -DZG_BENCH=ON && ninja -C build bench_train_step
    bench/overlap.py [--model gpt2-124m|small|tiny] [--rounds 5] [--trace-dir DIR] [--out bench/results/NAME.json]

Cases: without clipping (updates early, in backward), with it (deferred into the next forward), the same two with
optimizer.overlap=off, and activations that travel instead of the optimizer's state. Compute is the same configuration with
everything in memory. I/O is bytes over the bandwidth that was set:

  nominal  all of the optimizer's state, read and written once a step; --io-share sets this one unless --io moved
  moved    what really crossed the link: state that stays in the host's memory does not

Updates can only hide in a part of the step: early in backward, deferred in forward. Before the first of them at most the
host's memory has been read, behind the last at most as much is still to be written; so 2 x (state - host memory) must
cross the link in that part. `least` is the step that this leaves possible, whatever is done; where it is above the aim,
the host's budget is too small for this bandwidth. --model tiny is there to see that all works, not to conclude from.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess

from serve import Served, drive_directories, provenance, take_turns

ROOT = pathlib.Path(__file__).resolve().parent.parent
AIM = 1.10
EARLY = ["--set", "gradient_clipping=0"]
DEFERRED = ["--set", "gradient_clipping=1.0"]
OFF = ["--set", "optimizer.overlap=off"]
# Every block keeps what its backward needs: written in forward, read in backward; the optimizer's state at the host.
ACTIVATIONS = ["--set", "gradient_clipping=0", "--set", "activation_checkpointing.recompute=false", "--set", "zero_optimization.stage=3",
               "--set", "zero_optimization.offload_optimizer.device=cpu"]
CASES = {
    # name: (settings, the phase that updates can hide in)
    "early": (EARLY, "backward_s"),
    "deferred": (DEFERRED, "forward_s"),
    "early, off": (EARLY + OFF, None),
    "deferred, off": (DEFERRED + OFF, None),
    "activations": (ACTIVATIONS, None),
}
MODELS = {
    # name: (settings, device budget, host budget by case)
    "gpt2-124m": (["--set", "activation_checkpointing.recompute=false"], "1GiB",
                  {"early": "1300MiB", "deferred": "1700MiB", "early, off": "1300MiB", "deferred, off": "1700MiB", "activations": "2200MiB"}),
    "small": (["--set", "model.n_layer=12", "--set", "model.n_embd=512", "--set", "model.n_head=8", "--set", "model.vocab_size=8192",
               "--set", "train_batch_size=16", "--set", "train_micro_batch_size_per_gpu=4", "--set", "activation_checkpointing.recompute=true"],
              "160MiB", {"early": "448MiB", "deferred": "640MiB", "early, off": "448MiB", "deferred, off": "640MiB", "activations": "1100MiB"}),
    "tiny": (["--set", "model.n_layer=2", "--set", "model.n_embd=64", "--set", "model.n_head=2", "--set", "model.n_positions=64",
              "--set", "model.vocab_size=515", "--set", "data.seq_len=64", "--set", "activation_checkpointing.recompute=true"],
             "4352KiB", dict.fromkeys(CASES, "2MiB") | {"activations": "2944KiB"}),
}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bytes_of(text):
    number, unit = re.fullmatch(r"([\d.]+)([KMG]iB)", text).groups()
    return float(number) * UNITS[unit]


def least_step(compute, phase, state, host, bandwidth):
    """Seconds: compute, with the phase that updates hide in made as long as what must cross the link in it."""
    if phase is None:
        return None
    window = compute.median(phase)
    return compute.median() - window + max(window, 2 * max(0.0, state - host) / bandwidth)


def measure(name, args):
    """Runs one case and tells it. A run locks the directory of its drive, also where that is memory: each has its own."""
    with drive_directories(args.work) as new_drive, contextlib.ExitStack() as running:
        return measure_with(name, args, new_drive, running)


def measure_with(name, args, new_drive, running):
    settings, phase = CASES[name]
    model, device, hosts = MODELS[args.model]
    host = args.host or hosts[name]
    program = [str(ROOT / "build/bench/bench_train_step"), str(ROOT / "configs/bench-gpt2-124m.json"), "--work", args.work]
    base = program + model + settings + [word for setting in args.set for word in ("--set", setting)]
    tiers = ["--set", f"tiers.device={args.device or device}", "--set", f"tiers.host={host}", "--set", "aio.backend=ram",
             "--set", f"tiers.read_ahead={args.read_ahead}", "--set", "tiers.nvme=" + json.dumps([{"path": new_drive()}])]

    def serve(name, command):
        program = Served(name, command + ["--serve"])
        running.callback(program.close)
        return program

    compute = serve("compute alone", base)
    for i in range(args.warm_up + 4):
        compute.step(i >= args.warm_up)
    state = compute.ready["optimizer_state_bytes"]
    # The bytes do not depend on the bandwidth: read them off a run that is not slowed down.
    free = serve("unthrottled", base + tiers)
    for i in range(args.warm_up + 3):
        free.step(i >= args.warm_up)
    moved = sum(s["nvme_read"] + s["nvme_write"] for s in free.steps) / len(free.steps)
    free.close()
    if moved == 0:
        raise SystemExit(f"{name}: nothing crosses the link with host memory of {host}: name less with --host")
    bandwidth = (moved if args.io == "moved" or name == "activations" else 2 * state) / (compute.median() * args.io_share)
    throttle = ["--set", f"tiers.ram={{\"bytes_per_second\":{bandwidth:.0f}}}"]
    throttled = serve("with I/O", base + tiers + throttle)
    take_turns([compute, throttled], args.rounds, args.steps)
    compute.close()
    throttled.close()
    least = least_step(compute, phase, state, bytes_of(host), bandwidth)
    r = {"compute_s": compute.median(), "compute_mad_s": compute.mad(), "nominal_io_s": 2 * state / bandwidth, "moved_io_s": moved / bandwidth,
         "least_s": least, "step_s": throttled.median(), "mad_s": throttled.mad(), "step_of_compute": throttled.median() / compute.median(),
         "step_of_longer": throttled.median() / max(compute.median(), moved / bandwidth), "bytes_per_step": moved, "state_bytes": state,
         "bandwidth": bandwidth, "stall_s": throttled.median("stall_s"), "host_budget": host, "steps": len(throttled.steps)}
    possible = "" if least is None else f", least {least / r['compute_s']:.2f}" + ("" if least <= AIM * r["compute_s"] else " (cannot be hidden)")
    print(f"{name}: compute {r['compute_s']:.3f} s (MAD {r['compute_mad_s']:.3f}), I/O nominal {r['nominal_io_s']:.3f} s, moved {r['moved_io_s']:.3f} s "
          f"({moved / 1e6:.0f} MB at {bandwidth / 1e9:.2f} GB/s), step {r['step_s']:.3f} s (MAD {r['mad_s']:.3f}), stall {r['stall_s']:.3f} s: "
          f"{r['step_of_compute']:.2f} of compute{possible}; {r['step_of_longer']:.2f} of the longer of compute and moved", flush=True)
    if args.trace_dir:
        os.makedirs(args.trace_dir, exist_ok=True)
        subprocess.run(base + tiers + throttle + ["--steps", "5", "--trace", f"{args.trace_dir}/overlap-{name.replace(', ', '-')}.json"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return r


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2-124m", help="the model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="counted steps per turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before bytes and compute are looked at")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one (may be repeated)")
    parser.add_argument("--device", help="device budget, instead of the model's own")
    parser.add_argument("--host", help="host budget, instead of each case's own")
    parser.add_argument("--read-ahead", type=float, default=0.25, help="tiers.read_ahead")
    parser.add_argument("--io-share", type=float, default=0.9, help="I/O time wanted, as a share of compute")
    parser.add_argument("--io", choices=["nominal", "moved"], default="nominal", help="which I/O that is")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both programs, e.g. aio.verify=false")
    parser.add_argument("--trace-dir", help="write a timeline of each case here")
    parser.add_argument("--work", default=str(ROOT / "build/bench"), help="directory of the tokens")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    results = {case: measure(case, args) for case in CASES if not args.case or case in args.case}
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "trace_dir", "work")}
        pathlib.Path(args.out).write_text(json.dumps({"benchmark": "overlap", "settings": settings, "cases": results} | provenance(ROOT), indent=1) + "\n")


if __name__ == "__main__":
    main()
