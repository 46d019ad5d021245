#!/usr/bin/env python3
"""Golden values for tiny models of today's families, computed by transformers in float64.

Writes families/NAME.safetensors next to this script (or into --out).  Weights,
tokens and targets are not stored: they come from the hash of make_reference.py.
Each file's metadata has the model's config.json, from which the C++ tests read
the model, as they read a directory.  README.md in this folder says more.

    python make_families.py [NAME ...]

transformers computes norms, rotary embeddings and softmax in float32 whatever
the type of the weights; here float32 is made to mean float64 before its models
are imported, so that its own formulae are evaluated in double precision.

Needs torch, transformers and numpy; only the CPU is used.
"""

import argparse
import json
import pathlib

import numpy as np
import torch

torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

import transformers  # noqa: E402
from make_reference import ADAMW, IGNORE, hashed, save  # noqa: E402

VOCAB, BATCH, TIME = 97, 2, 24
VALID = [41, 17]  # valid targets in each micro-batch
PROMPT, GREEDY = 8, 40
SAMPLES = 16  # elements that are kept of a tensor

SIZES = dict(vocab_size=VOCAB, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, head_dim=10, max_position_embeddings=64, rms_norm_eps=1e-5,
             tie_word_embeddings=False, attention_dropout=0.0, bos_token_id=None, eos_token_id=None,
             pad_token_id=None, attn_implementation="eager", experts_implementation="eager")
WINDOW = 7
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LATENT = dict(num_key_value_heads=6, kv_lora_rank=11, qk_nope_head_dim=5, qk_rope_head_dim=6, v_head_dim=7,
              head_dim=6, first_k_dense_replace=3)
