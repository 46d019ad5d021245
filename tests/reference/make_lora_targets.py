#!/usr/bin/env python3
"""Writes lora/targets.json: which modules PEFT adapts, by the keys of an adapter_config.json.

    python make_lora_targets.py

Each case has a model (llama or gpt2, of four layers), the keys, and the adapted modules' names; null where PEFT
refuses.  tests/model/adapter_config_test.cpp compares.
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
]


def make_model(family):
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=4, n_head=2))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8))


def adapted(family, keys):
    try:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=2, **keys)
        model = peft.get_peft_model(make_model(family), config)
    except ValueError as error:
        print(family, keys, error)
        return None
    return sorted(name.removeprefix("base_model.model.").removesuffix(".lora_A")
                  for name, module in model.named_modules()
                  if name.endswith(".lora_A") and isinstance(module, torch.nn.ModuleDict))


def main():
    cases = [dict(model=family, keys=keys, modules=adapted(family, keys)) for family, keys in CASES]
    text = json.dumps(dict(peft=peft.__version__, cases=cases), indent=1) + "\n"
    (pathlib.Path(__file__).parent / "lora/targets.json").write_text(text)


if __name__ == "__main__":
    main()
