#!/usr/bin/env python3
"""A plain PyTorch loop whose optimizer state lies in host memory and, beyond that, on a drive. It stops half-way,
saves, and goes on in a new model and optimizer as if it had not stopped.

    python train_torch.py [--steps 40] [--width 256] [--nvme DIRECTORY]
"""
import argparse
import os
import tempfile

import torch

import ziggurat.torch as zt


def make(width, nvme):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Linear(width, width),
                                torch.nn.GELU(), torch.nn.Linear(width, 1))  # fmt: skip
    place = {"host_bytes": "1MiB", "drives": {nvme: "64MiB"}} if nvme else {}
    return model, zt.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, segment_bytes="256KiB", **place)


def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x)[:, 0] - x.square().mean(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {optimizer.grad_norm:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of the run (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of the model (default: %(default)s)")
    parser.add_argument("--nvme", help="a directory on a drive")
    a = parser.parse_args()
    model, optimizer = make(a.width, a.nvme)
    train(model, optimizer, 0, a.steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        optimizer.close()
        saved = torch.load(path, weights_only=True)
    model, optimizer = make(a.width, a.nvme)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, a.steps // 2, a.steps)
    print(f"{optimizer.state_bytes() / 2**20:.1f} MiB of state")
    optimizer.close()


if __name__ == "__main__":
    main()
