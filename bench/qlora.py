#!/usr/bin/env python3
"""QLoRA of a model with random weights that is larger than the memory: the codes of its layers lie on a drive.

    ninja -C build ziggurat
    bench/qlora.py --dir DIR [--size 6.7b] [--device 1GiB] [--host 1GiB] [--tokens 128] [--steps 3] [--out FILE.md]
    bench/qlora.py --dir DIR --size olmoe-6.9b      a mixture of experts; the others are Llamas
    bench/qlora.py --dir DIR --compare [--rounds 5]

The first form writes the model in NF4 to DIR (0.57 bytes a parameter; nothing else of it ever exists), trains adapters
of rank 16 beside it with little device and host memory, and tells for each step its seconds, the bytes of each link
and whether they are those of the forecast, and the bound of the report; and the most resident memory. DIR needs room
for the model twice: the run copies the codes once to its drive's file there.

With --compare the base is smaller by default, and the drive is memory with a bandwidth (aio.backend "ram", --rate), so
that the drive binds. LoRA over the same model in bf16 and QLoRA over its codes (lora.base "codes") take turns; figures
are medians of the steps behind the first of each turn, with their median absolute deviations.
"""
import argparse
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {  # layers, width, inner, heads, heads of keys and values, vocabulary
    "6.7b": (32, 4096, 11008, 32, 32, 32000),
    "13b": (40, 5120, 13824, 40, 40, 32000),
    "163m": (12, 1024, 2816, 16, 16, 4096),
    "olmoe-6.9b": (16, 2048, 1024, 16, 16, 50304),
    "tiny": (2, 64, 192, 2, 2, 320),  # for the tests
    "tiny-experts": (2, 64, 64, 2, 2, 320),
}
EXPERTS = {"olmoe-6.9b": (64, 8), "tiny-experts": (4, 2)}  # of a layer, and of a token; `inner` is of one expert
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
BLOCK = 64
PART = 1 << 24  # bytes that are written at a time


def parameters(size):
    layers, width, inner, heads, kv_heads, vocabulary = SIZES[size]
    kv = width * kv_heads // heads
    experts, _ = EXPERTS.get(size, (1, 1))
    return layers * (2 * width * width + 2 * width * kv + 3 * width * inner * experts) + 2 * vocabulary * width


def name_of(size):
    return "OLMoE" if size in EXPERTS else "Llama"


def matrices(size):
    layers, width, inner, heads, kv_heads, _ = SIZES[size]
    kv = width * kv_heads // heads
    for layer in range(layers):
        mlps = [f"mlp.experts.{e}" for e in range(EXPERTS[size][0])] if size in EXPERTS else ["mlp"]
        of_mlps = [(f"{mlp}.{name}", rows, cols) for mlp in mlps
                   for name, rows, cols in (("gate", inner, width), ("up", inner, width), ("down", width, inner))]
        for name, rows, cols in [("self_attn.q", width, width), ("self_attn.k", kv, width), ("self_attn.v", kv, width),
                                 ("self_attn.o", width, width), *of_mlps]:
            yield f"model.layers.{layer}.{name}_proj.weight", rows, cols


