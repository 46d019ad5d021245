#!/usr/bin/env python3
"""Our generation beside transformers' on the same model: tokens a second with kept keys and values, in turns.

    ninja -C build ziggurat
    bench/generate.py --model DIR [--make] [--prompt 64] [--tokens 128] [--rounds 5] [--build build] [--out FILE.json]

For a Python that has torch and transformers. DIR is a Hugging Face directory; with --make it is a Llama of random
weights with 134 million parameters, which is written there first. Both compute in fp32 on all processors, take the most
likely token, and must make the same tokens. A turn is the time of 16 + TOKENS tokens less that of 16 after the same
prompt, so that loading, and the pass over the prompt, do not count. Figures are medians of the rounds, with their
median absolute deviations.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
FEW = 16  # tokens of the shorter of two runs
PEER = """
import json, sys, time, torch, transformers
torch.set_num_threads(int(sys.argv[2]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                  "parameters": sum(p.numel() for p in model.parameters())}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = torch.tensor([asked["prompt"]])
    begin = time.perf_counter()
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["tokens"],
                              min_new_tokens=asked["tokens"], do_sample=False, use_cache=True)
    print(json.dumps({"seconds": time.perf_counter() - begin, "ids": made[0, ids.shape[1]:].tolist()}), flush=True)
"""


def make_model(directory):
    import torch
    import transformers
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                      num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=2048,
                                      initializer_range=0.08, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def ours(args, prompt, tokens):
    begin = time.perf_counter()
    done = subprocess.run([f"{args.build}/ziggurat", "generate", "--model", args.model, "--prompt-ids",
                           ",".join(map(str, prompt)), "--tokens", str(tokens), "--greedy", "--ids", "--past-the-end"],
                          check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    return seconds, [int(x) for x in done.stdout.replace(",", " ").split()][-tokens:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--make", action="store_true", help="write a Llama with random weights to --model first")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: %(default)s)")
    parser.add_argument("--build", default=str(ROOT / "build"), help="the build folder (default: %(default)s)")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    if args.make:
        make_model(args.model)
    vocabulary = json.loads((pathlib.Path(args.model) / "config.json").read_text())["vocab_size"]
    prompt = [(7919 * i + 13) % vocabulary for i in range(args.prompt)]
    threads = len(os.sched_getaffinity(0))
    peer = subprocess.Popen([sys.executable, "-c", PEER, args.model, str(threads)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    versions = json.loads(peer.stdout.readline() or sys.exit("transformers cannot load the model"))

    def theirs(tokens):
        peer.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        peer.stdin.flush()
        answer = json.loads(peer.stdout.readline())
        return answer["seconds"], answer["ids"]

    speed, made = {"ziggurat": [], "transformers": []}, {}
    for turn in range(args.rounds + 1):  # the first turn is to warm up
        runs = [("ziggurat", lambda n: ours(args, prompt, n)), ("transformers", theirs)]
        for who, run in runs if turn % 2 == 0 else reversed(runs):
            few, _ = run(FEW)
            many, made[who] = run(FEW + args.tokens)
            if many <= few:
                sys.exit(f"{args.tokens} tokens more took {who} no longer: the model is too small, or the machine is busy")
            if turn > 0:
                speed[who].append(args.tokens / (many - few))
    peer.stdin.close()
    peer.wait()
    same = next((i for i, (a, b) in enumerate(zip(*made.values())) if a != b), FEW + args.tokens)
    if same < FEW:
        sys.exit(f"the tokens differ from number {same} on: {made}")
    middle = {who: statistics.median(values) for who, values in speed.items()}
    result = {"model": pathlib.Path(args.model).name, **versions, "threads": threads, "prompt": args.prompt,
              "tokens": args.tokens, "rounds": args.rounds, "same_tokens": same, "tokens_per_second": middle,
              "mad": {who: mad(values) for who, values in speed.items()},
              "ratio": middle["ziggurat"] / middle["transformers"]}
    print(f"{result['model']}, {versions['parameters'] / 1e6:.0f} million parameters: ziggurat {middle['ziggurat']:.1f} tokens/s, "
          f"transformers {versions['transformers']} {middle['transformers']:.1f}, ratio {result['ratio']:.2f}; the first {same} "
          "tokens are the same")
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(provenance(ROOT) | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
