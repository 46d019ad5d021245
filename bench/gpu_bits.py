"""The stage of bench/gpu.sh that asks whether a GPU's bits depend on where things lie.

It trains GPT-2 124M with cuda.deterministic, evaluating in between: with everything in the GPU's memory, and with less
and less of it through the host and a drive; with checkpoints, and stopped and resumed; with our own attention and CUDA
graphs; in tiles. Within a group every loss, gradient norm and validation loss must be the same to the last bit, and the
saved weights byte for byte.
"""
import hashlib
import json
import os
import random
import shutil
import sys
import time

from gpu_support import Failed

KEEP = ("step", "loss", "val_loss", "grad_norm", "lr", "skipped", "tokens")
STEPS = 6
ONLY = os.environ.get("ZG_BITS_GROUP", "")  # groups with this text in their name


def budgets(stage, device, host):
    """Settings of a run through all three tiers; in a dry run a model of 64 columns has a thousandth of it."""
    unit = "MiB" if not stage.tiny else "KiB"
    drive = stage.work / "drive"
    drive.mkdir(exist_ok=True)
    nvme = json.dumps([{"path": str(drive), "bytes": "8GiB" if not stage.tiny else "64MiB"}])
    return [f"tiers.device={device}{unit}", f"tiers.host={host}{unit}", f"tiers.nvme={nvme}"]


def groups(stage):
    """Group -> {case: (settings, steps before it is stopped and resumed, or None)}; the first case is what the others must equal."""
    whole = ["tiers.host=8GiB" if not stage.tiny else "tiers.host=64MiB"]
    least = 1200 if not stage.tiny else 5000
    small, large = (budgets(stage, n * least, 700 if not stage.tiny else 2500) for n in (1, 3))
    own = ["cuda.attention=own"]
    tiles = ["tiers.tiles=on"]
    micro = ["train_micro_batch_size_per_gpu=4"]
    return {
        "GPT-2 124M": {"whole": (whole, None), "whole, graphs": (whole + ["cuda.graphs=true"], None), "device 3": (large, None),
                       "device 1": (small, None), "device 1, stopped after 4 and resumed": (small + ["checkpoint.every=2"], 4)},
        "own attention, micro-batches of 4": {"whole": (whole + own + micro, None), "device 1, graphs": (small + own + micro + ["cuda.graphs=true"], None)},
        "tiles": {"whole": (whole + tiles, None), "device 1": (small + tiles, None)},
    }


def train(stage, name, settings, stop):
    """What a run leaves: the lines of its log without times, and hashes of its weights."""
    out = stage.work / "bits"
    shutil.rmtree(out, ignore_errors=True)
    tokens = stage.work / "bits.bin"
    if not tokens.exists():
        draw = random.Random(3)
        vocabulary = 515 if stage.tiny else 50257
        tokens.write_bytes(b"".join(int(vocabulary * draw.random() ** 3).to_bytes(2, "little") for _ in range(1 << 18)))
    tiny = ["model.n_layer=3", "model.n_embd=64", "model.n_head=2", "model.vocab_size=515", "data.seq_len=64"] if stage.tiny else ["data.seq_len=256"]
    command = [stage.program("ziggurat"), "train", stage.config("bench-gpt2-124m-gpu.json")]
    for s in [f"devices={stage.device}", f"data.train={tokens}", "data.validation=0.1", f"output.dir={out}", "train_batch_size=16",
              "train_micro_batch_size_per_gpu=8", "eval.every=3", "eval.batches=2", "cuda.deterministic=true", "tiers.tiles=off", *tiny, *settings]:
        command += ["--set", s]
    begin = time.monotonic()
    for last in ([["--steps", str(stop)], ["--steps", str(STEPS), "--resume"]] if stop else [["--steps", str(STEPS)]]):
        code = stage.run_lines(command + last, lambda line: print(line, file=sys.stderr))
        if code != 0:
            raise Failed(f"{name}: ziggurat train {' '.join(last)} ended with {code}")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    files = sorted((out / "model").glob("*.safetensors"))
    left = {"log": [{k: line[k] for k in KEEP if k in line} for line in lines],
            "weights": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}, "seconds": time.monotonic() - begin}
    if not left["weights"] or not any("loss" in line for line in lines):
        raise Failed(f"{name}: the run left no weights, or no losses")
    return left


def first_difference(a, b):
    """Where two runs part; None where they do not."""
    by_step = [{json.dumps([line["step"], key]): line[key] for line in run["log"] for key in KEEP[1:] if key in line} for run in (a, b)]
    for place in by_step[0]:
        if by_step[0][place] != by_step[1].get(place):
            return f"{place}: {by_step[0][place]!r} and {by_step[1].get(place)!r}"
    if len(by_step[0]) != len(by_step[1]):
        return f"{len(by_step[0])} and {len(by_step[1])} numbers in log.jsonl"
    return None if a["weights"] == b["weights"] else "the saved weights"


def bits(stage):
    rows, differ, failed = [], [], []
    for group, cases in groups(stage).items():
        if ONLY not in group:
            continue
        first = None
        for case, (settings, stop) in cases.items():
            name = f"{group}, {case}"
            try:
                run = train(stage, name, settings, stop)
            except Failed as why:
                stage.note(str(why))
                failed.append(name)
                continue
            stage.data(name, run)
            first = first or run
            found = first_difference(first, run)
            differ += [name] if found else []
            losses = [line["loss"] for line in run["log"] if "loss" in line]
            rows.append([group, case, run["seconds"], repr(losses[-1]), "the reference" if run is first else found or "the same bits"])
            stage.say(f"{name}: {rows[-1][2]:.1f} s, {rows[-1][4]}")
            stage.table(f"{STEPS} steps under several placements", ["group", "case", "s", "last loss", "beside the first of its group"], rows)
    stage.aim("placements that change bits", len(differ), "0", not differ)
    if failed or differ:
        raise Failed(f"other bits: {', '.join(differ) or 'none'}; ended badly: {', '.join(failed) or 'none'}")
