#!/usr/bin/env python3
"""What checkpoints cost: a run with one after each tenth step beside the same run without, in turns; and torch.save and
torch.distributed.checkpoint writing the same state to the same drive.

    cmake --preset release && ninja -C build ziggurat
    bench/checkpoints.py [--drive DIR] [--steps 21] [--rounds 3] [--torch-python PYTHON] [--out bench/results/NAME.json]

Of each way: seconds in which the training stands still for a checkpoint, bytes that are written for it, and how much more host memory the
process takes at its peak. PyTorch's processes hold the state as tensors of their own, one for each parameter and
moment, and sync what they have written, as the checkpoints here are.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
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


def train(args, out, every):
    """Trains; returns the seconds of all steps but the first and of each checkpoint, its bytes, the peak of memory."""
    words = [str(args.program), "train", str(args.config), "--steps", str(args.steps)]
    for setting in [f"output.dir={out}", f"checkpoint.every={every}", "eval.every=0", "data.tokenizer=bytes",
                    f"data.train={out.parent}/text.txt", *args.set]:
        words += ["--set", setting]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        said.seek(0)
        text = said.read()
    if status != 0:
        sys.exit(f"{' '.join(words)} failed:\n{text[-2000:]}")
    units = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "min": 60.0}
    stalls = [float(number) * units[unit] for number, unit in
              re.findall(r"info: checkpoint \S+: [^\n]*? in ([\d.]+) (us|ms|s|min)\b", text)]
    with open(f"{out}/log.jsonl", encoding="utf-8") as file:
        steps = [json.loads(line)["step_ms"] / 1e3 for line in file][1:]
    # Of state that is pinned on drives, what was newer in memory is written there, besides the checkpoint's files.
    sizes = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    dirty = [float(number) * sizes[unit] for number, unit in
             re.findall(r"of which ([\d.]+) (B|[KMGT]iB) were newer in memory", text)]
    return {"steps": steps, "stalls": stalls, "peak": 1024 * usage.ru_maxrss, "dirty": dirty,
            "bytes": max((bytes_in(p) for p in pathlib.Path(out, "checkpoints").glob("*")), default=0)}


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
            print(f"PyTorch is not compared: {args.torch_python}: {done.stderr.strip().splitlines()[-1]}")
            return
        yield way, json.loads(done.stdout) | {"bytes": bytes_in(path)}
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/ziggurat")
    parser.add_argument("--config", default=ROOT / "configs/bench-gpt2-124m.json")
    parser.add_argument("--drive", default=str(ROOT / "build/bench"), help="directory on the drive that all write to")
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the runs, e.g. tiers.host")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--out")
    args = parser.parse_args()
    os.makedirs(args.drive, exist_ok=True)
    runs, theirs = {"none": [], "every": []}, {}
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.drive) as folder:
        work = pathlib.Path(folder)
        (work / "text.txt").write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(200_000)))
        for i in range(args.rounds):
            for way in runs:
                out = work / way
                shutil.rmtree(out, ignore_errors=True)
                runs[way].append(train(args, out, args.every if way == "every" else 0))
            for way, what in others(args, work, sizes_of(args, work / "every")):
                theirs.setdefault(way, []).append(what)
            print(f"round {i + 1}/{args.rounds}", flush=True)
    # One checkpoint for `every` steps; that behind the last step is not one of the regular ones.
    mean = {way: statistics.median(sum(r["steps"]) / len(r["steps"]) for r in all_) for way, all_ in runs.items()}
    stalls = [s for r in runs["every"] for s in r["stalls"]]
    share = (mean["every"] + statistics.median(stalls) / args.every) / mean["none"] - 1
    rows = [{"way": "ziggurat", "stall_s": statistics.median(stalls), "mad_s": mad(stalls),
             "bytes": runs["every"][0]["bytes"] + max(runs["every"][0]["dirty"], default=0), "more_memory": statistics.median(r["peak"] for r in runs["every"])
             - statistics.median(r["peak"] for r in runs["none"])}]
    for way, all_ in theirs.items():
        rows.append({"way": way, "stall_s": statistics.median(t["stall_s"] for t in all_),
                     "mad_s": mad([t["stall_s"] for t in all_]), "bytes": all_[0]["bytes"],
                     "more_memory": statistics.median(t["more_memory"] for t in all_)})
    for row in rows:
        print(f"{row['way']:12} stands still {row['stall_s']:.3f} s (MAD {row['mad_s']:.3f}), "
              f"{row['bytes'] / 1e6:.1f} MB, {row['more_memory'] / 1e6:+.1f} MB of host memory")
    print(f"a step without checkpoints {mean['none']:.3f} s; with one each {args.every} steps {100 * share:+.1f}%")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(provenance(ROOT) | {"benchmark": "checkpoints", "load": os.getloadavg(), "runs": runs,
                                          "ways": rows, "more_per_step": share}, file, indent=1)


if __name__ == "__main__":
    main()
