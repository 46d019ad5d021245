#!/usr/bin/env python3
"""Our tokenizers beside Hugging Face's `tokenizers` (PyPI): MB/s on the same text, in turns.

    ninja -C build bench_tokenise
    bench/tokenise.py --text book.txt --tokenizer FOLDER... [--rounds 5] [--seconds 2] [--threads 1,2]
                      [--out FILE.json]

For a Python that has `tokenizers`. FOLDER holds a tokenizer.json. Both encode pieces of about 1 MB that end behind a
line: Hugging Face's by encode_batch, whose threads RAYON_NUM_THREADS sets, ours by bench_tokenise --threads. The
tokens of both are counted, and must be equally many. Figures are medians of the rounds.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from serve import provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
text = open(sys.argv[2], encoding="utf-8", newline="").read()
pieces, at = [], 0
while at < len(text):
    line = text.find("\\n", min(at + (1 << 20), len(text)))
    end = len(text) if line < 0 else line + 1
    pieces.append(text[at:end])
    at = end
size, rounds, begin = len(text.encode()), 0, time.perf_counter()
while (passed := time.perf_counter() - begin) < float(sys.argv[3]):
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(pieces, add_special_tokens=False))
    rounds += 1
passed = time.perf_counter() - begin
print(json.dumps({"tokens": tokens, "rounds": rounds, "mb_per_second": size * rounds / passed / 1e6}))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text file to encode")
    parser.add_argument("--tokenizer", required=True, nargs="+", help="folders that hold a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2, help="seconds that a turn measures (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument("--build", default=str(ROOT / "build"), help="the build folder (default: %(default)s)")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    results = []
    for folder in args.tokenizer:
        for threads in (int(n) for n in args.threads.split(",")):
            ours_command = [f"{args.build}/bench/bench_tokenise", "--tokenizer", folder, "--text", args.text, "--seconds",
                            str(args.seconds), "--threads", str(threads)]
            peer_command = [sys.executable, "-c", PEER, folder, args.text, str(args.seconds)]
            found = {"ours": [], "tokenizers": []}
            for turn in range(args.rounds):
                pair = [("ours", ours_command), ("tokenizers", peer_command)]
                for who, command in pair if turn % 2 == 0 else reversed(pair):
                    env = dict(os.environ, RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true")
                    found[who].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout))
            counts = {who: runs[0]["tokens"] for who, runs in found.items()}
            if counts["ours"] != counts["tokenizers"]:
                sys.exit(f"{folder}: {counts} tokens, which must be as many")
            speed = {who: statistics.median(run["mb_per_second"] for run in runs) for who, runs in found.items()}
            results.append({"tokenizer": pathlib.Path(folder).name, "threads": threads, "tokens": counts, "mb_per_second": speed,
                            "ratio": speed["ours"] / speed["tokenizers"]})
            print(f"{results[-1]['tokenizer']:16} threads {threads}: ours {speed['ours']:7.2f} MB/s, tokenizers "
                  f"{speed['tokenizers']:7.2f} MB/s, ratio {results[-1]['ratio']:.2f}, tokens {counts['ours']} and "
                  f"{counts['tokenizers']}", flush=True)
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(provenance(ROOT) | {"text_bytes": os.path.getsize(args.text), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
