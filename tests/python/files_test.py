"""save() and load() of the optimizers: the format, damage, bounded memory, references in state_dict(). Needs torch."""
import os
import pathlib
import subprocess
import sys

from support import InFolder, need, same_bits

need("torch")

import torch  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

SIZES = [(257,), (64, 33), (1,), (300, 70), (5000,)]


def make(dtype, state, kind=zt.AdamW, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SIZES]
    options = {"lr": 1e-2, "segment_bytes": 8192, "host_bytes": "8MiB", **options}
    return params, kind([{"params": params[:2]}, {"params": params[2:], "lr": 3e-3}], state=state, **options)


def train(params, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        for i, p in enumerate(params):
            g = torch.randn(p.shape, generator=generator) * 0.1
            p.grad = None if i == 1 and step < 6 else g.to(p.dtype)  # the second has no state at first
        optimizer.step()
    optimizer.flush()


class Files(InFolder):
    def test_goes_on_bit_for_bit(self):
        for kind, options in ((zt.AdamW, {}), (zt.Lion, {}), (zt.SGD, {"momentum": 0.9}), (zt.SGD, {})):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for state in ("fp32", "split", "bf16", "int8"):
                    with self.subTest(kind=kind.__name__, dtype=dtype, state=state, **options):
                        params, optimizer = make(dtype, state, kind, **options)
                        train(params, optimizer, 0, 4)
                        manifest = optimizer.save(os.path.join(self.folder, "saved"))
                        others, other = make(dtype, state, kind, segment_bytes=16384, **options)
                        train(others, other, 20, 21)  # so that there is something to replace
                        other.param_groups[0]["lr"] = 5.0
                        other.load(manifest)
                        self.assertTrue(same_bits(params[:1] + params[2:], others[:1] + others[2:]))
                        self.assertEqual([g["lr"] for g in other.param_groups], [1e-2, 3e-3])
                        with torch.no_grad():
                            others[1].copy_(params[1])  # had no state, so it is not in the checkpoint
                        train(params, optimizer, 4, 9)
                        train(others, other, 4, 9)
                        self.assertTrue(same_bits(params, others))
                        optimizer.close(), other.close()

    def test_the_program_reads_it(self):
        program = os.environ.get("ZG_PROGRAM")
        if not program:
            self.skipTest("ZG_PROGRAM does not name the program")
        for state in ("fp32", "int8"):
            params, optimizer = make(torch.bfloat16, state)
            train(params, optimizer, 0, 3)
            path = os.path.dirname(optimizer.save(os.path.join(self.folder, state)))
            for command in (["list", os.path.dirname(path)], ["show", path, "--tensors"], ["verify", path]):
                done = subprocess.run([program, "checkpoint", *command], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
            copy = os.path.join(self.folder, state + "-copy")
            subprocess.run([program, "checkpoint", "export", path, copy], check=True, capture_output=True)
            others, other = make(torch.bfloat16, state)
            other.load(copy)
            self.assertTrue(same_bits(params[2:], others[2:]))

    def test_safetensors_reads_it(self):
        try:
            from safetensors.torch import load_file
        except ImportError:
            self.skipTest("safetensors is not installed")
        params, optimizer = make(torch.float32, "fp32")
        train(params, optimizer, 0, 3)
        manifest = optimizer.save(self.folder)
        tensors = load_file(os.path.join(os.path.dirname(manifest), "rank-00000.safetensors"))
        self.assertTrue(same_bits([params[3]], [tensors["param.3"]]))
        moment = optimizer.state_dict()["state"][3]["exp_avg_sq"]
        self.assertTrue(same_bits([moment], [tensors["param.3.exp_avg_sq"]]))

    def test_damage_changes_nothing(self):
        params, optimizer = make(torch.float32, "fp32")
        train(params, optimizer, 0, 3)
        folder = pathlib.Path(optimizer.save(self.folder)).parent
        train(params, optimizer, 3, 4)
        before, state = [p.detach().clone() for p in params], optimizer.state_dict()
        data, manifest = folder / "rank-00000.safetensors", folder / "manifest.json"
        for file, at in ((data, -1), (data, 40), (manifest, 60), (manifest, -10)):
            good = file.read_bytes()
            bad = bytearray(good)
            bad[at] ^= 1
            file.write_bytes(bad)
            with self.assertRaises(zg.UsageError, msg=f"{file.name} at {at}"):
                optimizer.load(folder)
            file.write_bytes(good[:-1])
            with self.assertRaises(zg.UsageError):
                optimizer.load(folder)
            file.write_bytes(good)
        data.rename(folder / "elsewhere")
        with self.assertRaises(zg.IoError) as caught:
            optimizer.load(folder)
        self.assertEqual(caught.exception.errno, 2)
        self.assertTrue(same_bits(before, params))
        for i, entry in optimizer.state_dict()["state"].items():
            self.assertTrue(same_bits([entry["exp_avg"]], [state["state"][i]["exp_avg"]]))

    def test_misfits_are_refused(self):
        params, optimizer = make(torch.float32, "fp32")
        train(params, optimizer, 0, 2)
        path = optimizer.save(self.folder)
        swapped = [{"params": params[3:]}, {"params": params[:3]}]  # groups of as many
        for other in (make(torch.float32, "fp32", zt.Adam)[1], make(torch.float32, "int8")[1],
                      zt.AdamW(params, host_bytes="8MiB"), zt.AdamW(swapped, host_bytes="8MiB")):  # fmt: skip
            with self.assertRaises(zg.UsageError):
                other.load(path)
        with self.assertRaises(zg.UsageError):
            optimizer.load(os.path.join(self.folder, "nothing"))
        rounded, other = make(torch.float32, "bf16", seed=3)
        train(rounded, other, 0, 2)
        with self.assertRaises(zg.UsageError):
            make(torch.float32, "bf16", seed=4)[1].load(other.save(os.path.join(self.folder, "b")))

    def test_a_save_that_fails_leaves_nothing(self):
        params, optimizer = make(torch.float32, "fp32")
        train(params, optimizer, 0, 2)
        optimizer.save(self.folder)
        before = os.listdir(self.folder)
        with self.assertRaises(zg.UsageError):
            optimizer.param_groups[0]["mine"] = object()
            optimizer.save(self.folder)
        with self.assertRaises(OSError):
            del optimizer.param_groups[0]["mine"]
            optimizer._core, core = _Failing(optimizer._core), optimizer._core
            optimizer.save(self.folder)
        optimizer._core = core
        self.assertEqual(os.listdir(self.folder), before)

    def test_state_dict_names_the_checkpoint_above_its_limit(self):
        params, optimizer = make(torch.bfloat16, "split", state_dict_limit=1000)
        train(params, optimizer, 0, 3)
        with self.assertRaises(RuntimeError) as caught:
            optimizer.state_dict()
        self.assertIn("save(", str(caught.exception))
        optimizer.save(self.folder)
        file = os.path.join(self.folder, "optimizer.pt")
        torch.save(optimizer.state_dict(), file)
        self.assertLess(os.path.getsize(file), 10_000)
        others, other = make(torch.bfloat16, "split", state_dict_limit=1000)
        with torch.no_grad():
            for p, q in zip(others, params):
                p.copy_(q)
        other.load_state_dict(torch.load(file, weights_only=True))
        train(params, optimizer, 3, 5)
        train(others, other, 3, 5)
        self.assertTrue(same_bits(params, others))
        with self.assertRaises(RuntimeError):  # it has changed since it was saved
            optimizer.state_dict()

    def test_memory_is_bounded(self):
        """Peak memory grows by segments, not by the state: 1 GiB is saved and loaded."""
        code = (
            "import os, resource, sys, torch, ziggurat.torch as zt\n"
            "p = torch.nn.Parameter(torch.full((1 << 26,), 0.5, dtype=torch.bfloat16))\n"
            "o = zt.AdamW([p], drives={sys.argv[1]: '1GiB'}, host_bytes='64MiB', segment_bytes='4MiB')\n"
            "p.grad = torch.full_like(p, 1e-3); o.step(); p.grad = None\n"
            "def now(key):\n"
            "    line = next(l for l in open('/proc/self/status') if l.startswith(key))\n"
            "    return int(line.split()[1]) << 10\n"
            "open('/proc/self/clear_refs', 'w').write('5'); before = now('VmRSS')\n"
            "o.load(o.save(sys.argv[1] + '/saved'))\n"
            "print(now('VmHWM') - before, o.state_bytes())\n"
        )
        done = subprocess.run([sys.executable, "-c", code, self.folder], capture_output=True, text=True, check=True)
        grown, state = map(int, done.stdout.split())
        self.assertGreater(state, 700 << 20)
        self.assertLess(grown, 100 << 20)


class _Failing:
    """The optimizer's core, whose reads fail as they do when a drive does."""

    def __init__(self, core):
        self._core = core

    def __getattr__(self, name):
        if name in ("read", "copy_codes"):
            raise OSError(5, "Input/output error")
        return getattr(self._core, name)


if __name__ == "__main__":
    import unittest

    unittest.main()
