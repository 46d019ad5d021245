#!/usr/bin/env python3
"""Golden values for adapters beside tiny models of today's families, computed by PEFT in float64.

Writes lora/NAME.safetensors next to this script (or into --out): logits, loss,
the gradients of all A and B, and ten AdamW steps of them, as make_families.py
does it for whole models.  The adapters, too, come from the hash of their names.

transformers has the experts of a layer in two parameters, to which PEFT applies adapters by "target_parameters"
(NAME_parameters); of these the files have what PEFT saves, too.  Adapters of the experts' own matrices, as our
files name them, are applied here by hand: y = W x + factor * B A x.  Names of both are those of our parameters.

    python make_lora.py [NAME ...]

Needs torch, transformers, peft and numpy; only the CPU is used.
"""

import argparse
import json
import math
import pathlib
import tempfile

from make_families import (EXPERTS, FAMILIES, backward, batches, digest, logits_of, make_model,
                           train)  # before torch is used elsewhere

import numpy as np  # noqa: E402
import peft  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from make_reference import hashed, save  # noqa: E402

ADAPTERS = {
    "llama3": dict(r=3, lora_alpha=5, target_modules="all-linear"),
    "qwen3": dict(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"]),
    "phi3": dict(r=5, lora_alpha=4, target_modules="all-linear"),
    "gemma2": dict(r=2, lora_alpha=3, target_modules=["k_proj", "o_proj", "down_proj"]),
    "olmo2": dict(r=7, lora_alpha=7, target_modules=["o_proj", "gate_proj"]),
    # Of these PEFT adapts no MLP that is dense.
    "deepseek_v2": dict(r=2, lora_alpha=5, target_modules=["q_proj", "kv_a_proj_with_mqa", "o_proj"]),
    "deepseek_v3": dict(r=3, lora_alpha=4, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
                                                           "o_proj"]),
    "gpt2": dict(r=3, lora_alpha=7, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    # Scores that are not divided by the root of a head's size, but by the layer's number.
    "gpt2_scores": dict(r=3, lora_alpha=7, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    "mixtral": dict(r=3, lora_alpha=5, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "qwen2_moe": dict(r=2, lora_alpha=3, use_rslora=True,
                      target_modules=["v_proj", "gate_proj", "up_proj", "down_proj"]),
    "mixtral_parameters": dict(r=2, lora_alpha=5, use_rslora=True, target_modules=[],
                               target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "qwen2_moe_parameters": dict(r=2, lora_alpha=5,
                                 target_modules=["v_proj", "shared_expert.up_proj", "shared_expert.down_proj"],
                                 target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]),
    "qwen3_moe_parameters": dict(r=2, lora_alpha=3, target_modules=["q_proj"],
                                 target_parameters=["experts.down_proj"]),
}
# Matrices of experts with adapters that are applied by hand.
BY_HAND = {"mixtral": ["w1", "w2", "w3"], "qwen2_moe": ["gate_proj", "up_proj", "down_proj"]}


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


def path_of_experts(family, path):
    """The path of a layer's experts in our names."""
    return path.removeprefix("base_model.model.").replace(".mlp.", ".block_sparse_moe." if family == "Mixtral" else ".mlp.")


class ExpertsByHand(torch.nn.Module):
    """A layer's experts, each with adapters of its own beside some of its matrices."""

    def __init__(self, experts, names, adapted, options):
        super().__init__()
        self.experts, self.names = experts, names
        r = options["r"]
        self.factor = options["lora_alpha"] / (math.sqrt(r) if options.get("use_rslora") else r)
        inner = experts.down_proj.shape[2]
        for e in range(experts.num_experts):
            for name, rows, columns in zip(names, (inner, inner, experts.down_proj.shape[1]),
                                           (experts.gate_up_proj.shape[2],) * 2 + (inner,)):
                if name in adapted:
                    self.register_parameter(f"{e}_{name}_lora_A", torch.nn.Parameter(torch.empty(r, columns)))
                    self.register_parameter(f"{e}_{name}_lora_B", torch.nn.Parameter(torch.empty(rows, r)))

    def matrix(self, x, w, e, name):
        if not hasattr(self, f"{e}_{name}_lora_A"):
            return x @ w.T
        a, b = (getattr(self, f"{e}_{name}_lora_{which}") for which in "AB")
        return x @ w.T + self.factor * (x @ a.T) @ b.T

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for e in range(self.experts.num_experts):
            tokens, slots = torch.where(chosen == e)
            rows = x[tokens]
            gate_w, up_w = self.experts.gate_up_proj[e].chunk(2)
            gate, up = self.matrix(rows, gate_w, e, self.names[0]), self.matrix(rows, up_w, e, self.names[1])
            down = self.matrix(self.experts.act_fn(gate) * up, self.experts.down_proj[e], e, self.names[2])
            out = out.index_add(0, tokens, down * weights[tokens, slots, None])
        return out

    def named(self, path):
        for key, p in self.named_parameters(recurse=False):
            e, _, rest = key.partition("_")
            matrix, _, which = rest.rpartition("_lora_")
            yield f"{path}.{e}.{matrix}.lora_{which}.weight", p


def trained_of(adapted, family):
    """Triples: our name of an A or B, the parameter that has it, and a function that takes it out of that."""
    down = EXPERTS.get(family, ("gate_proj", "up_proj", "down_proj"))[2]
    seen, all_of = set(), lambda p: p
    for path, module in adapted.named_modules():
        if isinstance(module, ExpertsByHand):
            for name, p in module.named(path_of_experts(family, path)):
                seen.add(id(p))
                yield name, p, all_of
        if not isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            continue
        matrix = down if module.parameter_name == "down_proj" else module.parameter_name
        path, count = path_of_experts(family, path.replace(".base_layer", "")), module.num_experts
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        seen |= {id(a), id(b)}
        for e in range(count):
            yield (f"{path}.{e}.{matrix}.lora_A.weight", a,
                   lambda p, e=e: p.view(count, -1, p.shape[1])[e])  # the expert slowest
            yield (f"{path}.{e}.{matrix}.lora_B.weight", b,
                   lambda p, e=e: p.view(p.shape[0], -1, count)[:, :, e])  # the expert fastest
    for name, p in adapted.named_parameters():
        if p.requires_grad and id(p) not in seen:
            yield plain(name), p, all_of


def make_adapted(name):
    """The model with adapters, of which the base does not change."""
    base = name.removesuffix("_parameters")
    if name.startswith("gpt2"):
        model, config = make_gpt2(**GPT2_SCORES if name == "gpt2_scores" else {})
    else:
        model, config = make_model(base)
    family = FAMILIES.get(base, ("GPT2",))[0]
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]),
                                  autocast_adapter_dtype=False).eval()
    for layer in model.model.layers if name in BY_HAND else []:
        if hasattr(layer.mlp, "experts"):
            names = EXPERTS.get(family, ("gate_proj", "up_proj", "down_proj"))
            layer.mlp.experts = ExpertsByHand(layer.mlp.experts, names, BY_HAND[name], ADAPTERS[name]).double()
    trained = list(trained_of(adapted, family))
    with torch.no_grad():
        for n, p, part in trained:
            u = torch.from_numpy((hashed(n, part(p).numel()) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5)
            part(p).copy_((0.4 * u).view(part(p).shape))
    return adapted, config, trained


def saved_by_peft(adapted):
    """The tensors of PEFT's file, and the text of its configuration."""
    with tempfile.TemporaryDirectory() as directory:
        adapted.save_pretrained(directory)
        folder = pathlib.Path(directory)
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        return tensors, (folder / "adapter_config.json").read_text()


class Trained:
    """What make_families.train() needs of a model: the adapters are all that it has."""

    def __init__(self, model, trained):
        self.model, self.trained = model, {id(p): (name, p) for name, p, _ in trained}

    def named_parameters(self):
        return self.trained.values()

    def __call__(self, **inputs):
        return self.model(**inputs)


def make(name, out):
    model, config, trained = make_adapted(name)
    data = batches()
    values = {"logits": digest(logits_of(model, data[0][0]))}
    values["loss"] = torch.tensor([backward(model, data)])
    values |= {f"grad.{n}": digest(part(p.grad)) for n, p, part in trained}
    texts = {}
    if name.endswith("_parameters"):
        saved, texts["peft_config"] = saved_by_peft(model)
        values |= {f"saved.{n}": torch.from_numpy(tensor.numpy().astype(np.float32)) for n, tensor in saved.items()}
    values["adamw.loss"], values["adamw.grad_norm"] = train(Trained(model, trained), data)
    values |= {f"final.{n}": digest(part(p)) for n, p, part in trained}
    print(f"{name}: {sum(part(p).numel() for _, p, part in trained)} parameters, loss {values['loss'].item():.15g}, "
          f"{values['adamw.loss'][-1]:.9f} after ten steps")
    text = json.loads(config.to_json_string(use_diff=False))
    text["architectures"] = [type(model.get_base_model()).__name__]
    adapter = model.peft_config["default"].to_dict()
    adapter["target_modules"] = sorted(set(adapter["target_modules"]) | set(BY_HAND.get(name, [])))
    parameters = bool(adapter.get("target_parameters"))
    if parameters:
        adapter["target_parameters"] = sorted(adapter["target_parameters"])
    adapter["peft_type"] = "LORA"
    kept = {key: adapter[key] for key in ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias",
                                          "target_modules") + ("fan_in_fan_out",) * adapter["fan_in_fan_out"]
            + ("target_parameters",) * parameters}
    save(out / f"{name}.safetensors", values, metadata=texts | {
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
