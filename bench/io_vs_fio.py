#!/usr/bin/env python3
"""Our engine beside fio on one drive: throughput and CPU seconds per GB, block by block and depth by depth.

    ninja -C build ziggurat
    bench/io_vs_fio.py --file /mnt/nvme0/bench.bin [--size 4GiB] [--rounds 7] [--seconds 1.5] [--out FILE.json] [--quick]

Five contestants take turns on the same file, in an order that turns round from one round to the next: fio (io_uring,
direct, registered file and buffers, a thread, not a process, and spared the changing of its buffers before each write)
and `ziggurat io-bench`, both with buffers in small pages and both in huge ones, since what a drive gives depends on that;
and ours with checksums of everything that is written and read. fio's huge pages must be there: as root,
echo 400 > /proc/sys/vm/nr_hugepages; else that pair is left out. Without fio ours is measured alone. The file is made
once and filled with noise, and removed at the end unless it was there before: then it must have the size, and its
contents are lost to the writing cases (--overwrite).

Medians of the rounds, with the median absolute deviation (MAD). CPU: fio's is the user and system time of its job, which
leaves out its main thread and its start; ours is that of the whole process while it measures. A run measures
--seconds; the --ramp seconds before these do not count, on either side. Latency is the median of the rounds' p99.
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
import time

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FIO_RW = {"read": "read", "write": "write", "mixed": "rw"}
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}


def parse_size(text):
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def size_text(size):
    unit, factor = max(((u, f) for u, f in UNITS.items() if size % f == 0), key=lambda p: p[1], default=("B", 1))
    return f"{size // factor} {unit}"


def output_of(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def run_fio(args, op, block, depth, *flags):
    command = [args.fio, "--name=job", f"--filename={args.file}", f"--size={args.size}", f"--rw={FIO_RW[op]}", f"--bs={block}", f"--iodepth={depth}",
               "--ioengine=io_uring", "--direct=1", "--registerfiles=1", "--fixedbufs=1", "--thread", "--scramble_buffers=0", "--time_based",
               f"--runtime={round(args.seconds * 1000)}ms", f"--ramp_time={round(args.ramp * 1000)}ms", "--allow_file_create=0",
               "--output-format=json"]
    if op == "mixed":
        command.append("--rwmixread=50")
    text = output_of(command + list(flags))
    job = json.loads(text[text.index("{"):])["jobs"][0]  # notes may come before
    if job["error"] != 0:
        sys.exit(f"{' '.join(command)}: fio's job failed with error {job['error']}")
    sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"] > 0]
    if not sides:
        sys.exit(f"{' '.join(command)}: nothing was moved in {args.seconds} s; measure for longer (--seconds)")
    moved = sum(s["io_bytes"] for s in sides)
    # A mix runs for as long as its longer side.
    seconds = max(s["runtime"] for s in sides) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"bytes_per_second": moved / seconds, "cpu_seconds_per_gb": cpu / (moved / 1e9),
            "p99_seconds": max(s["clat_ns"]["percentile"]["99.000000"] for s in sides) / 1e9, "bytes": moved}


def run_ours(args, op, block, depth, *flags):
    command = [args.ziggurat, "io-bench", "--file", args.file, "--size", str(args.size), "--op", op, "--block-size", str(block),
               "--queue-depth", str(depth), "--backend", "io_uring", "--seconds", str(args.seconds), "--ramp", str(args.ramp), "--json"]
    if op != "read":
        command.append("--overwrite")
    result = json.loads(output_of(command + list(flags)))
    return {"bytes_per_second": result["bytes_per_second"], "cpu_seconds_per_gb": result["cpu_seconds_per_gb"],
            "p99_seconds": max(result[side]["latency_seconds"]["p99"] for side in ("read", "write")), "bytes": result["bytes"],
            "engine": result["engine"]}


CONTESTANTS = {"fio": run_fio, "ours": lambda *a: run_ours(*a, "--huge-pages", "off"),
               "fio_huge": lambda *a: run_fio(*a, "--iomem=mmaphuge"), "ours_huge": run_ours,
               "verified": lambda *a: run_ours(*a, "--verify", "on")}
PAIRS = {"ours": "fio", "ours_huge": "fio_huge", "verified": "ours_huge"}
COLUMNS = ("bytes_per_second", "cpu_seconds_per_gb", "p99_seconds")


# Of 2 MiB, what MAP_HUGETLB can be given.
def free_huge_pages():
    fields = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    size = int(fields.get("Hugepagesize", "0").split()[0])
    return int(fields.get("HugePages_Free", "0")) if size == 2048 else 0


def measure(args, op, block, depth):
    names = [name for name in args.contestants if name != "fio_huge" or free_huge_pages() >= depth * block // (2 * MIB) + 8]
    runs = {name: [] for name in names}
    for number in range(args.rounds):
        # Each takes every place, and each pair is seen in both orders.
        at = number % len(names)
        turned = names[at:] + names[:at]
        for name in turned if number % 2 == 0 else turned[::-1]:
            runs[name].append(CONTESTANTS[name](args, op, block, depth))
    case = {"op": op, "block_size": block, "queue_depth": depth, "rounds": args.rounds,
            "engine": next(r[0]["engine"] for name, r in runs.items() if not name.startswith("fio"))}
    for name, results in runs.items():
        case[name] = {}
        for key in COLUMNS:
            values = [r[key] for r in results]
            case[name][key] = {"median": statistics.median(values), "mad": mad(values), "all": values}
    for name, peer in PAIRS.items():
        if name in runs and peer in runs:
            for key in COLUMNS:
                case[name][f"{key}_of_{peer}"] = case[name][key]["median"] / case[peer][key]["median"]
    return case


HEADER = """| op | block | depth | small pages: fio GB/s (MAD) | ours | ours/fio | CPU ours/fio | huge pages: fio GB/s (MAD) | ours | ours/fio | CPU ours/fio | verified/ours | CPU s/GB: fio, ours, fio huge, ours huge, verified |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def row(case):
    def rate(name):
        if name not in case:
            return "-"
        b = case[name]["bytes_per_second"]
        return f"{b['median'] / 1e9:.2f} ({b['mad'] / 1e9:.2f})"

    def ratio(name, key):
        value = case.get(name, {}).get(f"{key}_of_{PAIRS[name]}")
        return "-" if value is None else f"{value:.3f}" if key == "bytes_per_second" else f"{value:.2f}"

    pairs = " | ".join(f"{rate(peer)} | {rate(name)} | {ratio(name, 'bytes_per_second')} | {ratio(name, 'cpu_seconds_per_gb')}"
                       for name, peer in (("ours", "fio"), ("ours_huge", "fio_huge")))
    cpu = ", ".join(f"{case[name]['cpu_seconds_per_gb']['median']:.4f}" if name in case else "-" for name in CONTESTANTS)
    return (f"| {case['op']} | {size_text(case['block_size'])} | {case['queue_depth']} | {pairs} "
            f"| {ratio('verified', 'bytes_per_second')} | {cpu} |")