EVEN = dict(kv_lora_rank=12, qk_nope_head_dim=8)
FAMILIES = {
    # Llama 3.2: frequencies of all three kinds at an original context of 16.
    "llama3": ("Llama", dict(tie_word_embeddings=True, rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16))),
    "llama_bias": ("Llama", dict(attention_bias=True, rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=3.0))),
    "llama_mlp_bias": ("Llama", dict(mlp_bias=True, hidden_act="swish", rope_parameters=dict(
        rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0,
        mscale_all_dim=0))),
    "mistral": ("Mistral", dict(sliding_window=WINDOW, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    # Layers from the second on have the window.
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, head_dim=6, use_sliding_window=True, sliding_window=WINDOW,
                            max_window_layers=1, rope_parameters=dict(
                                rope_type="yarn", rope_theta=1000.0, factor=4.0,
                                original_max_position_embeddings=16))),
    # Mistral with gpt-oss's sinks, which no dense family of transformers has.
    "mistral_sinks": ("Mistral", dict(sliding_window=WINDOW, rope_parameters=dict(
        rope_type="default", rope_theta=1e4))),
    "qwen3": ("Qwen3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "phi3": ("Phi3", dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
                          max_position_embeddings=128, original_max_position_embeddings=64, sliding_window=WINDOW,
                          rope_parameters=dict(
                              rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                              original_max_position_embeddings=64, short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                              long_factor=[1.0, 2.0, 3.0, 5.0, 8.0, 13.0]))),
    "olmo2": ("Olmo2", dict(head_dim=6, rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "gemma2": ("Gemma2", dict(tie_word_embeddings=True, sliding_window=WINDOW, query_pre_attn_scalar=7,
                              attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
                              rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "gemma3": ("Gemma3", dict(tie_word_embeddings=True, sliding_window=WINDOW, query_pre_attn_scalar=12,
                              layer_types=[LOCAL, GLOBAL, LOCAL], rope_parameters={
                                  LOCAL: dict(rope_type="default", rope_theta=100.0),
                                  GLOBAL: dict(rope_type="linear", rope_theta=1e6, factor=8.0)})),
    # Mixtures of experts: dense layers by list and by step, with and without renormalised weights.
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW,
                                rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "qwen2_moe": ("Qwen2Moe", dict(tie_word_embeddings=True, head_dim=6, num_experts=6, num_experts_per_tok=3,
                                   moe_intermediate_size=20, shared_expert_intermediate_size=28,
                                   norm_topk_prob=False, decoder_sparse_step=2,
                                   rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=22,
                                   norm_topk_prob=True, mlp_only_layers=[1],
                                   rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "olmoe": ("Olmoe", dict(head_dim=6, num_experts=9, num_experts_per_tok=4, norm_topk_prob=False,
                            rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "granite_moe": ("GraniteMoe", dict(num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0,
                                       attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=2.5,
                                       rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    # Biases of gates and ups are so large that some are clamped.
    "gpt_oss": ("GptOss", dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW,
                               rope_parameters=dict(
                                   rope_type="yarn", rope_theta=1000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                   truncate=False, original_max_position_embeddings=16))),
    # Groups of experts; a choice bias that changes choices; a first layer without experts.
    "glm4_moe": ("Glm4Moe", dict(head_dim=8, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1,
                                 moe_intermediate_size=20, n_shared_experts=2, first_k_dense_replace=1,
                                 norm_topk_prob=True, routed_scaling_factor=1.7, use_qk_norm=True,
                                 attention_bias=True, rope_parameters=dict(
                                     rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "minimax_m2": ("MiniMaxM2", dict(num_local_experts=7, num_experts_per_tok=3, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.6))),
    # Sums of weights below and above the least one.
    "ernie4_moe": ("Ernie4_5_Moe", dict(tie_word_embeddings=True, moe_num_experts=6, moe_k=2,
                                        moe_intermediate_size=20, moe_num_shared_experts=2, moe_layer_start_index=1,
                                        moe_norm_min=0.45, rope_parameters=dict(
                                            rope_type="default", rope_theta=1e4))),
    # Latent attention, in layers without experts: queries from the input and from a latent, YaRN with both
    # amplitudes, biases, and pairs that are halves. DeepSeek-V2's complex numbers need even sizes in float64.
    "deepseek_v2": ("DeepseekV2", LATENT | EVEN | dict(q_lora_rank=None, rope_parameters=dict(
        rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, mscale=0.707,
        mscale_all_dim=0.707))),
    "deepseek_v2_bias": ("DeepseekV2", LATENT | EVEN | dict(
        q_lora_rank=26, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "deepseek_v3": ("DeepseekV3", LATENT | dict(
        q_lora_rank=14, attention_bias=True, rope_parameters=dict(
            rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0,
            mscale_all_dim=0.8))),
    "deepseek_v3_halves": ("DeepseekV3", LATENT | dict(
        q_lora_rank=14, rope_interleave=False, rope_parameters=dict(
            rope_type="linear", rope_theta=10000.0, factor=3.0))),
    # The same with experts: chosen from groups by their largest score, and by sums of two with a choice bias.
    "deepseek_v2_moe": ("DeepseekV2", LATENT | EVEN | dict(
        q_lora_rank=26, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=20,
        first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=1.6, rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "deepseek_v3_moe": ("DeepseekV3", LATENT | dict(
        q_lora_rank=14, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=20,
        first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16,
                             mscale=1.0, mscale_all_dim=1.0))),
}
# The names of an expert's matrices in files: gate, up, down.
EXPERTS = {"Mixtral": ("w1", "w3", "w2"), "MiniMaxM2": ("w1", "w3", "w2")}
# The names of transformers' parameters, and what files have in their place.
RENAMED = {"Mixtral": [(".mlp", ".block_sparse_moe")], "MiniMaxM2": [(".mlp", ".block_sparse_moe")],
           "GraniteMoe": [("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"),
                          ("router.weight", "router.layer.weight")],
           "Ernie4_5_Moe": [(".mlp.gate.moe_statics", ".mlp.moe_statics")]}
FUSED = ("GraniteMoe", "GptOss")  # files have all experts of a layer in one tensor


def make_model(name):
    """The model of that name, and its configuration."""
    family, options = FAMILIES[name]
    config_class = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))
    config = config_class(**(SIZES | options))
    torch.manual_seed(0)
    model = getattr(transformers, family + "ForCausalLM")(config).to(torch.float64)
    if name.endswith("_sinks"):
        add_sinks(model)
    model.eval()
    fill(model, family, one=0.0 if family.startswith("Gemma") else 1.0)
    return model, config


CHOICE = "e_score_correction_bias"


def data_of(p):
    return p


def of_files(model, family, tensor_of=data_of):
    """Pairs of a name in files and the tensor there, transposed where files of gpt-oss have it so. transformers
    has the experts of a layer in two tensors. Choice biases have no gradients."""
    gate, up, down = EXPERTS.get(family, ("gate_proj", "up_proj", "down_proj"))
    for name, p in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if CHOICE in n)]:
        if tensor_of is not data_of and not p.requires_grad:
            continue
        tensor = tensor_of(p)
        last = name.rpartition(".")[2]
        for old, new in RENAMED.get(family, []):
            name = name.replace(old, new)
        path = name.rpartition(".")[0]
        if family == "GptOss" and last in ("gate_up_proj", "down_proj"):
            yield name, tensor.transpose(1, 2)
        elif family in FUSED:
            yield name, tensor
        elif last == "gate_up_proj":
            for e, both in enumerate(tensor):
                inner = both.shape[0] // 2
                yield f"{path}.{e}.{gate}.weight", both[:inner]
                yield f"{path}.{e}.{up}.weight", both[inner:]
        elif last == "down_proj":
            for e, one in enumerate(tensor):
                yield f"{path}.{e}.{down}.weight", one
        else:
            yield name, tensor


def add_sinks(model):
    """Gives the heads of all layers sinks, which gpt-oss's own attention then computes with."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.sinks = torch.nn.Parameter(torch.empty(model.config.num_attention_heads, dtype=torch.float64))
        module = __import__(type(attention).__module__, fromlist=["eager_attention_forward"])
        module.eager_attention_forward = eager_attention_forward


def fill(model, family, one):
    """Sets all parameters by their names: uniform, norms centred on what multiplies by one."""
    with torch.no_grad():
        for name, p in of_files(model, family):
            u = torch.from_numpy((hashed(name, p.numel()) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5)
            size = 20.0 if name.endswith("gate_up_proj_bias") else 0.4
            value = one + 0.4 * u if "norm.weight" in name else size * u
            p.copy_(value.view(p.shape))


def batches():
    shape = (len(VALID), BATCH * TIME)
    ids = (hashed(name, shape[0] * shape[1]) % np.uint64(VOCAB) for name in ("tokens", "targets"))
    tokens, targets = (torch.from_numpy(x.astype(np.int64).reshape(shape)) for x in ids)
    for m, valid in enumerate(VALID):
        targets[m, valid:] = IGNORE
    return [(x.view(BATCH, TIME), y.view(BATCH, TIME)) for x, y in zip(tokens, targets)]


def logits_of(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


def backward(model, data):
    total = 0.0
    for tokens, targets in data:
        loss = torch.nn.functional.cross_entropy(logits_of(model, tokens).flatten(0, 1), targets.flatten(),
                                                 ignore_index=IGNORE, reduction="sum") / sum(VALID)
        loss.backward()
        total += loss.item()
    return total


def train(model, data):
    """Ten steps as in make_reference.py."""
    p = {n: t for n, t in model.named_parameters() if t.requires_grad}
    decays = {n for n, t in p.items() if t.ndim >= 2 and not n.endswith("bias")}
    optimizer = torch.optim.AdamW(
        [{"params": [t for n, t in p.items() if n in decays], "weight_decay": ADAMW["weight_decay"]},
         {"params": [t for n, t in p.items() if n not in decays], "weight_decay": 0.0}],
        lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"], foreach=False)
    losses, norms = [], []
    for _ in range(ADAMW["steps"]):
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, data))
        norm = torch.sqrt(sum(t.grad.square().sum() for t in p.values())).item()
        norms.append(norm)
        for t in p.values():
            t.grad *= min(1.0, ADAMW["max_norm"] / (norm + 1e-6))
        optimizer.step()
    return torch.tensor(losses), torch.tensor(norms)


def digest(tensor):
    """float64 [5 + min(SAMPLES, n)]: norm, sum, three signed sums, and elements at equal distances."""
    x = tensor.detach().double().flatten()
    n = x.numel()
    sign = [torch.from_numpy(1.0 - 2.0 * (hashed(f"sign{j}", n) >> np.uint64(63)).astype(np.float64))
            for j in range(3)]
    return torch.cat([torch.stack([x.norm(), x.sum(), *((x * s).sum() for s in sign)]),
                      x[:: max(1, n // SAMPLES)][:SAMPLES]])


def greedy(model):
    """The tokens after a prompt, each the largest logit's."""
    ids = batches()[0][0][:1, :PROMPT]
    gap = float("inf")
    with torch.no_grad():
        for _ in range(GREEDY):
            last = logits_of(model, ids)[0, -1]
            top = last.topk(2).values
            gap = min(gap, (top[0] - top[1]).item())
            ids = torch.cat([ids, last.argmax().view(1, 1)], dim=1)
    return ids[0, PROMPT:].to(torch.int32), gap


BALANCE, Z = 0.5, 0.3  # coefficients


def balance_term(model, kind, logits, all_logits):
    """A balance term of one micro-batch, a mean over its tokens. logits: of its layers, [tokens, experts] each."""
    experts, k = logits[0].shape[1], model.config.num_experts_per_tok
    if kind == "hf":
        module = __import__(type(model).__module__, fromlist=["load_balancing_loss_func"])
        return module.load_balancing_loss_func(tuple(logits), experts, k)
    if kind == "z":
        return sum(layer.logsumexp(-1).square().mean() for layer in logits)

    def shares(layer):
        chosen = layer.topk(k, dim=-1).indices.flatten()
        return torch.bincount(chosen, minlength=experts).double() / chosen.numel()

    term = 0.0
    for number, layer in enumerate(logits):
        parts = layer.split(TIME) if kind == "sequence" else [layer]
        for part in parts:
            counted = torch.cat([m[number] for m in all_logits]) if kind == "global" else part
            term = term + experts * (shares(counted.detach()) * part.softmax(-1).mean(0)).sum() / len(parts)
    return term


def balanced(model, family, data):
    """The terms of the batch and the gradients of loss + coefficient * term, of routers and of the embedding."""
    values = {}
    with torch.no_grad():
        all_logits = [model(input_ids=tokens, output_router_logits=True).router_logits for tokens, _ in data]
    for kind in ("hf", "switch", "sequence", "global", "z"):
        model.zero_grad(set_to_none=True)
        terms = 0.0
        for tokens, targets in data:
            out = model(input_ids=tokens, use_cache=False, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(),
                                                     ignore_index=IGNORE, reduction="sum") / sum(VALID)
            term = balance_term(model, kind, out.router_logits, all_logits) / len(data)
            (loss + (Z if kind == "z" else BALANCE) * term).backward()
            terms += term.item()
        values[f"balance.{kind}"] = torch.tensor([terms])
        values |= {f"balance.{kind}.grad.{n}": digest(g) for n, g in of_files(model, family, lambda p: p.grad)
                   if n.endswith(".gate.weight") or ".router." in n or "embed_tokens" in n}
    model.zero_grad(set_to_none=True)
    return values


def make(name, out):
    model, config = make_model(name)
    data = batches()
    values = {"logits": digest(logits_of(model, data[0][0]))}
    values["greedy"], gap = greedy(model)
    values["loss"] = torch.tensor([backward(model, data)])
    family = FAMILIES[name][0]
    values |= {f"grad.{n}": digest(g) for n, g in of_files(model, family, lambda p: p.grad)}
    routes = any(".experts." in n for n in model.state_dict())
    if routes and family != "DeepseekV2" and not any(CHOICE in n for n in model.state_dict()):
        values |= balanced(model, family, data)
    values["adamw.loss"], values["adamw.grad_norm"] = train(model, data)
    values |= {f"final.{n}": digest(p) for n, p in of_files(model, family)}
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, loss {values['loss'].item():.15g}, "
          f"{values['adamw.loss'][-1]:.9f} after ten steps; greedy gap {gap:.1e}")
    text = json.loads(config.to_json_string(use_diff=False))
    text["architectures"] = [type(model).__name__]
    if name.endswith("_sinks"):
        text["attention_sinks"] = True
    save(out / f"{name}.safetensors", values, metadata={
        "config": json.dumps(text), "transformers": transformers.__version__, "torch": torch.__version__,
        "made_by": "tests/reference/make_families.py, on the CPU, float64"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(FAMILIES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "families")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # one order of summation
    for name in args.names:
        make(name, args.out)


if __name__ == "__main__":
    main()
