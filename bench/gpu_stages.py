#!/usr/bin/env python3
"""One stage of bench/gpu.sh; bench/gpu.py runs it. Progress on stdout, results in a file that grows with them.

Exit code: 0 passed, 75 cut since the time was up, 77 skipped, 1 failed.
"""
import argparse
import array
import json
import os
import re
import shutil
import subprocess
import sys

import gpu_bits
import gpu_large
import gpu_machine
from gpu_support import ROOT, Cut, Failed, Skipped, Stage, Steps, ours, peak_of
from serve import take_turns

# Small models for a dry run, by settings of the configuration.
TINY_GPT2 = ["model.n_layer=2", "model.n_embd=64", "model.n_head=2", "model.n_positions=64", "model.vocab_size=515", "data.seq_len=64",
             "train_batch_size=2", "train_micro_batch_size_per_gpu=2"]
# Of the GPU's suite: the ops, without tests that end the process on purpose, and without those of the runtime, which
# provoke errors of CUDA's functions on purpose: memcheck counts each as an error.
SANITIZED = os.environ.get("ZG_SANITIZER_FILTER", "Cuda*:Mma*:Tensor*:Plain*:All*-*Death*:*Large*:CudaRuntime.*")


# Ops and runtime, the store's suites, and training: the goldens, placements over the tiers. And how many processes of
# each run at once at most: the last makes more than a thousand tiny runs, which are the host's work, and takes 124 s in
# four processes, 154 s in one. The store's tests wait for the GPU thousands of times, and a GPU serves processes in turns.
SUITES = {"suite": ("zg_test_gpu", 1), "suite-store": ("zg_test_gpu_store", 1), "suite-engine": ("zg_test_gpu_engine", 4)}


def suite(stage):
    run_suite(stage, *SUITES[stage.name])


