#!/usr/bin/env python3
"""A mixture of experts in memory, in turns with a dense model of the size that a token passes, and with transformers.

    ninja -C build ziggurat
    bench/experts.py --dir DIR [--torch-python venv/bin/python] [--rounds 5] [--steps 4] [--out FILE.md]

The mixture is a Qwen3-MoE of 211 million parameters, of which a token passes 34 million; the dense model is a Qwen3
whose MLP is as wide as a token's experts together. All train in fp32 with AdamW, 1,024 tokens a step. transformers
(where a Python with torch and transformers is named) computes experts in each of its ways; the fastest one counts.
Figures are medians of the steps behind the first of each turn, with their median absolute deviations. --size tiny takes
models that train in milliseconds, to see that all works, not to conclude from.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from serve import mad, provenance
from qlora import text_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {  # layers, width, experts, of a token, width inside an expert, heads, tokens of a sequence, sequences
    "211m": (8, 512, 32, 4, 512, 8, 256, 4),
    "tiny": (2, 32, 4, 2, 16, 2, 16, 2),
}
# In which transformers computes experts. Its third way, batched_mm, copies the matrices of each token's experts: 13 GB
# in a layer of the larger mixture.
WAYS = ("eager", "grouped_mm")
# Trains as many steps as it is told, and prints the seconds of each.
PEER = r"""
import json, sys, time
import torch, transformers
layers, width, experts, per_token, inner, heads, time_, sequences, steps, threads, way = json.loads(sys.argv[1])
torch.set_num_threads(threads)
torch.manual_seed(1)
config = transformers.Qwen3MoeConfig(
    vocab_size=256, hidden_size=width, intermediate_size=inner * per_token, moe_intermediate_size=inner,
    num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=width // heads,
    num_experts=experts, num_experts_per_tok=per_token, norm_topk_prob=True, tie_word_embeddings=False,
    max_position_embeddings=2048, experts_implementation=way, attn_implementation="sdpa")
model = transformers.Qwen3MoeForCausalLM(config).float().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
tokens = torch.randint(256, (sequences, time_))
for _ in range(steps):
    begin = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    print(json.dumps({"s": time.perf_counter() - begin}), flush=True)
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                  "parameters": sum(p.numel() for p in model.parameters())}))
"""


def model_of(size, dense):
    layers, width, experts, per_token, inner, heads, _, _ = SIZES[size]
    model = {"arch": "qwen3" if dense else "qwen3_moe", "hidden_size": width, "intermediate_size": inner * per_token,
             "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
             "head_dim": width // heads, "vocab_size": 256, "max_position_embeddings": 2048}
    if not dense:
        model |= {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": inner,
                  "norm_topk_prob": True}
    return model


def ours(args, dense):
    """The seconds of a turn's steps behind the first, and the model's parameters."""
    *_, time, sequences = SIZES[args.size]
    out = args.dir / "run"
    shutil.rmtree(out, ignore_errors=True)
    sets = [f"model={json.dumps(model_of(args.size, dense))}", "eval={}", f"data.train={text_file(args.dir)}",
            "data.tokenizer=bytes", f"data.seq_len={time}", "data.validation=0", f"steps={args.steps}",
            f"train_batch_size={sequences}", f"train_micro_batch_size_per_gpu={sequences}", "optimizer.type=AdamW",
            "optimizer.params.lr=1e-4", "optimizer.params.weight_decay=0.1", "gradient_clipping=1",
            "activation_checkpointing.recompute=false", f"output.dir={out}"]
    command = [f"{args.build}/ziggurat", "train", str(ROOT / "configs/tiny.json")]
    command += [x for s in sets for x in ("--set", s)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [r["step_ms"] / 1e3 for r in records if "step_ms" in r][1:]


def theirs(args, way):
    """The same of transformers, and its versions; none if it cannot compute in this way."""
    settings = json.dumps([*SIZES[args.size], args.steps, len(os.sched_getaffinity(0)), way])
    done = subprocess.run([args.torch_python, "-c", PEER, settings], capture_output=True, text=True)
    if done.returncode != 0:
        cause = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        print(f"transformers cannot compute experts by {way}: {cause}", file=sys.stderr)
        return None
    *steps, last = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return [s["s"] for s in steps][1:], last


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, type=pathlib.Path, help="a directory for the runs")
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--size", choices=SIZES, default="211m", help="the models (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn, 2 or more (default: %(default)s)")
    parser.add_argument("--build", default=str(ROOT / "build"), help="the build folder (default: %(default)s)")
    parser.add_argument("--out", help="write the result here")
    args = parser.parse_args()
    args.dir = args.dir.resolve()
    args.dir.mkdir(parents=True, exist_ok=True)
    *_, time, sequences = SIZES[args.size]
    seconds, versions = {"mixture": [], "dense": []}, {}
    ways = list(WAYS) if args.torch_python else []
    for turn in range(args.rounds):
        seconds["mixture"] += ours(args, dense=False)
        seconds["dense"] += ours(args, dense=True)
        for way in list(ways):
            measured = theirs(args, way)
            if measured is None:
                ways.remove(way)
                continue
            seconds.setdefault(f"transformers, {way}", []).extend(measured[0])
            versions = measured[1]
        print(f"turn {turn + 1} of {args.rounds}", file=sys.stderr)
    lines = [f"{time * sequences} tokens a step, fp32" + (f"; {json.dumps(versions)}" if versions else ""), ""]
    for name, all_seconds in seconds.items():
        middle = statistics.median(all_seconds)
        lines.append(f"{name}: {middle:.4f} s a step (MAD {mad(all_seconds):.4f}, {len(all_seconds)} steps), "
                     f"{time * sequences / middle:.0f} tokens/s")
    mixture = statistics.median(seconds["mixture"])
    lines.append(f"the mixture takes {mixture / statistics.median(seconds['dense']):.2f} times the dense model's step")
    peers = {name: statistics.median(s) for name, s in seconds.items() if name.startswith("transformers")}
    if peers:
        best = min(peers, key=peers.get)
        lines.append(f"it is {peers[best] / mixture:.2f} times as fast as {best}, transformers' fastest")
    text = "\n".join(["```", json.dumps(provenance(ROOT)), *lines, "```"]) + "\n"
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
