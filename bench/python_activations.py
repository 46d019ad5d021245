#!/usr/bin/env python3
"""A training step of GPT-2 124M in PyTorch, with what autograd saves in a ziggurat.Store and without, and with torch's
save_on_cpu beside it: gradients, peak memory, time.

    python bench/python_activations.py [--batch 2] [--length 512] [--host 256MiB] --nvme DIR

Needs the package (docs/python.md), torch and transformers. Each way runs in a process of its own, in turns. The peak is
what was resident at most from the second step on, above what was resident when the model and its gradients had been
made: memory that the allocator keeps from one step to the next counts. On a CPU save_on_cpu has nothing to move.
"""
import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

WAYS = ["plain", "save_on_cpu", "offloaded"]


def field(name):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(name + ":"))


def measure(way, a):
    import torch
    import transformers

    import ziggurat as zg
    import ziggurat.torch as zt

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=a.layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, config.vocab_size, (a.batch, a.length))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = field("VmRSS")
    store = zg.Store(host_bytes=a.host, drives={a.nvme: "16GiB"}) if way == "offloaded" else None
    times, held = [], 0
    for step in range(a.steps + 1):
        model.zero_grad(set_to_none=False)
        if step == 1:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # the peak begins anew
        begin = time.perf_counter()
        if way == "plain":
            loss = model(input_ids=ids, labels=ids).loss
        elif way == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                loss = model(input_ids=ids, labels=ids).loss
        else:
            with zt.offload_activations(store):
                loss = model(input_ids=ids, labels=ids).loss
            held = sum(store[name].nbytes for name in store)
        loss.backward()
        times.append(time.perf_counter() - begin)
        del loss
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.grad.numpy())
    links = store.statistics().links if store else None
    print(json.dumps({
        "seconds": statistics.median(times[1:]), "peak": field("VmHWM") - before, "gradients": digest.hexdigest()[:16],
        "offloaded": held, "read": links.nvme_read.bytes // (a.steps + 1) if links else 0,
    }))  # fmt: skip
    if store:
        store.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each way (default: %(default)s)")
    parser.add_argument("--host", default="256MiB", help="host memory of the store")
    parser.add_argument("--nvme", required=True, help="a directory on a drive")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.way:
        return measure(a.way, a)
    found = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory(dir=a.nvme) as folder:
            command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--way", way, "--nvme", folder]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{way}: {done.stderr}")
        found[way] = r = json.loads(done.stdout.splitlines()[-1])
        print(f"{way:12} {r['seconds'] * 1e3:9.0f} ms  {r['peak'] / 2**20:8.0f} MiB above the model, "
              f"{r['offloaded'] / 2**20:6.0f} MiB offloaded, {r['read'] / 2**20:6.0f} MiB read a step, "
              f"gradients {r['gradients']}")  # fmt: skip
    same = len({r["gradients"] for r in found.values()}) == 1
    print("all gradients have the same bits" if same else "THE GRADIENTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
