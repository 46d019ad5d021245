#!/usr/bin/env python3
"""Writes lora/targets.json: which modules PEFT adapts, by the keys of an adapter_config.json.

    python make_lora_targets.py

Each case has a model of four layers, the keys, and the adapted modules' names; null where PEFT refuses.
tests/model/adapter_config_test.cpp compares.  qwen2_moe has the modules that transformers 4 has, one for each matrix
of each expert; qwen2_moe_5 is the model of transformers 5, whose experts have parameters.
"""

import json
import pathlib

import peft
import torch
import transformers

CASES = [
    ("llama", dict(target_modules=r".*\.(q|v)_proj")),
    ("llama", dict(target_modules=r"model\.layers\.[02]\.self_attn\.[qk]_proj")),
    ("llama", dict(target_modules=r"(?:.*?(?:language|text)?.*?(?:self_attn|mlp).*?(?:q_proj|k_proj|up_proj).*?)|"
                                  r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:o_proj)))")),
    ("llama", dict(target_modules=r"^(?!.*mlp).*_proj$")),
    ("llama", dict(target_modules=r".*layers\.(?!3\.)\d+\..*(?<=self_attn\.)o_proj")),
    ("llama", dict(target_modules=r"model.layers.\d.mlp.\w{2,4}_proj")),
    ("llama", dict(target_modules=r".*[.](gate|up)_proj|.*\.1\..*k_pro.")),
    ("llama", dict(target_modules=r"(.*\.){4,5}[^qkv.]_proj")),
    ("llama", dict(target_modules=r"q_proj")),
    ("llama", dict(target_modules="all-linear")),
    ("llama", dict(target_modules="all-linear", exclude_modules=["gate_proj", "mlp.up_proj"])),
    ("llama", dict(target_modules="all-linear", exclude_modules=r".*\.[13]\..*")),
    ("llama", dict(target_modules=["q_proj", "v_proj"], exclude_modules=["layers.0.self_attn.q_proj"])),
    ("llama", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=2)),
    ("llama", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 3])),
    ("llama", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[1], layers_pattern="layers")),
    ("llama", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[1], layers_pattern=["h", "lay.*"])),
    ("llama", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[1], layers_pattern=["h"])),
    ("llama", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[])),
    ("llama", dict(target_modules=r".*q_proj", layers_to_transform=[1])),
    ("llama", dict(target_modules=["model.layers.1.mlp.up_proj", "self_attn.k_proj", "query"])),
    ("llama", dict(target_modules=["proj"])),
    ("gpt2", dict(target_modules=r"transformer\.h\.\d\.(attn|mlp)\.c_proj", exclude_modules=["h.1.attn.c_proj"])),
    ("gpt2", dict(target_modules=["c_proj"], layers_to_transform=[2, 3], layers_pattern="h")),
    ("gpt2", dict(target_modules=r".*c_(attn|fc)")),
    ("qwen2_moe", dict(target_modules=["up_proj"])),
    ("qwen2_moe", dict(target_modules=["q_proj", "mlp.up_proj"])),
    ("qwen2_moe", dict(target_modules=["shared_expert.down_proj"])),
    ("qwen2_moe", dict(target_modules=[f"experts.{e}.{name}" for e in range(3) for name in ("gate_proj", "down_proj")])),
    ("qwen2_moe", dict(target_modules=r".*\.experts\.\d+\.(gate|up)_proj")),
    ("qwen2_moe", dict(target_modules=["down_proj"], layers_to_transform=[0, 3])),
    ("qwen2_moe", dict(target_modules="all-linear", exclude_modules=["gate", "shared_expert_gate"])),
    ("qwen2_moe_5", dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    ("qwen2_moe_5", dict(target_parameters=["down_proj"], target_modules=["v_proj", "down_proj"])),
    ("qwen2_moe_5", dict(target_parameters=["model.layers.3.mlp.experts.gate_up_proj", "experts.down_proj"],
                         target_modules=[])),
    ("qwen2_moe_5", dict(target_parameters=["experts.up_proj"], target_modules=[])),
]


def tree(paths):
    """A model with a linear module at each path."""
    root = torch.nn.Module()
    for path in paths:
        at, *parts = [root, *path.split(".")]
        for part in parts[:-1]:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.add_module(parts[-1], torch.nn.Linear(4, 4))
    return root


MLP = ("gate_proj", "up_proj", "down_proj")
LAYERS, EXPERTS = 4, 3


def linears_of_layer(layer):
    yield from (f"self_attn.{name}_proj" for name in "qkvo")
    if layer % 2 == 0:
        yield from (f"mlp.{name}" for name in MLP)
        return
    yield from (f"mlp.{path}.{name}" for path in [f"experts.{e}" for e in range(EXPERTS)] + ["shared_expert"]
                for name in MLP)
    yield from ("mlp.gate", "mlp.shared_expert_gate")


def make_model(family):
    if family == "qwen2_moe":
        return tree(f"model.layers.{layer}.{path}" for layer in range(LAYERS) for path in linears_of_layer(layer))
    if family == "qwen2_moe_5":
        return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(
            vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=8, num_experts=EXPERTS, num_experts_per_tok=2,
            moe_intermediate_size=6, shared_expert_intermediate_size=10, decoder_sparse_step=2))
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=4, n_head=2))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8))


def name_of(path, module):
    """The name of what a layer of PEFT's adapts: of a parameter, where it wraps one."""
    if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
        return path.replace(".base_layer", "") + "." + module.parameter_name
    return path


def adapted(family, keys):
    try:
        kind = {} if family == "qwen2_moe" else dict(task_type="CAUSAL_LM")
        config = peft.LoraConfig(r=2, lora_alpha=2, **kind, **keys)
        model = peft.get_peft_model(make_model(family), config)
    except ValueError as error:
        print(family, keys, error)
        return None
    return sorted(name_of(name.removeprefix("base_model.model."), module) for name, module in model.named_modules()
                  if isinstance(module, peft.tuners.lora.layer.LoraLayer))


def main():
    cases = [dict(model=family, keys=keys, modules=adapted(family, keys)) for family, keys in CASES]
    text = json.dumps(dict(peft=peft.__version__, cases=cases), indent=1) + "\n"
    (pathlib.Path(__file__).parent / "lora/targets.json").write_text(text)


if __name__ == "__main__":
    main()