def run_suite(stage, program, most):
    shards = max(1, min(most, len(os.sched_getaffinity(0)) // 4))
    tests = {"of": 0, "run": 0, "skipped": 0, "passed": 0, "failed": []}
    under_way = set()

    def read(line):
        print(line, file=sys.stderr)
        # Output of a test may stand before these on the line, not behind.
        match = re.search(r"\[(==========| RUN      |       OK |  FAILED  |  SKIPPED )\] (Running (\d+) tests? from|\S+?(?=,? |$))", line)
        if match is None:
            return
        what, name = match.group(1).strip(), match.group(2)
        if match.group(3):
            tests["of"] += int(match.group(3))
        elif what == "RUN":
            tests["run"] += 1
            under_way.add(name)
            if tests["run"] % 20 == 0:
                stage.say(f"{tests['run']} of {tests['of']} tests begun, {len(tests['failed'])} failed")
        elif name in under_way:  # not where they are listed again at the end
            under_way.remove(name)
            if what == "FAILED":
                tests["failed"].append(name)
                stage.say(f"failed: {name}")
            else:
                tests["passed" if what == "OK" else "skipped"] += 1

    needs = {} if stage.tiny else {"ZG_REQUIRE_GPU": "1"}
    codes = stage.run_together([([stage.program(program)], needs | {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(i)})
                                for i in range(shards)], read, seconds=max(1, stage.left() - 5))
    if all(code == 77 for code in codes):
        raise Skipped("there is no GPU")
    stage.data("tests", tests)
    stage.aim(f"GPU tests that pass, {program}", f"{tests['passed']} of {tests['of']}", "all", tests["passed"] == tests["of"] > 0)
    bad = [f"ended with {code}" for code in codes if code not in (0, None)]
    if bad or tests["failed"]:
        raise Failed(f"{program} {', '.join(bad) or 'was cut'}; failed: {', '.join(tests['failed']) or 'it did not get to the end'}")
    if None in codes:
        raise Cut(f"{tests['of'] - tests['run']} of {tests['of']} tests did not begin, and these were under way: {', '.join(sorted(under_way)) or 'none'}")


def tensors(path):
    """The numbers of a safetensors file of f32, by name."""
    blob = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = {k: v for k, v in json.loads(blob[8:8 + size]).items() if k != "__metadata__"}
    return {name: array.array("f", blob[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]) for name, t in header.items()}


def ranks(stage):
    """Several GPUs: the suite of communication, collectives beside NCCL's own, and a run that shards everything."""
    found = []
    probe = [stage.program("ziggurat"), "probe", "--size", "0"]
    stage.run_lines(probe, lambda line: found.append(line) if re.match(r"GPU  |NCCL  ", line) else None)
    gpus = sum(line.startswith("GPU ") for line in found)
    for line in found:
        stage.note(" ".join(line.split()))
    if gpus < 2 and not stage.tiny:
        stage.note("one GPU: skipped")
        return
    if gpus >= 2:
        run_suite(stage, "zg_test_gpu_comm", 1)
        records = []
        counts = ",".join(str(n) for n in (2, 4, 8) if n <= gpus)
        code = stage.run_lines([stage.program("bench_comm"), "--gpus", counts, "--mib", "256"], records.append)
        if code != 0:
            raise Failed(f"bench_comm ended with {code}")
        results = json.loads("\n".join(records))["results"]
        rows = [[r["ranks"], w["way"], w["seconds"] * 1e3, w["mad"] * 1e3, w["of_memcpy"]] for r in results for w in r["ways"]]
        stage.table("Collectives of 256 MiB", ["GPUs", "way", "ms", "MAD", "of a copy on the GPU"], rows)
        for r in results:
            of = {w["way"]: w["seconds"] for w in r["ways"]}
            stage.aim(f"all-gather over {r['ranks']} GPUs, time over NCCL's own", of["all-gather"] / of["NCCL all-gather"], "1.1 or less",
                      of["all-gather"] <= 1.1 * of["NCCL all-gather"])
    # A run that shards everything, beside the same on the processor; in a dry run the processor twice. With SGD, since
    # Adam makes whole steps of gradients that are no more than rounding.
    n, saved = max(2, min(gpus, 8)), {}
    text = stage.work / "ranks.txt"
    text.write_text("all work and no play makes jack a dull boy, " * 500)
    for name, devices in (("gpus", f"cuda:0-{n - 1}" if gpus >= 2 else f"host:{n}"), ("host", f"host:{n}")):
        out = stage.work / f"ranks-{name}"
        command = [stage.program("ziggurat"), "train", stage.config("quickstart.json"), "--devices", devices, "--steps", "5"]
        for setting in (f"data.train={text}", f"output.dir={out}", f"train_batch_size={2 * n}", "zero_optimization.stage=3", "eval.every=0",
                        "sample.tokens=0", "eval.batches=1", "train_micro_batch_size_per_gpu=2", "bf16.enabled=false",
                        'optimizer={"type": "SGD", "params": {"lr": 0.1}}', "scheduler.params.warmup_num_steps=2", "tiers.device=96MiB",
                        "tiers.host=256MiB", f"tiers.nvme.0.path={stage.work}"):
            command += ["--set", setting]
        code = stage.run_lines(command, lambda line: print(line, file=sys.stderr))
        if code != 0:
            raise Failed(f"ziggurat train --devices {devices} ended with {code}")
        saved[name] = tensors(out / "model")
    pairs = [(a, b) for name, values in saved["host"].items() for a, b in zip(values, saved["gpus"][name], strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    stage.aim(f"ZeRO-3 on {n} GPUs, 5 steps: largest difference of a weight from the processor's", worst, "1e-3 or less", worst <= 1e-3)
    if worst > 1e-3:
        raise Failed("the models differ")


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
    tool = gpu_machine.compute_sanitizer()
    program = stage.program("zg_test_gpu")
    if tool is None:
        raise Skipped("compute-sanitizer is not on this machine")
    bad, cut = [], []
    for check, share in (("memcheck", 0.5), ("racecheck", 0.95)):
        counts, told = {"of": 0, "run": 0, "done": 0}, []

        def read(line):
            print(line, file=sys.stderr)
            if match := re.match(r"\[==========\] Running (\d+) test", line):
                counts["of"] = int(match.group(1))
            counts["run"] += line.startswith("[ RUN      ]")
            counts["done"] += line.startswith("[       OK ]")
            # All that the tool itself says, the first of it and the sums.
            if line.startswith("=========") and (len(told) < 20 or "SUMMARY" in line):
                told.append(line.strip("= "))

        command = [tool, "--tool", check, "--error-exitcode", "86", program, f"--gtest_filter={SANITIZED}"]
        code = stage.run_lines(command, read, env={"ZG_REQUIRE_GPU": "1"}, seconds=max(1, stage.left() * share), stderr=subprocess.STDOUT)
        stage.data(check, counts | {"exit_code": code, "told": told})
        if any("Device not supported" in line for line in told):
            raise Skipped("compute-sanitizer does not work on this machine: Device not supported")
        errors = [line for line in told if re.search(r"SUMMARY: [1-9]|Invalid|hazard|Program hit", line)]
        clean = counts["done"] > 0 and code in (0, None) and not errors
        what = f"clean in {counts['done']} of {counts['of']} tests" if clean else f"not clean: {'; '.join(errors[:3]) or f'ended with {code}'}"
        stage.aim(f"compute-sanitizer {check}", what + (", the time was up" if code is None else ""), "clean", clean)
        bad += [] if clean else [check]
        cut += [f"{check} after {counts['done']} of {counts['of']} tests"] if code is None else []
    if bad:
        raise Failed(f"not clean: {', '.join(bad)}")
    if cut:
        raise Cut(", ".join(cut))


def fail(stage):
    stage.table("What was measured before", ["what", "value"], [["answer", 42]])
    raise Failed("this stage fails on purpose")


def hang(stage):
    stage.note("this stage never ends")
    subprocess.run(["sleep", "1000"], check=False)


STAGES = {name: suite for name in SUITES} | {
    "gpt2-124m": gpt2_124m, "copies": copies, "gpt2-1.5b": gpt2_1_5b, "kernels": kernels, "graphs": graphs, "llama-7b": gpu_large.llama_7b,
    "bits": gpu_bits.bits, "sanitizer": sanitizer, "ranks": ranks, "largest": gpu_large.largest, "fail": fail, "hang": hang}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=list(STAGES), help="the stage to run")
    parser.add_argument("--json", required=True, help="file of the results")
    parser.add_argument("--seconds", type=float, required=True, help="when to stop")
    parser.add_argument("--device", default="cuda:0", help="the GPU (default: %(default)s)")
    parser.add_argument("--disk", default="/tmp", help="directory of the NVMe tier (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="with tiny models, to see that all works")
    stage = Stage(parser.parse_args())
    try:
        STAGES[stage.name](stage)
        return 0
    except Skipped as why:
        stage.note(f"skipped: {why}")
        return 77
    except Cut as why:
        stage.note(f"cut since the time was up: {why}")
        return 75
    except Failed as why:
        stage.note(f"failed: {why}")
        return 1
    finally:
        stage.save()
        shutil.rmtree(stage.work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
