#!/usr/bin/env python3
"""Runs the stages of bench/gpu.sh, one after the other, each in a process group of its own with a time limit; see there.

After every stage gpu.json and gpu.md are written anew, so that a run that is cut short still tells. A stage leaves what it
knows so far in a file, which counts even when the stage fails or is stopped. Exit code: 0 when all that ran passed (or was
skipped in a dry run), 1 when something failed or had to be stopped, 2 for a mistake in the flags. What was not begun,
and what told by itself that its time was up, is no failure: the last line names it, for a second command.
"""
import argparse
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

import gpu_machine
import gpu_report

HERE = pathlib.Path(__file__).resolve().parent
# name: seconds that it may take, and that must be left for it to begin. Where all take their most, they fill four
# commands: up to gpt2-124m, up to kernels, up to suite-engine, and the rest.
STAGES = {
    "suite": (100, 20),
    "suite-store": (150, 20),
    "bits": (200, 60),
    "gpt2-124m": (130, 45),
    "copies": (30, 10),
    "gpt2-1.5b": (150, 60),
    "kernels": (75, 30),
    "llama-7b": (280, 200),
    "ranks": (120, 30),
    "suite-engine": (200, 60),
    "graphs": (60, 30),
    "sanitizer": (150, 60),
    "largest": (270, 150),
}
OVER = ("passed", "failed", "skipped")  # what another command need not run again
TRIALS = {"fail": (5, 1), "hang": (2, 1)}  # to try out this program
HEARTBEAT = 20
MARGIN = 3  # seconds at the end, for the report


class Clock:
    def __init__(self, total):
        self.begin, self.total = time.monotonic(), total

    def passed(self):
        return time.monotonic() - self.begin

    def left(self):
        return self.total - self.passed() - MARGIN


def say(clock, text):
    print(f"[{clock.passed():5.0f} s] {text}", flush=True)


def machine(disk):
    """Told before anything else: whatever comes of the rest, this is known."""
    commit = HERE.parent / "COMMIT"
    return {
        "commit": commit.read_text().strip() if commit.exists()
        else gpu_machine.command_output("git", "-C", str(HERE.parent), "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"), "table": gpu_machine.table(disk),
    }


def earlier(out, dry_run):
    """The stages that an earlier command left in OUT_DIR, by name."""
    try:
        results = json.loads((out / "gpu.json").read_text())
    except (OSError, ValueError):
        return {}
    return {s["stage"]: s for s in results["stages"]} if results["dry_run"] == dry_run else {}


def read_lines(stream, lines):
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def stop(process):
    """The stage and all that it started: they are in a process group of their own."""
    for sign, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        if sign == signal.SIGTERM:
            time.sleep(0.2)  # and its children, to which the signal went too


def run_stage(name, limit, args, clock):
    """Returns the stage's record."""
    out = pathlib.Path(args.out)
    told = out / f"{name}.json"
    told.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "gpu_stages.py"), name, "--json", str(told), "--seconds", str(limit), "--device", args.device,
               "--disk", args.disk] + (["--tiny"] if args.dry_run else [])
    begin = time.monotonic()
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        lines = queue.Queue()
        threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
        heard, last, ended = begin, "nothing", None
        try:
            while ended is None:
                try:
                    line = lines.get(timeout=0.5)
                    if line is None:
                        break
                    say(clock, f"  {line}")
                    print(line, file=log, flush=True)
                    heard, last = time.monotonic(), line
                except queue.Empty:
                    if process.poll() is not None:
                        break
                now = time.monotonic()
                if now - begin > limit:
                    ended = "timed out"
                if now - heard > HEARTBEAT:
                    say(clock, f"  ... {name} goes on, {limit - (now - begin):.0f} s left for it")
                    heard = now
            if ended is None:
                process.wait(5)
        except subprocess.TimeoutExpired:
            ended = "timed out"
        except KeyboardInterrupt:
            ended = "cut short"
        stop(process)  # and whatever it left behind
        code = process.wait()
    record = {"stage": name, "limit_s": limit, "seconds": time.monotonic() - begin}
    record["status"] = ended or {0: "passed", 75: "cut", 77: "skipped"}.get(code, "failed")
    record["exit_code"] = code
    try:
        record |= json.loads(told.read_text())
    except (OSError, ValueError):
        record["notes"] = ["it left no results"]
    if ended == "timed out":
        record["notes"] = record.get("notes", []) + [f"stopped after {limit:.0f} s; the last that it said: {last}"]
    if record["status"] not in ("passed", "skipped", "cut"):
        record["log_tail"] = (out / f"{name}.log").read_text(errors="replace").splitlines()[-30:]
    return record


