#!/usr/bin/env python3
"""Golden values of optimizer steps, in float64: torch's Adam, AdamW and SGD, and Lion as its paper has it.

Writes optimizers.txt next to this script (or into --out): a line for each variant, its name and the parameters
after STEPS steps, as hexadecimal floats. Parameters and gradients are exact fractions:

    w[i] = ((37 i + 11) % 64 - 31) / 32        g[t][i] = ((29 i + 101 t) % 97 - 48) / 64,  t from 1

Needs torch; only the CPU is used.
"""

import argparse
import pathlib

import torch

COUNT, STEPS = 7, 12
LR, DECAY = 0.01, 0.1


def start():
    return torch.tensor([((37 * i + 11) % 64 - 31) / 32 for i in range(COUNT)], dtype=torch.float64)


def gradient(t):
    return torch.tensor([((29 * i + 101 * t) % 97 - 48) / 64 for i in range(COUNT)], dtype=torch.float64)


def run(make):
    w = start().requires_grad_()
    optimizer = make([w])
    for t in range(1, STEPS + 1):
        w.grad = gradient(t)
        optimizer.step()
    return w.detach()


def lion(beta1=0.9, beta2=0.99):
    """Algorithm 2 of Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""
    w, m = start(), torch.zeros(COUNT, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        g = gradient(t)
        c = beta1 * m + (1 - beta1) * g
        w = w - LR * (torch.sign(c) + DECAY * w)
        m = beta2 * m + (1 - beta2) * g
    return w


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    out = parser.parse_args().out
    optim, common = torch.optim, dict(lr=LR, weight_decay=DECAY)
    values = {
        "adamw": run(lambda p: optim.AdamW(p, betas=(0.9, 0.95), eps=1e-8, **common)),
        "adam": run(lambda p: optim.Adam(p, betas=(0.9, 0.95), eps=1e-8, **common)),
        "sgd": run(lambda p: optim.SGD(p, **common)),
        "sgd_momentum": run(lambda p: optim.SGD(p, momentum=0.9, **common)),
        "sgd_dampening": run(lambda p: optim.SGD(p, momentum=0.9, dampening=0.3, **common)),
        "sgd_nesterov": run(lambda p: optim.SGD(p, momentum=0.9, nesterov=True, **common)),
        "lion": lion(),
    }
    with open(out / "optimizers.txt", "w", encoding="utf-8") as file:
        for name, w in values.items():
            print(name, *(x.hex() for x in w.tolist()), file=file)


if __name__ == "__main__":
    main()
