"""The optimizers for torch beside `ziggurat train`: the same weights from the same gradients. Needs torch."""
import json
import os
import pathlib
import struct
import subprocess
import sys

from support import InFolder, need

need("torch", "ziggurat._train")

import torch  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

STEPS = 4


def tensors_of(checkpoint):
    """All tensors of a checkpoint of one rank, flat."""
    with open(pathlib.Path(checkpoint) / "rank-00000.safetensors", "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        table = json.loads(f.read(length))
        data = bytearray(f.read())
    del table["__metadata__"]
    return {name: torch.frombuffer(data, dtype=torch.float32, offset=entry["data_offsets"][0],
                                   count=(entry["data_offsets"][1] - entry["data_offsets"][0]) // 4).clone()
            for name, entry in table.items()}  # fmt: skip


class BesideTheTrainer(InFolder):
    def checkpoints(self, precision):
        """Checkpoints of a run after each of its steps, and its learning rates. Without a first moment's memory
        (beta1 is 0) the moment is the gradient of the step, as the update has seen it."""
        text = os.path.join(self.folder, "text.txt")
        with open(text, "w") as f:
            f.write("In the beginning God created the heaven and the earth. " * 200)
        out = os.path.join(self.folder, precision)
        result = zg.train({
            "model": {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32},
            "data": {"train": text, "tokenizer": "bytes", "seq_len": 32}, "gradient_clipping": 0,
            "train_batch_size": 4, "steps": STEPS, "devices": "host", "tiers": {"device": "16MiB", "host": "16MiB"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.0, 0.95], "weight_decay": 0.0}},
            "checkpoint": {"every": 1, "keep": STEPS}, "output": {"dir": out},
            "bf16": {"enabled": precision == "bf16"},
        })  # fmt: skip
        folders = sorted(os.listdir(os.path.join(out, "checkpoints")))
        self.assertEqual(len(folders), STEPS)
        return [tensors_of(os.path.join(out, "checkpoints", f)) for f in folders], result.log["lr"]

    def test_the_same_weights_from_the_same_gradients(self):
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            saved, rates = self.checkpoints(precision)
            names = [n for n in saved[0] if not n.endswith((".exp_avg", ".exp_avg_sq"))]
            self.assertGreater(len(names), 20)
            for options in ({}, {"overlap": "forward"}, {"overlap": "backward"}, {"nvme": True}):
                options = dict(options)
                if options.pop("nvme", False):
                    options.update(drives={self.folder: "64MiB"}, host_bytes="256KiB")
                params = [torch.nn.Parameter(saved[0][n].clone().to(dtype)) for n in names]
                optimizer = zt.AdamW(params, betas=(0.0, 0.95), weight_decay=0.0, segment_bytes="64KiB",
                                     **{"host_bytes": "64MiB", **options})  # fmt: skip
                with self.subTest(precision, **options):
                    self.continue_from(saved, rates, names, params, optimizer)
                optimizer.close()

    def continue_from(self, saved, rates, names, params, optimizer):
        state = {}
        for i, n in enumerate(names):
            state[i] = {"step": torch.tensor(1.0), "exp_avg": saved[0][n + ".exp_avg"],
                        "exp_avg_sq": saved[0][n + ".exp_avg_sq"], "master": saved[0][n]}  # fmt: skip
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for step in range(1, STEPS):
            optimizer.param_groups[0]["lr"] = rates[step]
            if optimizer._overlap == "backward":  # a loss with this gradient
                sum((p.float() * saved[step][n + ".exp_avg"]).sum() for p, n in zip(params, names)).backward()
            else:
                for p, n in zip(params, names):
                    gradient = saved[step][n + ".exp_avg"]
                    p.grad = gradient.to(p.dtype)
            optimizer.step()
            optimizer.zero_grad()
            found = optimizer.state_dict()["state"]
            for i, (p, n) in enumerate(zip(params, names)):
                master = found[i].get("master", p.detach())
                self.assertTrue(torch.equal(master.view(-1), saved[step][n]), (n, step))
                self.assertTrue(torch.equal(found[i]["exp_avg_sq"].view(-1), saved[step][n + ".exp_avg_sq"]), (n, step))


class Threads(InFolder):
    def test_any_number_of_threads_gives_the_same_bits(self):
        code = (
            "import os, sys, hashlib\n"
            "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])\n"
            "import torch, ziggurat.torch as zt\n"
            "g = torch.Generator().manual_seed(0)\n"
            "p = torch.nn.Parameter(torch.randn(300_001, generator=g).bfloat16())\n"
            "o = zt.AdamW([p], state=sys.argv[2], host_bytes='16MiB', max_grad_norm=1.0)\n"
            "for _ in range(3): p.grad = torch.randn(300_001, generator=g).bfloat16(); o.step()\n"
            "print(hashlib.sha256(bytes(p.detach().view(torch.uint8).tolist())).hexdigest(), o.grad_norm)\n"
        )
        for state in ("fp32", "int8"):
            said = {subprocess.run([sys.executable, "-c", code, threads, state], capture_output=True, text=True,
                                   check=True).stdout for threads in ("1", "2")}  # fmt: skip
            self.assertEqual(len(said), 1, said)


if __name__ == "__main__":
    import unittest

    unittest.main()
