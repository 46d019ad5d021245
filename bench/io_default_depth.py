#!/usr/bin/env python3
"""What io-bench's default depth loses against the best fixed depth, on one drive, beside fio with the same pages.

    ninja -C build ziggurat
    bench/io_default_depth.py --file /mnt/nvme0/bench.bin [--size 4GiB] [--rounds 5] [--seconds 4] [--out FILE.json]

For each kind of load and size of block, io-bench without --queue-depth, io-bench at fixed depths (--depths; those that
would have more than 256 MiB in flight are left out) and fio at the default depth, with the same pages, take turns on one
file; --rounds turns of --seconds each. A drive whose speed changes within seconds changes for all of them. Reported are
medians of the rounds, and the median over the rounds of the ratio of the default to each fixed depth in the same round:
the default's loss is that to the best of them. The default takes part twice: what it loses to itself is noise, and a
loss to another depth that is no more than that says nothing. fio's huge pages must be there (as root,
echo 200 > /proc/sys/vm/nr_hugepages); else both use small ones in that comparison. The file is made, filled with
noise, and removed unless it was there before.
"""
import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys

import io_vs_fio
from io_vs_fio import KIB, MIB, parse_size, run_fio, run_ours, size_text
from serve import provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_IN_FLIGHT = 256 * MIB


def ours_default(args, op, block):
    command = [args.ziggurat, "io-bench", "--file", args.file, "--size", str(args.size), "--op", op, "--block-size", str(block),
               "--seconds", str(args.seconds), "--ramp", str(args.ramp), "--json"] + (["--overwrite"] if op != "read" else [])
    result = json.loads(io_vs_fio.output_of(command))
    return {"bytes_per_second": result["bytes_per_second"], "depth": result["queue_depth"], "engine": result["engine"]}


def turns(args, op, block):
    """The results of each contestant, a list with one for each round."""
    default = ours_default(args, op, block)  # also warms the drive up; not counted
    depth = default["depth"]
    fixed = [d for d in args.depths if d * block <= MOST_IN_FLIGHT and d != depth]
    runs = {name: lambda: ours_default(args, op, block) for name in ("default", "default again")}
    runs |= {f"depth {d}": lambda d=d: run_ours(args, op, block, d) for d in fixed}
    if args.fio:
        huge = io_vs_fio.free_huge_pages() >= depth * block // (2 * MIB) + 8
        runs["fio"] = lambda: run_fio(args, op, block, depth, *(["--iomem=mmaphuge"] if huge else []))
        if not huge:
            runs["default, small pages"] = lambda: run_ours(args, op, block, depth, "--huge-pages", "off")
    names = list(runs)
    results = {name: [] for name in names}
    for number in range(args.rounds):
        at = number % len(names)
        turned = names[at:] + names[:at]
        for name in turned if number % 2 == 0 else turned[::-1]:
            results[name].append(runs[name]()["bytes_per_second"])
    return default, results


def case_of(args, op, block):
    default, results = turns(args, op, block)
    median = {name: statistics.median(rates) for name, rates in results.items()}
    ratio_to = {name: statistics.median(d / r for d, r in zip(results["default"], rates)) for name, rates in results.items()}
    ratio = {name: value for name, value in ratio_to.items() if name.startswith("depth")}
    # A depth that lost to the default cannot be the best; without any other the default is.
    worst = min(ratio, key=ratio.get, default=None)
    peer = "default, small pages" if "default, small pages" in results else "default"
    fio = statistics.median(o / f for o, f in zip(results[peer], results["fio"])) if args.fio else None
    return {"op": op, "block_size": block, "default_depth": default["depth"], "engine": default["engine"], "bytes_per_second": median,
            "all": results, "default_to_fixed": ratio, "best_fixed": worst, "default_to_best": ratio[worst] if worst else 1.0,
            "default_to_itself": ratio_to["default again"],
            "pages": "small" if peer != "default" else "huge", "ours_to_fio": fio}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="a file on the drive to measure")
    parser.add_argument("--overwrite", action="store_true", help="the file exists, and its contents may be lost")
    parser.add_argument("--size", type=parse_size, default=4 << 30, help="size of the file (default: 4GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="seconds that a turn measures (default: %(default)s)")
    parser.add_argument("--ramp", type=float, default=0.3, help="seconds before these, which do not count (default: %(default)s)")
    parser.add_argument("--op", nargs="+", choices=["read", "write", "mixed"], default=["read", "write", "mixed"],
                        help="kinds of load (default: all)")
    parser.add_argument("--block", nargs="+", type=parse_size, default=[128 * KIB, MIB, 8 * MIB],
                        help="sizes of a block (default: 128KiB 1MiB 8MiB)")
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64, 128, 256],
                        help="fixed depths to compare with (default: %(default)s)")
    parser.add_argument("--ziggurat", default=str(ROOT / "build/ziggurat"), help="the program (default: %(default)s)")
    parser.add_argument("--fio", default="fio", help="the fio to compare with (default: %(default)s)")
    parser.add_argument("--out", help="write everything as JSON here")
    args = parser.parse_args()
    if not shutil.which(args.fio):
        print(f"fio is not compared: {args.fio} is not installed", flush=True)
        args.fio = None
    machine = provenance(ROOT) | {"kernel": platform.release(), "device": io_vs_fio.device_of(str(pathlib.Path(args.file).parent)),
                                  "command": " ".join(["bench/io_default_depth.py"] + sys.argv[1:])}
    made = io_vs_fio.make_file(args)
    cases = []
    print("| op | block | default depth | default GB/s | best fixed | default / best fixed | default / itself | ours / fio (pages) |\n|---|---|---|---|---|---|---|---|")
    try:
        for op in args.op:
            for block in args.block:
                case = case_of(args, op, block)
                cases.append(case)
                fio = f"{case['ours_to_fio']:.3f} ({case['pages']})" if args.fio else "-"
                print(f"| {op} | {size_text(block)} | {case['default_depth']} | {case['bytes_per_second']['default'] / 1e9:.2f} | "
                      f"{case['best_fixed'] or '-'} | {case['default_to_best']:.3f} | {case['default_to_itself']:.3f} | {fio} |", flush=True)
    finally:
        if made:
            os.unlink(args.file)
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps({"bench": "io_default_depth"} | machine | {
            "size": args.size, "rounds": args.rounds, "seconds": args.seconds, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