# True if the file was made here.
def make_file(args):
    path = pathlib.Path(args.file)
    if path.exists():
        if path.stat().st_size < args.size:
            sys.exit(f"{path} holds {path.stat().st_size} bytes, less than --size {args.size}")
        if not args.overwrite and set(args.op) != {"read"}:
            sys.exit(f"{path} exists, and writing would replace its contents: say --overwrite, or name another file")
        return False
    noise = os.urandom(16 * MIB)
    with open(path, "wb") as out:
        for at in range(0, args.size, len(noise)):
            out.write(noise[: args.size - at])
        os.fsync(out.fileno())
    return True


def device_of(path):
    fields = subprocess.run(["findmnt", "-no", "SOURCE,FSTYPE,OPTIONS", "-T", path], capture_output=True, text=True).stdout.split()
    device = {"source": fields[0], "filesystem": fields[1], "options": fields[2]} if len(fields) >= 3 else {}
    name = pathlib.Path(device.get("source", "")).name
    for key in ("model", "size"):
        text = subprocess.run(["lsblk", "-dno", key.upper(), f"/dev/{name}"], capture_output=True, text=True).stdout.strip()
        if text:
            device[key] = text
    return device


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="a file on the drive to measure")
    parser.add_argument("--overwrite", action="store_true", help="the file exists, and its contents may be lost")
    parser.add_argument("--size", type=parse_size, default=4 * GIB, help="size of the file (default: 4GiB)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each program (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds that a run measures (default: %(default)s)")
    parser.add_argument("--ramp", type=float, default=0.3, help="seconds before these, which do not count (default: %(default)s)")
    parser.add_argument("--op", nargs="+", choices=list(FIO_RW), default=list(FIO_RW),
                        help="kinds of load (default: all)")
    parser.add_argument("--block", nargs="+", type=parse_size, default=[128 * KIB, MIB, 8 * MIB],
                        help="sizes of a block (default: 128KiB 1MiB 8MiB)")
    parser.add_argument("--depth", nargs="+", type=int, default=[8, 32], help="queue depths (default: %(default)s)")
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS),
                        help="who takes part (default: all)")
    parser.add_argument("--ziggurat", default=str(ROOT / "build/ziggurat"), help="the program (default: %(default)s)")
    parser.add_argument("--fio", default="fio", help="the fio to compare with (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.5 s at 1 MiB and depth 32: to see that all works, not to conclude from")
    parser.add_argument("--out", help="write everything as JSON here")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.block, args.depth = 3, 0.5, [MIB], [32]
    version = "no fio"
    if shutil.which(args.fio):
        version = output_of([args.fio, "--version"]).strip()
    else:
        args.contestants = [name for name in args.contestants if not name.startswith("fio")]
        print(f"fio is not compared: {args.fio} is not installed", flush=True)
        if not args.contestants:
            return
    machine = provenance(ROOT) | {"kernel": platform.release(), "device": device_of(str(pathlib.Path(args.file).parent)), "fio": version}
    print(f"{version}, Linux {machine['kernel']}, {machine['cpu']} x {machine['cores']}, {machine['device']}, commit {machine['commit']}, "
          f"{machine['date']}; file of {size_text(args.size)}, median of {args.rounds} runs of {args.seconds} s")
    made = make_file(args)
    cases = []
    begin = time.monotonic()
    try:
        print(HEADER, flush=True)
        for op in args.op:
            for block in args.block:
                for depth in args.depth:
                    cases.append(measure(args, op, block, depth))
                    print(row(cases[-1]), flush=True)
    finally:
        if made:
            os.remove(args.file)
    print(f"\nengine: {cases[0]['engine']}\n{time.monotonic() - begin:.0f} s")
    for name, peer in list(PAIRS.items()) + [("ours_huge", "fio")]:
        both = [c for c in cases if name in c and peer in c]
        if both:
            def ratios(key):
                values = [c[name][key]["median"] / c[peer][key]["median"] for c in both]
                return f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"

            print(f"{name} / {peer}: throughput {ratios('bytes_per_second')}; CPU per GB {ratios('cpu_seconds_per_gb')}")
    if args.out:
        settings = {"size": args.size, "rounds": args.rounds, "seconds": args.seconds, "ramp": args.ramp}
        pathlib.Path(args.out).write_text(json.dumps({"benchmark": "io_vs_fio", "settings": settings, "cases": cases} | machine, indent=1) + "\n")


if __name__ == "__main__":
    main()