def tensors(size, code):
    """(name, type, shape, what its bytes are) of each tensor; code: "nf4" or "bf16"."""
    layers, width, _, _, _, vocabulary = SIZES[size]
    yield "model.embed_tokens.weight", "BF16", [vocabulary, width], "bf16"
    for name, rows, cols in matrices(size):
        if code == "bf16":
            yield name, "BF16", [rows, cols], "bf16"
            continue
        state = json.dumps({"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [rows, cols]}).encode()
        yield name, "U8", [rows * cols // 2, 1], "codes"
        yield name + ".absmax", "F32", [rows * cols // BLOCK], struct.pack("<f", 0.06)
        yield name + ".quant_map", "F32", [16], struct.pack("<16f", *NF4)
        yield name + ".quant_state.bitsandbytes__nf4", "U8", [len(state)], state
    for layer in range(layers):
        norms = ["input_layernorm", "post_attention_layernorm"]
        if size in EXPERTS:
            norms += ["self_attn.q_norm", "self_attn.k_norm"]
            yield f"model.layers.{layer}.mlp.gate.weight", "BF16", [EXPERTS[size][0], width], "bf16"
        for norm in norms:
            yield f"model.layers.{layer}.{norm}.weight", "BF16", [width], b"\x80\x3f"
    yield "model.norm.weight", "BF16", [width], b"\x80\x3f"
    yield "lm_head.weight", "BF16", [vocabulary, width], "bf16"


def write_model(directory, size, code):
    layers, width, inner, heads, kv_heads, vocabulary = SIZES[size]
    directory.mkdir(parents=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "intermediate_size": inner,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "vocab_size": vocabulary, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu"}
    if size in EXPERTS:
        experts, per_token = EXPERTS[size]
        config |= {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": experts,
                   "num_experts_per_tok": per_token}
    if code == "nf4":
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                                         "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    all_tensors = list(tensors(size, code))
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in all_tensors:
        count = 1
        for n in shape:
            count *= n
        n = count * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = random.Random(1)
    # bf16 numbers of about 0.02 with both signs: a byte of mantissa, and a byte of sign and exponent.
    signs = bytes.maketrans(bytes(range(256)), bytes([0x3c if i % 2 else 0xbc for i in range(256)]))
    random_bytes = noise.randbytes(PART)
    numbers = bytearray(PART)
    numbers[0::2], numbers[1::2] = random_bytes[: PART // 2], random_bytes[PART // 2:].translate(signs)
    content = {"codes": random_bytes, "bf16": bytes(numbers)}
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, _, _, what in all_tensors:
            begin, end = header[name]["data_offsets"]
            pattern = content[what] if isinstance(what, str) else what * max(1, 4096 // len(what))
            left = end - begin
            while left > 0:
                file.write(pattern[:left])
                left -= min(left, len(pattern))


def text_file(directory):
    path = directory / "text.txt"
    words = random.Random(2)
    path.write_text(" ".join(words.choice(["drive", "host", "device", "shard", "layer", "step", "code"]) for _ in range(20000)))
    return path


def train(args, model, settings, steps):
    """The steps of a run, and what it printed."""
    out = args.dir / "run"
    shutil.rmtree(out, ignore_errors=True)
    sets = [f"data.train={text_file(args.dir)}", "data.tokenizer=bytes", f"data.seq_len={args.tokens}", "data.validation=0",
            f"model.from={model}", "lora.rank=16", "lora.alpha=32", "bf16.enabled=true", f"steps={steps}", "train_batch_size=1",
            "train_micro_batch_size_per_gpu=1", "optimizer.type=AdamW", "optimizer.params.lr=2e-4",
            "activation_checkpointing.recompute=true", f"output.dir={out}"] + settings
    command = [f"{args.build}/ziggurat", "train", str(ROOT / "configs/tiny.json")]
    command.extend(x for s in ["model={}", "eval={}"] + sets for x in ("--set", s))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [r for r in records if "step_ms" in r], done.stdout


def large(args):
    model = args.dir / f"model-{args.size}-nf4"
    if not (model / "model.safetensors").exists():
        shutil.rmtree(model, ignore_errors=True)
        write_model(model, args.size, "nf4")
    drive = args.dir / "drive"
    drive.mkdir(exist_ok=True)
    steps, printed = train(args, model, ["lora.base=codes", f"tiers.device={args.device}", f"tiers.host={args.host}",
                                         f"tiers.nvme.0.path={drive}"], args.steps)
    lines = [f"{name_of(args.size)} of {parameters(args.size) / 1e9:.2f} billion parameters, NF4, {args.tokens} tokens a step, device "
             f"{args.device}, host {args.host}", ""]
    for s in steps:
        moved = ", ".join(f"{link} {n}" for link, n in s["bytes"].items() if n)
        lines.append(f"step {s['step']}: {s['step_ms'] / 1e3:.1f} s, bound {s['bound_ms'] / 1e3:.1f} s by {s['bound_by']}, bytes: {moved}")
    lines += [printed[printed.index("  tier "):]] if "  tier " in printed else [printed]
    report(args, lines)


def compare(args):
    models = {code: args.dir / f"model-{args.size}-{code}" for code in ("bf16", "nf4")}
    for code, model in models.items():
        if not (model / "model.safetensors").exists():
            shutil.rmtree(model, ignore_errors=True)
            write_model(model, args.size, code)
    settings = ["aio.backend=ram", f"tiers.nvme.0.path={args.dir}", "tiers.nvme.0.bytes=2GiB", f"tiers.ram.bytes_per_second={args.rate}",
                "tiers.ram.latency_seconds=1e-4", f"tiers.device={args.device}", f"tiers.host={args.host}"]
    seconds = {"bf16": [], "nf4": []}
    rates = {}
    for _ in range(args.rounds):
        for code, model in models.items():
            steps, printed = train(args, model, settings + (["lora.base=codes"] if code == "nf4" else []), args.steps)
            seconds[code] += [s["step_ms"] / 1e3 for s in steps[1:]]
            found = re.search(r"nvme read .*", printed)
            rates[code] = found.group(0) if found else ""
    lines = [f"{name_of(args.size)} of {parameters(args.size) / 1e6:.0f} million parameters, {args.tokens} tokens a step, a drive of {args.rate / 1e9:g} GB/s, "
             f"device {args.device}, host {args.host}", ""]
    for code, all_seconds in seconds.items():
        lines.append(f"{code}: {statistics.median(all_seconds):.4f} s a step (MAD {mad(all_seconds):.4f}, {len(all_seconds)} steps); "
                     f"{rates[code]}")
    lines.append(f"codes are {statistics.median(seconds['bf16']) / statistics.median(seconds['nf4']):.2f} times as fast")
    report(args, lines)


def report(args, lines):
    text = "\n".join(["```", json.dumps(provenance(ROOT)), *lines, "```"]) + "\n"
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, type=pathlib.Path, help="a directory with room for the model twice")
    parser.add_argument("--size", choices=SIZES, help="parameters (default: 6.7b; with --compare 163m)")
    parser.add_argument("--device", help="bytes of the device's memory (default: 1GiB; with --compare 80MiB)")
    parser.add_argument("--host", help="bytes of host memory (default: 1GiB; with --compare 56MiB)")
    parser.add_argument("--tokens", type=int, help="tokens of a step (default: 128; with --compare 8)")
    parser.add_argument("--steps", type=int, help="steps (default: 3; with --compare 6 a turn)")
    parser.add_argument("--compare", action="store_true", help="compare with LoRA over bf16, where the drive binds")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each with --compare (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e9, help="bytes a second of the drive with --compare (default: %(default)g)")
    parser.add_argument("--build", default=str(ROOT / "build"), help="the build folder (default: %(default)s)")
    parser.add_argument("--out", help="write the result here")
    args = parser.parse_args()
    for key, alone, compared in (("size", "6.7b", "163m"), ("device", "1GiB", "80MiB"), ("host", "1GiB", "56MiB"),
                                 ("tokens", 128, 8), ("steps", 3, 6)):
        if getattr(args, key) is None:
            setattr(args, key, compared if args.compare else alone)
    args.dir = args.dir.resolve()
    os.makedirs(args.dir, exist_ok=True)
    compare(args) if args.compare else large(args)


if __name__ == "__main__":
    main()
