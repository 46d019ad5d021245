#!/usr/bin/env python3
"""Runs tools/checkpoint_doors.py on checkpoints of a real run, beside PyTorch's and DeepSpeed's own readers.

    checkpoint_doors_test.py PROGRAM

Exit code 0: all agrees; 1: something differs; 77: there is no PyTorch. ZG_TEST_TORCH_PYTHON names a Python that has it.
DeepSpeed's reader takes part where it is installed.
"""
import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

DOORS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "checkpoint_doors.py"
SHARED = {"data": {"train": "text.txt", "tokenizer": "bytes", "seq_len": 16}, "steps": 2, "train_batch_size": 4,
          "train_micro_batch_size_per_gpu": 2, "checkpoint": {"every": 1, "keep": 9},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
MODELS = {
    "gpt2": {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32},
    "llama": {"arch": "llama", "vocab_size": 256, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 44, "max_position_embeddings": 32,
              "tie_word_embeddings": False}}


def run(here, *words, code=0):
    done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def tensors_of(path):
    """A safetensors file's, by name, as bytes and shape."""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__")
    return {name: (entry["shape"], data[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]])
            for name, entry in header.items()}


def same_as_deepspeed_reads(torch, zero, model, prefix):
    """DeepSpeed's own loader takes the files for a parameter of one rank."""
    from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
    for name, (shape, data) in model.items():
        wanted = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)

        class Mapping:
            fragment = torch.zeros(wanted.numel())
            lp_fragment_address = type("Address", (), {"start": 0, "numel": wanted.numel()})

            def get_hp_fragment(self):
                return self.fragment
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter._hp_mapping = Mapping()
        folder = zero / (name if name == "lm_head.weight" else prefix + name)
        step = load_hp_checkpoint_state(parameter, str(folder), 0, 1)
        assert torch.equal(parameter._hp_mapping.fragment, wanted.flatten()), name
        assert float(step) == 2, step
        assert set(parameter._hp_mapping.optim_fragment) == {"exp_avg", "exp_avg_sq"}, name


def check(here, program, arch):
    import torch
    from torch.distributed import checkpoint as dcp
    (here / "config.json").write_text(json.dumps({**SHARED, "model": MODELS[arch], "output": {"dir": arch}}))
    # The checkpoint has boxes of matrices, and rows of two ranks.
    parts = ["--devices", "host:2", "--set", "parallel.tensor=2"]
    run(here, program, "train", "config.json", *parts)
    checkpoint = f"{arch}/checkpoints/0002-step-2"
    run(here, program, "checkpoint", "export", checkpoint, f"{arch}-model", "--model")
    model = tensors_of(here / f"{arch}-model" / "model.safetensors")
    prefix = "transformer." if arch == "gpt2" else ""
    doors = [sys.executable, str(DOORS)]
    for form in ("dcp", "universal"):
        run(here, *doors, f"to-{form}", checkpoint, f"{arch}-{form}")
        run(here, *doors, f"from-{form}", f"{arch}-{form}", f"{arch}-{form}.safetensors", "--like", checkpoint)
    assert (here / f"{arch}-dcp.safetensors").read_bytes() == (here / f"{arch}-universal.safetensors").read_bytes()
    # PyTorch's reader finds the weights of the Hugging Face directory, and moments of their shapes.
    there = dcp.FileSystemReader(here / f"{arch}-dcp").read_metadata().state_dict_metadata
    for name, (shape, data) in model.items():
        theirs = name if name == "lm_head.weight" else prefix + name
        state = {"model": {theirs: torch.empty(shape)}}
        dcp.load(state, checkpoint_id=here / f"{arch}-dcp", no_dist=True)
        assert state["model"][theirs].numpy().tobytes() == data, name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert list(there[f"optim.state.{theirs}.{moment}"].size) == shape, name
    if importlib.util.find_spec("deepspeed"):
        same_as_deepspeed_reads(torch, here / f"{arch}-universal" / "zero", model, prefix)
    # Back again: a run goes on from the imported checkpoint to the same bits as from the first.
    run(here, program, "checkpoint", "import", f"{arch}-dcp.safetensors", f"{arch}-back", "--like", checkpoint,
        "--step", "2")
    run(here, program, "checkpoint", "verify", f"{arch}-back")
    models = []
    for source in (checkpoint, f"{arch}-back"):
        run(here, program, "train", "config.json", *parts, "--set", "steps=4", "--set", "output.dir=on",
            "--resume", source)
        models.append((here / "on/model/model.safetensors").read_bytes())
        subprocess.run(["rm", "-r", str(here / "on")], check=True)
    assert models[0] == models[1]
    # Mistakes are told in one line.
    text = run(here, *doors, "from-universal", f"{arch}-universal", "x", "--like", checkpoint, "--prefix", "no.",
               code=2)
    assert "--prefix" in text and len(text.splitlines()) == 1, text
    text = run(here, *doors, "to-dcp", arch, "x", code=2)
    assert "manifest.json" in text and len(text.splitlines()) == 1, text
    # As if of a run that trains adapters.
    manifest = json.loads((here / checkpoint / "manifest.json").read_text())
    manifest["bits"]["lora"] = "rank 4"
    (here / f"{arch}-adapted").mkdir()
    (here / f"{arch}-adapted/manifest.json").write_text(json.dumps(manifest))
    text = run(here, *doors, "to-dcp", f"{arch}-adapted", "x", code=2)
    assert "adapters" in text and len(text.splitlines()) == 1, text
    text = run(here, program, "checkpoint", "import", f"{arch}-model/model.safetensors", "x", "--like", checkpoint,
               "--step", "2", code=2)
    assert "has no tensor" in text, text


def main():
    python = os.environ.get("ZG_TEST_TORCH_PYTHON")
    if python and pathlib.Path(python) != pathlib.Path(sys.executable):
        os.execv(python, [python, *sys.argv])
    if not importlib.util.find_spec("torch"):
        print("skipped: there is no PyTorch (ZG_TEST_TORCH_PYTHON names a Python that has it)")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        (here / "text.txt").write_text("all work and no play makes jack a dull boy, " * 300)
        for arch in MODELS:
            check(here, os.path.abspath(sys.argv[1]), arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
