#!/usr/bin/env python3
"""Training steps of GPT-2 124M in plain PyTorch, and of the same model in zt.offload(): resident, with a budget of host
memory, and with most of it on a drive, in turns.

    bench/offload.py --dir DIR [--rounds 5] [--steps 4] [--size 124m] [--out FILE.md]

Needs the package (docs/python.md), torch and transformers. Weights are random; the optimizer is zt.AdamW in all ways
but the first, which has torch's. A step is a forward and a backward pass, the optimizer's step and zero_grad(). Each
way runs in a process of its own, a turn of each in every round. The first two steps of a turn make the state and learn
the order; figures are medians of the others with their median absolute deviations. Ratios compare the medians of a
round, with the least and the largest. Processor time is the time of all threads, which other programs do not lengthen
as they do a step. Bytes come from the store's counters, for a step. The peak is the largest resident memory from the
third step on. All ways with zt's optimizer must end with the same bits, or nothing is told. --size tiny is a model
that trains in milliseconds, to see that all works, not to conclude from.
"""
import argparse
import hashlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from serve import mad, provenance

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {  # layers, width, heads, words, tokens of a sequence, sequences
    "124m": (12, 768, 12, 50257, 256, 1),
    "tiny": (2, 32, 2, 96, 16, 2),
}
# The largest parameter has its gradient and a part of its state beside it: the budgets have room for that.
WAYS = {  # name -> share of parameters, gradients and state that host memory holds; None: not offloaded
    "plain, torch's AdamW": None,
    "plain, zt.AdamW": None,
    "offload, resident": 1.2,
    "offload, half in memory": 0.5,
    "offload, quarter in memory": 0.25,
}


def field(name):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(name + ":"))


def measure(way, a):
    import torch
    import transformers

    import ziggurat.torch as zt

    if a.threads:
        torch.set_num_threads(a.threads)
    layers, width, heads, words, length, batch = SIZES[a.size]
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, words, (batch, length))
    params, off = sum(p.nbytes for p in model.parameters()), None
    if WAYS[way] is None:
        make = torch.optim.AdamW if "torch" in way else zt.AdamW
        options = {"fused": True} if "torch" in way else {"host_bytes": 8 * params}
    else:
        off = zt.offload(model, host_bytes=int(4 * params * WAYS[way]), drives={a.dir: 8 * params},
                         min_bytes=a.min_bytes)  # fmt: skip
        make, options = zt.AdamW, {"store": off.store}
    optimizer = make(model.parameters(), lr=1e-4, **options)
    times, busy = [], []
    for step in range(a.steps + 2):
        if step == 2:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # the peak begins anew
            before = off.statistics().store.links if off else None
        begin, begin_busy = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told = loss.item()
        del loss
        times.append(time.perf_counter() - begin)
        busy.append(time.process_time() - begin_busy)
    out = {"seconds": times[2:], "busy": busy[2:], "peak": field("VmHWM"), "loss": told}
    if off:
        after = off.statistics().store
        out |= {"read": (after.links.nvme_read.bytes - before.nvme_read.bytes) / a.steps,
                "written": (after.links.nvme_write.bytes - before.nvme_write.bytes) / a.steps,
                "host": after.tiers.host.peak, "budget": after.tiers.host.budget}  # fmt: skip
    digest = hashlib.sha256()
    with torch.no_grad():
        for p in model.parameters():
            digest.update(p.detach().numpy())
    out["weights"] = digest.hexdigest()[:16]
    if hasattr(optimizer, "close"):
        optimizer.close()
    if off:
        off.close()
    print(json.dumps(out | {"torch": torch.__version__, "transformers": transformers.__version__}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on a drive")
    parser.add_argument("--size", choices=SIZES, default="124m", help="the model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: as it takes by itself")
    parser.add_argument("--min-bytes", type=int, default=128 << 10, help="of zt.offload() (default: %(default)s)")
    parser.add_argument("--out", help="write the result here")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.way:
        return measure(a.way, a)
    runs = {way: [] for way in WAYS}
    for _ in range(a.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=a.dir) as folder:
                command = [sys.executable, __file__, "--way", way, "--dir", folder, "--size", a.size, "--steps", str(a.steps),
                           "--threads", str(a.threads), "--min-bytes", str(a.min_bytes)]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{way}: ended with {done.returncode}:\n{done.stderr[-3000:]}")
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
    ours = {r["weights"] for way, all_of_it in runs.items() if "torch's" not in way for r in all_of_it}
    if len(ours) != 1:
        sys.exit(f"the ways do not end with the same weights: {ours}")

    def beside_plain(key):
        """Ratios of the median step to plain PyTorch's in the same round."""
        plain = [statistics.median(r[key]) for r in runs["plain, torch's AdamW"]]
        ratios = [statistics.median(r[key]) / p for r, p in zip(all_of_it, plain)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"

    rows = ["| way | a step | of plain PyTorch's | processor time of plain PyTorch's | host memory of the store | "
            "read, written a step | peak resident |", "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for way, all_of_it in runs.items():
        seconds, last = [s for r in all_of_it for s in r["seconds"]], all_of_it[-1]
        tiers = f"{last['host'] / 2**20:,.0f} of {last['budget'] / 2**20:,.0f} MiB" if "host" in last else ""
        moved = f"{last['read'] / 2**20:,.0f}, {last['written'] / 2**20:,.0f} MiB" if "host" in last else ""
        rows.append(f"| {way} | {statistics.median(seconds) * 1e3:,.1f} ms ({mad(seconds) * 1e3:,.1f}) | "
                    f"{beside_plain('seconds')} | {beside_plain('busy')} | {tiers} | {moved} | "
                    f"{max(r['peak'] for r in all_of_it) / 2**20:,.0f} MiB |")  # fmt: skip
    print("\n".join(rows))
    if a.out:
        told, last = provenance(ROOT), runs["plain, zt.AdamW"][-1]
        *_, length, batch = SIZES[a.size]
        head = (f"# Models in zt.offload() beside plain PyTorch\n\n{told['cpu']}, {told['cores']} cores, {told['date']}, commit "
                f"{told['commit']}, PyTorch {last['torch']}, transformers {last['transformers']}.\n\n"
                f"    bench/offload.py --dir DIR --size {a.size} --rounds {a.rounds} --steps {a.steps}"
                f"{f' --threads {a.threads}' if a.threads else ''}\n\n"
                f"A step has {batch} sequence(s) of {length} tokens, in fp32.\n\n")  # fmt: skip
        pathlib.Path(a.out).write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
