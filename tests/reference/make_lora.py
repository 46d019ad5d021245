#!/usr/bin/env python3
"""Golden values for adapters beside tiny models of today's families, computed by PEFT in float64.

Writes lora/NAME.safetensors next to this script (or into --out): logits, loss,
the gradients of all A and B, and ten AdamW steps of them, as make_families.py
does it for whole models.  The adapters, too, come from the hash of their names.

    python make_lora.py [NAME ...]

Needs torch, transformers, peft and numpy; only the CPU is used.
"""

import argparse
import json
import pathlib

from make_families import backward, batches, digest, logits_of, make_model, train  # before torch is used elsewhere

import numpy as np  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from make_reference import hashed, save  # noqa: E402

ADAPTERS = {
    "llama3": dict(r=3, lora_alpha=5, target_modules="all-linear"),
    "qwen3": dict(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"]),
    "phi3": dict(r=5, lora_alpha=4, target_modules="all-linear"),
    "gemma2": dict(r=2, lora_alpha=3, target_modules=["k_proj", "o_proj", "down_proj"]),
    "olmo2": dict(r=7, lora_alpha=7, target_modules=["o_proj", "gate_proj"]),
    "gpt2": dict(r=3, lora_alpha=7, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    # Scores that are not divided by the root of a head's size, but by the layer's number.
    "gpt2_scores": dict(r=3, lora_alpha=7, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
}


def plain(name):
    """The name of an adapter's parameter as its file has it, without PEFT's prefix."""
    return name.removeprefix("base_model.model.").removeprefix("transformer.").replace(".default", "")


GPT2_SCORES = dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, activation_function="gelu_fast")


def make_gpt2(**options):
    """GPT-2 with the sizes of the other models, whose Conv1D matrices are filled as [outputs, inputs]."""
    config = transformers.GPT2Config(vocab_size=97, n_positions=40, n_embd=36, n_layer=3, n_head=4, n_inner=52,
                                     resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager", **options)
    model = transformers.GPT2LMHeadModel(config).to(torch.float64).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            u = hashed(name.removeprefix("transformer."), p.numel()) >> np.uint64(40)
            value = torch.from_numpy(0.4 * (u.astype(np.float64) * 2.0**-24 - 0.5))
            turned = ".c_" in name and p.dim() == 2
            p.copy_(value.view(p.shape[::-1]).T if turned else value.view(p.shape))
    return model, config


def make_adapted(name):
    """The model with adapters, of which the base does not change."""
    if name.startswith("gpt2"):
        model, config = make_gpt2(**GPT2_SCORES if name == "gpt2_scores" else {})
    else:
        model, config = make_model(name)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]),
                                  autocast_adapter_dtype=False).eval()
    trained = [(plain(n), p) for n, p in adapted.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for n, p in trained:
            u = torch.from_numpy((hashed(n, p.numel()) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5)
            p.data = (0.4 * u).view(p.shape)
    return adapted, config, trained


class Trained:
    """What make_families.train() needs of a model: the adapters are all that it has."""

    def __init__(self, model, trained):
        self.model, self.trained = model, trained

    def named_parameters(self):
        return self.trained

    def __call__(self, **inputs):
        return self.model(**inputs)


def make(name, out):
    model, config, trained = make_adapted(name)
    data = batches()
    values = {"logits": digest(logits_of(model, data[0][0]))}
    values["loss"] = torch.tensor([backward(model, data)])
    values |= {f"grad.{n}": digest(p.grad) for n, p in trained}
    values["adamw.loss"], values["adamw.grad_norm"] = train(Trained(model, trained), data)
    values |= {f"final.{n}": digest(p) for n, p in trained}
    print(f"{name}: {sum(p.numel() for _, p in trained)} parameters, loss {values['loss'].item():.15g}, "
          f"{values['adamw.loss'][-1]:.9f} after ten steps")
    text = json.loads(config.to_json_string(use_diff=False))
    text["architectures"] = [type(model.get_base_model()).__name__]
    adapter = model.peft_config["default"].to_dict()
    adapter["target_modules"] = sorted(adapter["target_modules"])
    adapter["peft_type"] = "LORA"
    kept = {key: adapter[key] for key in ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias",
                                          "target_modules") + ("fan_in_fan_out",) * adapter["fan_in_fan_out"]}
    save(out / f"{name}.safetensors", values, metadata={
        "config": json.dumps(text), "adapter": json.dumps(kept), "peft": peft.__version__,
        "transformers": transformers.__version__, "torch": torch.__version__,
        "made_by": "tests/reference/make_lora.py, on the CPU, float64"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(ADAPTERS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "lora")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # one order of summation
    for name in args.names:
        make(name, args.out)


if __name__ == "__main__":
    main()
