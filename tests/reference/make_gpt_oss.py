#!/usr/bin/env python3
"""A tiny gpt-oss whose experts are in MXFP4 as released files have them, and what transformers decodes.

Writes coded/gpt_oss next to this script (or into --out): config.json, model.safetensors with random codes, and
values.safetensors with the experts of both layers decoded, as [E, in, out], and the logits of 12 tokens
in float32.

Needs torch, transformers, safetensors; only the CPU is used.
"""

import argparse
import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS, WIDTH, INNER, LAYERS, VOCAB = 3, 64, 32, 2, 53


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "coded" / "gpt_oss")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    config = transformers.GptOssConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None, attn_implementation="eager",
        experts_implementation="eager", rope_parameters=dict(rope_type="default", rope_theta=1e4))
    model = transformers.GptOssForCausalLM(config).to(torch.float32).eval()
    files, values = {}, {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            module, _, last = name.rpartition(".")
            if last not in ("gate_up_proj", "down_proj"):
                p.copy_((p.new_ones(()) if "norm" in name else 0) + 0.2 * torch.randn_like(p))
                p.copy_(p.bfloat16().float())
                files[name] = p.bfloat16()
                continue
            inputs, outputs = p.shape[1:]
            blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8)
            files[f"{name}_blocks"], files[f"{name}_scales"] = blocks, scales
            decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert decoded.shape == p.shape, (decoded.shape, p.shape)
            p.copy_(decoded)
            values[name] = decoded.bfloat16().contiguous()  # which is exact
        tokens = torch.randint(0, VOCAB, (1, 12))
        values["tokens"] = tokens.to(torch.int32)
        values["logits"] = model(input_ids=tokens, use_cache=False).logits[0].contiguous()
    text = json.loads(config.to_json_string(use_diff=False))
    text["architectures"] = ["GptOssForCausalLM"]
    text["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (out / "config.json").write_text(json.dumps(text, indent=1) + "\n")
    save_file(files, out / "model.safetensors", metadata={"format": "pt"})
    save_file(values, out / "values.safetensors", metadata={
        "transformers": transformers.__version__, "made_by": "tests/reference/make_gpt_oss.py, on the CPU"})


if __name__ == "__main__":
    main()
