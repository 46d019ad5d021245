#!/usr/bin/env python3
"""Do two builds compute the same? Trains one small model in many configurations with both, and compares bits and bytes.

    bench/same_bits.py OLD/ziggurat NEW/ziggurat [--only TEXT] [--out FILE.json]

The configurations vary architecture, data type, placement, timing of the updates, state format, optimizer, order of
accumulation, recomputation and I/O back end, one or a few at a time. Of each pair of runs these must be equal: every
loss, gradient norm and validation loss in log.jsonl to the last bit, the saved weights byte for byte, and the report's
rows of what crossed each link in a step, which say whether that is exactly what was foretold. (The bytes in log.jsonl
are of a moment: what was fetched ahead counts in the step before.) A difference is told with its first place, and the
exit code is 1. Use it before and after a change that should change nothing but how the code is built.
"""
import argparse
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from serve import provenance

GPT2 = {"arch": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 32}
LLAMA = {"arch": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "max_position_embeddings": 32, "tie_word_embeddings": False}
STEPS = 7
# Where the model does not fit: about what one layer's work takes at each tier.
SMALL = {"device": "1MiB", "host": "1MiB", "nvme": True}


def cases():
    """Name -> what differs from the base; "model" replaces, "tiers" and the rest are merged."""
    def adam(**state):
        return {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}, **state}}

    clip, bf16, fp16 = {"gradient_clipping": 0.5}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
    nvme, separate = {"tiers": SMALL}, adam(overlap=False)
    all_cases = {}
    for arch, model in (("gpt2", GPT2), ("llama", LLAMA)):
        base = {"model": model}
        all_cases |= {
            f"{arch} in memory, early": base,
            f"{arch} in memory, deferred": base | clip,
            f"{arch} through NVMe, early": base | nvme,
            f"{arch} through NVMe, deferred": base | nvme | clip,
            f"{arch} through NVMe, separate": base | nvme | separate,
            f"{arch} bf16 through NVMe, deferred": base | nvme | clip | bf16,
            f"{arch} fp16 through NVMe, loss scale": base | nvme | fp16,
            f"{arch} micro-batch-major through NVMe": base | nvme | clip | {"accumulation": "micro_batch_major"},
            f"{arch} without recomputation": base | {"tiers": SMALL | {"device": "2MiB"}} | {
                "activation_checkpointing": {"recompute": False}},
            f"{arch} optimizer on the device": base | clip | {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"},
                                      "offload_optimizer": {"device": "none"}}} | {"tiers": SMALL | {"device": "16MiB"}},
        }
    base = {"model": GPT2} | nvme
    all_cases |= {
        "bf16, split master": base | bf16 | adam(state="split"),
        "bf16, moments in bf16": base | bf16 | clip | adam(state="bf16"),
        "bf16, moments in 8 bits": base | bf16 | clip | adam(state="int8"),
        "fp32, moments in 8 bits": base | adam(state="int8"),
        "SGD with momentum": base | clip | {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}},
        "Lion": base | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
        "back end threads": base | clip | {"aio": {"backend": "threads", "block_size": 4096}},
        "back end ram": base | clip | {"aio": {"backend": "ram"}},
        "no prefetch": base | clip | {"tiers": SMALL | {"prefetch_depth": 0}},
        "one micro-batch": base | {"train_batch_size": 2},
        "no checksums, small blocks": base | {"aio": {"verify": False, "block_size": 8192, "queue_depth": 3}},
        "host, no NVMe": {"model": GPT2, "tiers": {"device": "1MiB", "host": "64MiB"}} | clip,
    }
    return all_cases


def config_of(change, place):
    config = {
        "data": {"train": str(place / "text.txt"), "tokenizer": "bytes", "seq_len": 32},
        "steps": STEPS, "train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "seed": 7,
        "eval": {"every": 3, "batches": 5},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "tiers": {"device": "64MiB", "host": "64MiB"},
    }
    config.update(change)
    tiers = dict(config["tiers"])
    if tiers.pop("nvme", False):
        (place / "drive").mkdir(exist_ok=True)
        tiers["nvme"] = [{"path": str(place / "drive"), "bytes": "256MiB"}]
    return config | {"tiers": tiers, "output": {"dir": str(place / "run")}}


def run(binary, change, text):
    """What a run leaves: lines of its log without times, and hashes of its weight files."""
    with tempfile.TemporaryDirectory(prefix="zg-same-bits-") as folder:
        place = pathlib.Path(folder)
        (place / "text.txt").write_bytes(text)
        (place / "config.json").write_text(json.dumps(config_of(change, place)))
        done = subprocess.run([binary, "train", str(place / "config.json")], capture_output=True, text=True)
        if done.returncode != 0:
            return {"error": done.stderr.strip().replace(folder, "DIR")[-600:]}
        keep = ("step", "loss", "val_loss", "grad_norm", "lr", "skipped", "loss_scale", "tokens")
        lines = [json.loads(line) for line in (place / "run" / "log.jsonl").read_text().splitlines()]
        files = sorted((place / "run" / "model").glob("*.safetensors"))
        links = re.findall(r"^ +(nvme \w+|\w+ -> \w+) +(\S+ \S+) +(\S+ \S+) +(exact|\S+)", done.stdout + done.stderr, re.M)
        return {"links": {name: row for name, *row in links}, "log": [{k: line[k] for k in keep if k in line} for line in lines],
                "weights": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}}


def difference(old, new, place=""):
    """The first place where two results differ; None if they do not."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new:
                return f"{place}.{key} is in one of them only"
            if (found := difference(old[key], new[key], f"{place}.{key}")) is not None:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next((f for i, (a, b) in enumerate(zip(old, new)) if (f := difference(a, b, f"{place}[{i}]"))), None)
    # Infinities and NaN are equal to themselves here.
    return None if json.dumps(old) == json.dumps(new) else f"{place.lstrip('.')}: {json.dumps(old)} and {json.dumps(new)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a ziggurat")
    parser.add_argument("new", help="another one")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--out", help="write what was compared as JSON here")
    args = parser.parse_args()
    words = ["tier", "shard", "evict", "dirty", "pin", "step", "drive", "layer", "weight", "host"]
    text = " ".join(words[(i * i + 3 * i) % 10 + 0] + "s" * (i % 3) for i in range(4000)).encode()
    results, differ = [], 0
    for name, change in cases().items():
        if args.only not in name:
            continue
        old, new = run(args.old, change, text), run(args.new, change, text)
        found = old.get("error") or new.get("error") or difference(old, new)
        differ += found is not None
        results.append({"case": name, "difference": found, "bytes_per_step": {} if found else old["links"],
                        "last_loss": None if found else old["log"][-1]["loss"]})
        print(f"{'DIFFERS' if found else 'same':8} {name}" + (f"\n         {found}" if found else ""), flush=True)
    print(f"{len(results) - differ} of {len(results)} the same in losses, weights and bytes")
    if args.out:
        record = {"benchmark": "same_bits"} | provenance(pathlib.Path(__file__).parent) | {"cases": results}
        pathlib.Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if differ or not results else 0


if __name__ == "__main__":
    sys.exit(main())