def write_anew(path, text):
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)


def write_results(out, results):
    write_anew(out / "gpu.json", json.dumps(results, indent=1) + "\n")
    write_anew(out / "gpu.md", gpu_report.markdown(results))


def cut_short(*_):
    raise KeyboardInterrupt


def parse_args():
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="Tests and benchmarks of one GPU; see the head of bench/gpu.sh")
    parser.add_argument("out", nargs="?", default=str(HERE.parent / "build" / "gpu"), metavar="OUT_DIR",
                        help="folder of gpu.json, gpu.md and the logs (default: %(default)s)")
    parser.add_argument("--stages", help="only these, in their usual order; with commas")
    parser.add_argument("--total", type=float, default=540, help="seconds for all of them (default: %(default)g)")
    parser.add_argument("--continue", action="store_true", dest="go_on",
                        help="keep what OUT_DIR has of an earlier command, and run the stages that are not over")
    parser.add_argument("--limit", action="append", default=[], metavar="STAGE=SECONDS", help="another limit for one stage")
    parser.add_argument("--device", default="cuda:0", help="the GPU (default: %(default)s)")
    parser.add_argument("--disk", help="directory of the NVMe tier (default: OUT_DIR)")
    parser.add_argument("--dry-run", action="store_true", help="on the processor, with tiny models")
    args = parser.parse_args()
    known = STAGES | TRIALS
    args.limits = {}
    for text in args.limit:
        name, _, seconds = text.partition("=")
        if name not in known or not seconds.replace(".", "", 1).isdigit():
            parser.error(f"--limit {text}: expected STAGE=SECONDS, with a stage of: {', '.join(STAGES)}")
        args.limits[name] = float(seconds)
    chosen = args.stages.split(",") if args.stages else list(STAGES)
    for name in chosen:
        if name not in known:
            parser.error(f"--stages: there is no stage {name}; there are: {', '.join(STAGES)}")
    args.chosen = [name for name in known if name in chosen]
    args.disk = str(pathlib.Path(args.disk or args.out).resolve())
    if args.dry_run:
        args.device = "host"
    return args


def main():
    args = parse_args()
    signal.signal(signal.SIGTERM, cut_short)
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    clock = Clock(args.total)
    known = STAGES | TRIALS
    results = {"benchmark": "gpu", "dry_run": args.dry_run, "total_s": args.total, "machine": machine(args.disk)}
    for what, how in results["machine"]["table"]:
        print(f"{what:28} {how}", flush=True)
    kept = earlier(out, args.dry_run) if args.go_on else {}
    names = [name for name in known if name in kept or name in args.chosen]
    fresh = [name for name in args.chosen if kept.get(name, {}).get("status") not in OVER]
    results["stages"] = [{"stage": name, "status": "not run", "notes": ["the run was cut short before it"]} if name in fresh else kept[name]
                         for name in names]
    write_results(out, results)
    say(clock, f"stages: {', '.join(fresh) or 'none is left'}")
    for i, name in enumerate(names):
        if name not in fresh:
            continue
        limit, least = known[name]
        limit = args.limits.get(name, limit)
        if clock.left() < min(least, limit):
            why = f"{max(0, clock.left()):.0f} s of {args.total:g} were left, and it takes {min(least, limit):g} or more"
            results["stages"][i] = {"stage": name, "status": "not run", "notes": [why]}
            say(clock, f"{name}: not run, {why}")
        else:
            limit = min(limit, clock.left())
            say(clock, f"{name}: at most {limit:.0f} s")
            results["stages"][i] = {"stage": name, "status": "under way"}
            write_results(out, results)
            results["stages"][i] = run_stage(name, limit, args, clock)
            say(clock, f"{name}: {results['stages'][i]['status']} after {results['stages'][i]['seconds']:.1f} s")
        results["seconds"] = clock.passed()
        write_results(out, results)
        if results["stages"][i]["status"] == "cut short":
            break
    ran = [s for s in results["stages"] if s["stage"] in fresh]
    bad = [s["stage"] for s in ran if s["status"] in ("failed", "timed out", "cut short") or (s["status"] == "skipped" and not args.dry_run)]
    left = [s["stage"] for s in ran if s["status"] not in OVER]
    say(clock, f"{out}/gpu.md and gpu.json" + (f"; not passed: {', '.join(bad)}" if bad else ""))
    if left:
        say(clock, f"not done: {', '.join(left)}; a second command goes on with them: --stages {','.join(left)}, or --continue with this OUT_DIR")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
