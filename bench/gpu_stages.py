#!/usr/bin/env python3
"""One stage of bench/gpu.sh; bench/gpu.py runs it. Progress on stdout, results in a file that grows with them.

Exit code: 0 passed, 77 skipped, 1 failed.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time

import gpu_large
from gpu_support import ROOT, Failed, Skipped, Stage, Steps, ours, peak_of
from serve import take_turns

# Small models for a dry run, by settings of the configuration.
TINY_GPT2 = ["model.n_layer=2", "model.n_embd=64", "model.n_head=2", "model.n_positions=64", "model.vocab_size=515", "data.seq_len=64",
             "train_batch_size=2", "train_micro_batch_size_per_gpu=2"]
# Of the GPU's suite: the ops, without tests that end the process on purpose.
SANITIZED = os.environ.get("ZG_SANITIZER_FILTER", "Cuda*:Mma*:Tensor*:Plain*:All*-*Death*:*Large*")


# Ops and runtime, the store's suites, and training: the goldens, placements over the tiers.
SUITES = ("zg_test_gpu", "zg_test_gpu_store", "zg_test_gpu_engine")


def suite(stage):
    counts = {"run": 0, "skipped": 0}
    failed, passed, ended = [], [], {}

    def read(line):
        print(line, file=sys.stderr)
        if line.startswith("[ RUN      ]"):
            counts["run"] += 1
            if counts["run"] % 20 == 0:
                stage.say(f"{counts['run']} tests begun, {len(failed)} failed")
        elif line.startswith("[  FAILED  ]") and "(" in line:
            failed.append(line.split("]", 1)[1].strip().split(" (")[0])
            stage.say(f"failed: {failed[-1]}")
        elif line.startswith("[  SKIPPED ]") and "(" in line:
            counts["skipped"] += 1
        elif match := re.match(r"\[  PASSED  \] (\d+) test", line):
            passed.append(int(match.group(1)))

    for program in SUITES:
        code = stage.run_lines([stage.program(program)], read, env={} if stage.tiny else {"ZG_REQUIRE_GPU": "1"})
        if code == 77:
            raise Skipped("there is no GPU")
        if code != 0:
            ended[program] = code
        stage.data("tests", counts | {"passed": sum(passed), "failed": failed})
        stage.say(f"{program}: {'passed' if code == 0 else f'ended with {code}'}")
    stage.aim("GPU tests that pass", f"{sum(passed)} of {counts['run']}", "all", not ended and not counts["skipped"])
    if ended:
        how = ", ".join(f"{program} ended with {code}" for program, code in ended.items())
        raise Failed(f"{how}; failed: {', '.join(sorted(set(failed))) or 'it did not get to the end'}")


def torch_steps(stage, model, *flags):
    script = str(ROOT / "bench" / "pytorch_gpu.py")
    device = ["--device", "cpu", "--context", "64", "--vocab", "515", "--compile", "off"] if stage.tiny else []
    command = [sys.executable, script, "--model", "tiny" if stage.tiny else model, "--serve", *flags, *device]
    try:
        return Steps(stage, f"PyTorch {' '.join(flags)}".strip(), command, ours=False)
    except Failed as why:
        reason = "torch is not here, or sees no GPU" if "ended with 3 " in str(why) else why
        stage.note(f"PyTorch is not compared: {reason}")
        return None


def tell_steps(stage, programs, mfu_asked):
    peak = peak_of(programs[0].ready["device"])
    roof = programs[0].ready["roof_flops"]
    rows = []
    for p in programs:
        s = p.summary()
        rows.append([s["name"], s["step_s"] * 1e3, s["mad_s"] * 1e3, s["steps"], s["tokens_per_s"], s["flops_per_s"] / 1e12,
                     s["flops_per_s"] / peak if peak else "?", s["flops_per_s"] / roof])
    stage.table("Steps", ["program", "ms", "MAD", "steps", "tokens/s", "TFLOP/s", "of the vendor's peak", "of the measured roof of products"], rows)
    stage.data("steps", [p.summary() for p in programs])
    mine = programs[0].summary()
    if peak:
        stage.aim(f"{stage.name}: model FLOP utilisation", mine["flops_per_s"] / peak, f"{mfu_asked} or more", mine["flops_per_s"] / peak >= mfu_asked)
    for p in programs[1:]:
        if not p.name.startswith("PyTorch"):
            continue
        ratio = p.median() / mine["step_s"]
        stage.aim(f"{stage.name}: speed over {p.name}", ratio, "1 or more", ratio >= 1)
        flops = (p.ready["flops"], programs[0].steps[0]["flops"])
        if abs(flops[0] - flops[1]) > 1e-6 * flops[1]:
            stage.note(f"the two programs count other FLOPs for this model: {flops[0]:.6g} and {flops[1]:.6g}")


def gpt2_124m(stage):
    tiny = TINY_GPT2 if stage.tiny else []
    programs = [ours(stage, "bench-gpt2-124m-gpu.json", "ours", *tiny)]
    programs += [p for p in [torch_steps(stage, "124m")] if p]
    rounds, per_turn = (1, 1) if stage.tiny else (6, 5)

    def progress(line):
        stage.say(line)
        tell_steps_so_far(stage, programs)

    take_turns(programs, rounds, per_turn, progress)
    tell_steps(stage, programs, 0.45)


def tell_steps_so_far(stage, programs):
    stage.data("steps_so_far", [p.summary() for p in programs if p.steps])


def gpt2_1_5b(stage):
    """One program at a time: ours, PyTorch, ours again."""
    tiny = TINY_GPT2 if stage.tiny else []
    warm, count = (1, 2) if stage.tiny else (3, 10)

    def take(p):
        for _ in range(warm):
            p.step(False)
        for _ in range(count):
            p.step(True)
        p.close()
        stage.say(f"{p.name}: {p.median():.3f} s a step")

    mine = ours(stage, "bench-gpt2-1.5b-gpu.json", "ours", *tiny)
    take(mine)
    tell_steps(stage, [mine], 0.5)
    stage.told["aims"].clear()  # told again below, with all there is
    programs = [mine]
    theirs = torch_steps(stage, "1.5b", "--compile", "blocks")
    if theirs:
        take(theirs)
        programs.append(theirs)
    if theirs and stage.left() > 3 * mine.start_seconds:
        again = ours(stage, "bench-gpt2-1.5b-gpu.json", "ours again", *tiny)
        take(again)
        programs.append(again)
    tell_steps(stage, programs, 0.5)


def kernel_bench(stage, *flags):
    command = [stage.program("bench_gpu_kernels"), "--device", stage.device, "--seconds", str(max(5, stage.left() - 10)), *flags]
    records = []

    def each(record):
        records.append(record)
        if len(records) % 25 == 0:
            stage.data("records", records)
            stage.say(f"{len(records)} measurements")

    stage.json_lines(command + (["--tiny"] if stage.tiny else []), each)
    stage.data("records", records)
    return records


def copies(stage):
    records = kernel_bench(stage, "--only", "copies")
    rows = [[r["way"], r.get("bytes", "best"), r["rate"] / 1e9, r.get("peer_rate", 0) / 1e9, r.get("ratio", "?")]
            for r in records if r["bench"] in ("copy", "copy_best")]
    stage.table("Copies", ["way", "bytes", "GB/s", "cudaMemcpyAsync GB/s", "ratio"], rows)
    for r in records:
        if r["bench"] == "copy_best" and "ratio" in r:
            asked = 0.9 if r["way"] == "both at once" else 0.95
            stage.aim(f"copies, {r['way']}: of cudaMemcpyAsync's best", r["ratio"], f"{asked} or more", r["ratio"] >= asked)


def kernels(stage):
    records = kernel_bench(stage, "--only", "roofs,products,attention,ops")
    ops = [r for r in records if r["bench"] == "op"]
    for section in ("roofs", "products", "attention", "ops"):
        rows = [[r["op"], r["dtype"], r["shape"], r["ms"], r["mad_ms"], r["rate"] / (1e12 if r["of"] == "products" else 1e9), r["share"], r["of"]]
                for r in ops if r["section"] == section and (section == "roofs" or r["dtype"] == "bf16")]
        stage.table(f"{section.capitalize()} (all types are in the JSON)", ["op", "type", "shape", "ms", "MAD", "TFLOP/s or GB/s", "share", "of the roof of"], rows)
    low = sorted((r for r in ops if r["section"] == "ops" and r["dtype"] == "bf16"), key=lambda r: r["share"])[:8]
    stage.note("lowest shares of memory's roof in bf16: " + "; ".join(f"{r['op']} {r['shape']} {r['share']:.2f}" for r in low))
    for left_out in (r for r in records if r["bench"] == "left_out"):
        stage.note(f"not measured, the time was up: {left_out['section']} in {left_out['dtype']}")
    if stage.tiny or stage.left() < 20:
        return
    for whose in ("own", "cudnn"):
        try:
            records = kernel_bench(stage, "--only", "attention", "--attention", whose)
        except Failed as why:
            stage.note(f"attention by {whose}: {why}")
            continue
        rows = [[r["op"], r["dtype"], r["shape"], r["ms"], r["rate"] / 1e12, r["share"]] for r in records if r.get("section") == "attention"]
        stage.table(f"Attention, {whose}", ["op", "type", "shape", "ms", "TFLOP/s", "share"], rows)
        stage.data(f"attention {whose}", records)


def graphs(stage):
    """Where operations as CUDA graphs pay: where they are short for the host, and where they are not."""
    tiny = TINY_GPT2 if stage.tiny else []
    cases = [("1 sequence of 256 a micro-batch, 8 of them", ["data.seq_len=64" if stage.tiny else "data.seq_len=256", "train_batch_size=8",
                                                            "train_micro_batch_size_per_gpu=1"]),
             ("as in gpt2-124m", [])]
    rounds, per_turn = (1, 1) if stage.tiny else (5, 4)
    rows = []
    for case, settings in cases:
        pair = [ours(stage, "bench-gpt2-124m-gpu.json", name, *tiny, *settings, f"cuda.graphs={on}")
                for name, on in (("launch by launch", "false"), ("graphs", "true"))]
        for p in pair:
            for _ in range(3):  # once as it is, once captured, once launched
                p.step(False)
        take_turns(pair, rounds, per_turn, stage.say)
        for p in pair:
            p.close()
        without, whole = (p.median() for p in pair)
        rows.append([case, without * 1e3, whole * 1e3, without / whole])
        stage.table("GPT-2 124M, operations launched one by one and as CUDA graphs (cuda.graphs)", ["batch", "ms", "ms as graphs", "ratio"], rows)
        stage.data("steps", [p.summary() for p in pair] + stage.told["data"].get("steps", []))


def sanitizer(stage):
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    program = stage.program("zg_test_gpu")
    if not os.access(tool, os.X_OK):
        raise Skipped("compute-sanitizer is not on this machine")
    bad = []
    for check, share in (("memcheck", 0.5), ("racecheck", 0.95)):
        command = [tool, "--tool", check, "--error-exitcode", "86", program, f"--gtest_filter={SANITIZED}"]
        seconds, counts, errors = max(1, stage.left() * share), {"run": 0, "done": 0}, []
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=stage.environment | {"ZG_REQUIRE_GPU": "1"})
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            counts["run"] += line.startswith("[ RUN      ]")
            counts["done"] += line.startswith("[       OK ]")
            if "=========" in line and "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line:
                errors.append(line.strip("= \n"))
            if time.monotonic() - begin > seconds:
                process.terminate()
                break
        cut = process.poll() is None
        process.stdout.close()
        code = process.wait()
        stage.data(check, counts | {"exit_code": code, "summary": errors, "cut_short": cut})
        clean = counts["done"] > 0 and (code == 0 or cut) and code != 86
        what = f"clean in {counts['done']} tests" if clean else f"not clean: {'; '.join(errors) or f'ended with {code}'}"
        stage.aim(f"compute-sanitizer {check}", what + (", not all: the time was up" if cut else ""), "clean", clean)
        bad += [] if clean else [check]
    if bad:
        raise Failed(f"not clean: {', '.join(bad)}")


def fail(stage):
    stage.table("What was measured before", ["what", "value"], [["answer", 42]])
    raise Failed("this stage fails on purpose")


def hang(stage):
    stage.note("this stage never ends")
    subprocess.run(["sleep", "1000"], check=False)


STAGES = {"suite": suite, "gpt2-124m": gpt2_124m, "copies": copies, "gpt2-1.5b": gpt2_1_5b, "kernels": kernels, "graphs": graphs, "llama-7b": gpu_large.llama_7b,
          "sanitizer": sanitizer, "largest": gpu_large.largest, "fail": fail, "hang": hang}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--disk", default="/tmp")
    parser.add_argument("--tiny", action="store_true")
    stage = Stage(parser.parse_args())
    try:
        STAGES[stage.name](stage)
        return 0
    except Skipped as why:
        stage.note(f"skipped: {why}")
        return 77
    except Failed as why:
        stage.note(f"failed: {why}")
        return 1
    finally:
        stage.save()
        shutil.rmtree(stage.work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
