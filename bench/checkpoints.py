#!/usr/bin/env python3
"""What checkpoints cost: a run with one after each tenth step beside the same run without, in turns; and torch.save and
torch.distributed.checkpoint writing the same state to the same drive.

    cmake --preset release && ninja -C build ziggurat
    bench/checkpoints.py [--drive DIR] [--steps 41] [--rounds 3] [--torch-python PYTHON] [--out bench/results/NAME.json]
    bench/checkpoints.py --steps-only [--add EARLIER.json]... [--out bench/results/NAME.json]

The runs have an NVMe tier on the drive, and device and host budgets (--budget) of a quarter of GPT-2 124M's state, so
that most of it lies there: checkpoints pin it. With --budget 0 there is no tier, and they copy it.

Of each way: seconds in which the training stands still for a checkpoint, bytes that are written for it, and how much
more host memory the process takes at its peak; of the runs also the space that their drive's files take at most, and
whether all bytes were those of the formula. The mean of a step has in it what the checkpoints of these steps cost: the
standstill of each, and slower steps beside a commit. Where a machine's speed changes from minute to minute, what a
checkpoint costs is also told from its own run: its standstill, and by how much the two steps behind it are longer than
the others before the next one (--every 5 gives more of them). Export is one of the newest checkpoint, to the same drive,
between two copies by io-bench of what an earlier export wrote, in turns: all of them read what was not just written, and
write a new file. What io-bench writes over what it has just written, while it reads (--op mixed), and dd stand beside
them. --steps-only leaves out exports and PyTorch; --add takes over the rounds of an earlier call with the same settings,
where a machine is free for a few rounds at a time. PyTorch's processes hold the state as tensors of their own, one for each parameter and moment, and sync what they have written, as
the checkpoints here are.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
AIM = 0.02  # more for a step
TENTH = 10  # steps between two checkpoints, as the aim has them
TORCH = """
import json, os, resource, sys, time
import torch
from torch.distributed import checkpoint as dcp
way, path, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
state = {f"{i}.{kind}": torch.rand(n) for i, n in enumerate(sizes) for kind in ("fp32", "exp_avg", "exp_avg_sq")}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
if way == "torch.save":
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
else:
    dcp.save(state, checkpoint_id=path, no_dist=True)
print(json.dumps({"stall_s": time.perf_counter() - begin,
                  "more_memory": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}))
"""


def bytes_in(path):
    path = pathlib.Path(path)
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def blocks_in(path):
    """The bytes that files take on their file system; some may go meanwhile."""
    taken = 0
    for p in path.rglob("*"):
        with contextlib.suppress(OSError):
            taken += 512 * p.stat().st_blocks
    return taken


def seconds_of(number, unit):
    return float(number) * {"ms": 1e-3, "us": 1e-6, "s": 1.0, "min": 60.0}[unit]


def train(args, out, every):
    """Trains; returns the seconds of all steps but the first, and of each checkpoint, bytes, and peaks."""
    words = [str(args.program), "train", str(args.config), "--steps", str(args.steps)]
    drive = out.parent / f"drive-{out.name}"
    settings = [f"output.dir={out}", f"checkpoint.every={every}", "eval.every=0", "data.tokenizer=bytes",
                f"data.train={out.parent}/text.txt"]
    if args.budget != "0":
        drive.mkdir()
        settings += [f"tiers.device={args.budget}", f"tiers.host={args.budget}", f"tiers.nvme.0.path={drive}"]
    for setting in [*settings, *args.set]:
        words += ["--set", setting]
    taken = 0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid != 0:
                break
            taken = max(taken, blocks_in(drive))
            time.sleep(0.2)
        process.returncode = status
        said.seek(0)
        text = said.read()
    if status != 0:
        sys.exit(f"{' '.join(words)} failed:\n{text[-2000:]}")
    unit = "(us|ms|s|min)"
    stalls = [seconds_of(*m) for m in re.findall(rf"info: checkpoint [^\n]*(?:stood still for| in) ([\d.]+) {unit}\b", text)]
    waits = [seconds_of(*m) for m in re.findall(rf"info: checkpoint [^\n]*and waited ([\d.]+) {unit}\b", text)]
    commits = [seconds_of(*m) for m in re.findall(rf"info: checkpoint [^\n]*committed after ([\d.]+) {unit}\b", text)]
    with open(f"{out}/log.jsonl", encoding="utf-8") as file:
        steps = [json.loads(line)["step_ms"] / 1e3 for line in file][1:]
    # Of state that is pinned on drives, what was newer in memory is written there, besides the checkpoint's files.
    sizes = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    dirty = [float(number) * sizes[of] for number, of in
             re.findall(r"of which ([\d.]+) (B|[KMGT]iB) were newer in memory", text)]
    return {"steps": steps, "stalls": stalls, "waits": waits, "commits": commits, "dirty": dirty,
            "peak": 1024 * usage.ru_maxrss, "drive_peak": taken,
            "exact": text.count(" exact"), "differs": text.count(" differs"),
            "bytes": max((bytes_in(p) for p in pathlib.Path(out, "checkpoints").glob("*")), default=0)}


def per_step(args, run):
    """The mean seconds of a step, with what the checkpoints of these steps cost. That behind the last is not counted."""
    counted = run["stalls"][:(args.steps - 1) // args.every]
    return (sum(run["steps"]) + sum(counted)) / len(run["steps"])


def costs(args, run):
    """What each checkpoint costs in seconds, from its own run: its standstill, and by how much the two steps behind it
    are longer than the median of the others before the next one. A machine whose speed drifts does so for both. And that
    median."""
    step = {i + 2: seconds for i, seconds in enumerate(run["steps"])}
    for at, stall in zip(range(args.every, args.steps - args.every + 1, args.every), run["stalls"]):
        rest = statistics.median(step[at + i] for i in range(3, args.every + 1))
        yield stall + sum(step[at + i] - rest for i in (1, 2)), rest


def own_share(own):
    """How much longer a step is with a checkpoint at each tenth, by what costs() says; None without any."""
    return statistics.median(cost / (TENTH * rest) for cost, rest in own) if own else None


def export(args, out):
    """Bytes per second of an export of the newest checkpoint; of io-bench, which copies what an earlier export wrote
    before and after it, and reads and writes at once; and of dd, which copies that past the page cache."""
    def io_bench(*flags):
        words = ["io-bench", "--path", str(out.parent), "--json", *flags]
        said = subprocess.run([args.program, *words], check=True, capture_output=True, text=True).stdout
        os.sync()  # else the blocks of its file, which is removed, are discarded while the next one is measured
        return json.loads(said)["write"]["bytes_per_second"]

    def export_to(path):
        state = json.loads(subprocess.run([args.program, "checkpoint", "list", str(out), "--json"], check=True,
                                          capture_output=True, text=True).stdout)["checkpoints"][0]
        begin = time.perf_counter()
        subprocess.run([args.program, "checkpoint", "export", state["path"], str(path)], check=True, capture_output=True)
        return time.perf_counter() - begin

    earlier = out.parent / "earlier"
    if not earlier.exists():
        export_to(earlier)
    largest = max(earlier.rglob("*.safetensors"), key=bytes_in)
    mixed = io_bench("--op", "mixed", "--seconds", "3")
    before = io_bench("--op", "copy", "--file", str(largest))
    copy = out.parent / "copy"
    seconds = export_to(copy)
    size = bytes_in(copy)
    shutil.rmtree(copy)
    os.sync()
    io = statistics.mean([before, io_bench("--op", "copy", "--file", str(largest))])
    begin = time.perf_counter()
    subprocess.run(["dd", f"if={largest}", f"of={copy}", "bs=8M", "iflag=direct", "oflag=direct", "conv=fsync"],
                   check=True, capture_output=True)
    dd = bytes_in(copy) / (time.perf_counter() - begin)
    copy.unlink()
    os.sync()
    return {"bytes": size, "seconds": seconds, "bytes_per_second": size / seconds, "io_bench_copy": io,
            "io_bench_mixed": mixed, "dd_copies": dd, "of_io_bench_copy": size / seconds / io}


def sizes_of(args, out):
    """The elements of each parameter in the newest checkpoint."""
    said = subprocess.run([args.program, "checkpoint", "show", str(out), "--tensors", "--json"], check=True,
                          capture_output=True, text=True).stdout
    counts = {}
    for piece in json.loads(said)["pieces"]:
        if ".exp_avg" not in piece["tensor"]:
            counts[piece["tensor"]] = counts.get(piece["tensor"], 0) + piece["count"]
    return list(counts.values())


def others(args, work, sizes):
    for way in ("torch.save", "DCP"):
        path = work / "theirs"
        done = subprocess.run([args.torch_python, "-c", TORCH, way, str(path), json.dumps(sizes)], capture_output=True,
                              text=True)
        if done.returncode != 0:
            print(f"PyTorch is not compared: {args.torch_python}: "
                  f"{(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}")
            return
        yield way, json.loads(done.stdout) | {"bytes": bytes_in(path)}
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/ziggurat", help="the program (default: %(default)s)")
    parser.add_argument("--config", default=ROOT / "configs/bench-gpt2-124m.json",
                        help="configuration of the runs (default: %(default)s)")
    parser.add_argument("--drive", default=str(ROOT / "build/bench"), help="directory on the drive that all write to")
    parser.add_argument("--budget", default="474MiB", help="of the device and of the host; 0: no NVMe tier")
    parser.add_argument("--steps", type=int, default=41, help="steps of each run (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the runs (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the runs, e.g. tiers.host")
    parser.add_argument("--torch-python", default=sys.executable,
                        help="a Python that can import torch (default: this one)")
    parser.add_argument("--exports", type=int, default=1, help="exports of each round (default: %(default)s)")
    parser.add_argument("--steps-only", action="store_true", help="no exports, and nothing of PyTorch")
    parser.add_argument("--add", action="append", default=[], metavar="JSON", help="rounds of an earlier call")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    os.makedirs(args.drive, exist_ok=True)
    runs, theirs = {"none": [], "every": []}, {}
    exports = []
    for earlier in map(json.loads, map(pathlib.Path.read_text, map(pathlib.Path, args.add))):
        for way, all_ in runs.items():
            all_ += earlier["runs"][way]
        exports += [e for e in earlier["exports"] if "of_io_bench_copy" in e]  # once they stood beside --op mixed
    first = len(runs["none"])
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.drive) as folder:
        work = pathlib.Path(folder)
        (work / "text.txt").write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(200_000)))
        for i in range(first, first + args.rounds):
            # Who comes first changes, too.
            for way in list(runs)[::1 if i % 2 == 0 else -1]:
                out = work / way
                shutil.rmtree(out, ignore_errors=True)
                shutil.rmtree(work / f"drive-{way}", ignore_errors=True)
                runs[way].append(train(args, out, args.every if way == "every" else 0))
            pair = [per_step(args, runs[way][-1]) for way in ("none", "every")]
            print(f"round {i + 1}/{first + args.rounds}: {pair[0]:.3f} s a step without checkpoints, "
                  f"{100 * (pair[1] / pair[0] - 1):+.1f}% with", flush=True)
            if args.steps_only:
                continue
            exports += [export(args, work / "every") for _ in range(args.exports)]
            for way, what in others(args, work, sizes_of(args, work / "every")):
                theirs.setdefault(way, []).append(what)
    mean = {way: statistics.median(per_step(args, r) for r in all_) for way, all_ in runs.items()}
    stalls = [s for r in runs["every"] for s in r["stalls"]]
    share = mean["every"] / mean["none"] - 1
    rows = [{"way": "ziggurat", "stall_s": statistics.median(stalls), "mad_s": mad(stalls),
             "bytes": runs["every"][0]["bytes"] + max(runs["every"][0]["dirty"], default=0),
             "more_memory": statistics.median(r["peak"] for r in runs["every"])
             - statistics.median(r["peak"] for r in runs["none"])}]
    for way, all_ in theirs.items():
        rows.append({"way": way, "stall_s": statistics.median(t["stall_s"] for t in all_),
                     "mad_s": mad([t["stall_s"] for t in all_]), "bytes": all_[0]["bytes"],
                     "more_memory": statistics.median(t["more_memory"] for t in all_)})
    for row in rows:
        print(f"{row['way']:12} stands still {row['stall_s']:.3f} s (MAD {row['mad_s']:.3f}), "
              f"{row['bytes'] / 1e6:.1f} MB, {row['more_memory'] / 1e6:+.1f} MB of host memory")
    print(f"a step without checkpoints {mean['none']:.3f} s (MAD {mad([per_step(args, r) for r in runs['none']]):.3f}); "
          f"with one each {args.every} steps {100 * share:+.1f}%; the aim is {100 * AIM:.0f}%")
    every = runs["every"]
    own = [cost for r in every for cost in costs(args, r)] if args.every > 3 else []
    if own:
        print(f"of its own run a checkpoint costs {statistics.median(c for c, _ in own):.2f} s (MAD "
              f"{mad([c for c, _ in own]):.2f}, {len(own)} checkpoints), {100 * own_share(own):.2f}% of {TENTH} steps")
    if any(r["commits"] for r in every):
        print(f"committed {statistics.median(s for r in every for s in r['commits']):.3f} s after the step; updates waited "
              f"{statistics.median(s for r in every for s in r['waits']):.3f} s for it")
    print(f"files on the drive: {every[0]['drive_peak'] / 1e6:.1f} MB at most, {runs['none'][0]['drive_peak'] / 1e6:.1f} MB "
          f"without checkpoints; bytes moved: {sum(r['exact'] for r in every)} counters exact, "
          f"{sum(r['differs'] for r in every)} differ from the formula")
    if exports:
        of = sorted(e["of_io_bench_copy"] for e in exports)
        new = statistics.median(e["io_bench_copy"] / e["io_bench_mixed"] for e in exports)
        print(f"export: {statistics.median(e['bytes_per_second'] for e in exports) / 1e9:.2f} GB/s, "
              f"{statistics.median(of):.2f} of what io-bench copies ({of[0]:.2f} to {of[-1]:.2f}), which is {new:.2f} of "
              f"what it writes over what it has just written; dd "
              f"{statistics.median(e['dd_copies'] for e in exports) / 1e9:.2f} GB/s")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(provenance(ROOT) | {"benchmark": "checkpoints", "load": os.getloadavg(), "runs": runs, "aim": AIM,
                                          "ways": rows, "more_per_step": share, "more_per_tenth_step_by_own_run": own_share(own), "exports": exports,
                                          "settings": {k: str(v) for k, v in vars(args).items()}}, file, indent=1)


if __name__ == "__main__":
    main()
