"""Random config.json files of all families, as people's files are spelled.

A seed draws a family, sizes that fit each other badly on purpose, and options: heads of a size of their own, few
heads of keys and values, biases, tied matrices, windows shorter than sequences, caps, all kinds of rotary frequencies,
in both spellings of their keys.
"""

import math
import random

LOCAL, GLOBAL = "sliding_attention", "full_attention"


class Draw(random.Random):
    def chance(self, p):
        return self.random() < p

    def log(self, low, high):
        return math.exp(self.uniform(math.log(low), math.log(high)))


def sizes(r, divides, head_dims=(2, 4, 6, 8, 10, 12, 14, 16, 18, 22, 26, 32, 34, 40, 64)):
    """The sizes of all families but GPT-2.  divides: transformers asks that the heads divide the width."""
    heads = r.choice([1, 2, 3, 4, 5, 6, 8])
    kv = r.choice([k for k in range(1, heads + 1) if heads % k == 0])
    dim = r.choice(head_dims)
    while heads * dim > 200:
        dim = r.choice(head_dims)
    width = heads * r.randint(max(1, 6 // heads), max(2, 70 // heads)) if divides else r.randint(5, 70)
    return dict(vocab_size=r.randint(258, 340), hidden_size=width, intermediate_size=r.randint(3, 90),
                num_hidden_layers=r.choice([1, 2, 2, 3, 4, 7]), num_attention_heads=heads, num_key_value_heads=kv,
                head_dim=dim, max_position_embeddings=r.choice([24, 40, 64, 100, 131, 257]))


def without_head_dim(r, c, chance):
    """Heads whose size follows from the width."""
    if r.chance(chance):
        del c["head_dim"]
        c["hidden_size"] = c["num_attention_heads"] * r.choice([2, 4, 8, 10, 12])


def rope(r, context, kinds=("default", "linear", "llama3", "yarn", "yarn")):
    kind = r.choice(kinds)
    out = dict(rope_type=kind, rope_theta=r.choice([10000.0, 500000.0, round(r.log(50, 1e6), 1), 10000, 1000000]))
    if kind == "default":
        return out
    out["factor"] = r.choice([2.0, 8.0, 32.0, 4, round(r.uniform(1.1, 40), 3)])
    if kind == "linear":
        return out
    if kind == "llama3" or r.chance(0.8):
        out["original_max_position_embeddings"] = r.randint(8, context)
    if kind == "llama3":
        out["low_freq_factor"] = r.choice([1.0, 1, round(r.uniform(0.5, 2), 2)])
        out["high_freq_factor"] = r.choice([4.0, 4, round(r.uniform(2.5, 8), 2)])
        return out
    if r.chance(0.4):
        out["beta_fast"] = r.choice([32.0, 32, round(r.uniform(4, 40), 2)])
        out["beta_slow"] = r.choice([1.0, 1, round(r.uniform(0.2, 3), 2)])
    if r.chance(0.3):
        out["truncate"] = r.chance(0.5)
    if r.chance(0.3):
        out["mscale"] = r.choice([1.0, 0.707, 1.3])
        if r.chance(0.7):
            out["mscale_all_dim"] = r.choice([1.0, 0.5, 0.707])
    if r.chance(0.2):
        out["attention_factor"] = round(r.uniform(0.7, 1.5), 3)
    return out


def spelled(r, config, parameters):
    """Adds the rotary keys in one of the spellings that files have."""
    parameters = dict(parameters)
    way = r.choice(["new", "old", "old_type", "mixed"])
    if way == "new":
        config["rope_parameters"] = parameters
        return
    config["rope_theta"] = parameters.pop("rope_theta")
    if way == "mixed" and r.chance(0.5):  # theta stands beside the object of newer files
        config["rope_parameters"] = parameters
        return
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    if parameters["rope_type"] == "default":
        if r.chance(0.7):
            config["rope_scaling"] = None
        return
    if way == "old_type":
        parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = parameters


def windows(r, config, listed):
    config["sliding_window"] = r.choice([1, 2, 3, 5, 7, 8, 11, 16, 17, 33, 4096])
    if listed and r.chance(0.3):
        config["layer_types"] = [r.choice([LOCAL, GLOBAL]) for _ in range(config["num_hidden_layers"])]


def llama(r):
    c = sizes(r, True)
    without_head_dim(r, c, 0.4)
    if c["num_key_value_heads"] == c["num_attention_heads"] and r.chance(0.5):
        del c["num_key_value_heads"]
    spelled(r, c, rope(r, c["max_position_embeddings"]))
    if r.chance(0.5):
        c["attention_bias"] = r.chance(0.6)
    c["tie_word_embeddings"] = r.chance(0.4)
    if r.chance(0.3):
        c |= dict(mlp_bias=False, pretraining_tp=1)
    return "llama", "LlamaForCausalLM", c


def mistral(r):
    c = sizes(r, False)
    without_head_dim(r, c, 0.4)
    windows(r, c, False)
    if r.chance(0.4):
        c["sliding_window"] = None
    spelled(r, c, rope(r, c["max_position_embeddings"]))
    c["tie_word_embeddings"] = r.chance(0.3)
    return "mistral", "MistralForCausalLM", c


def qwen(r, kind):
    c = sizes(r, False)
    if kind == "qwen2":
        without_head_dim(r, c, 0.6)
    use = r.chance(0.8)
    windows(r, c, use)
    c["use_sliding_window"] = use
    if use and r.chance(0.7):
        c["max_window_layers"] = r.randint(0, c["num_hidden_layers"])
    elif not use:
        c["max_window_layers"] = r.randint(0, 30)
        if r.chance(0.3):
            c["layer_types"] = [GLOBAL] * c["num_hidden_layers"]
    spelled(r, c, rope(r, c["max_position_embeddings"]))
    if kind == "qwen3" and r.chance(0.5):
        c["attention_bias"] = r.chance(0.5)
    c["tie_word_embeddings"] = r.chance(0.5)
    return kind, kind.capitalize() + "ForCausalLM", c


def gemma(r):
    c = sizes(r, True)
    windows(r, c, True)
    if r.chance(0.7):
        c["query_pre_attn_scalar"] = r.choice([144, 7, 224, 256, 1, c["head_dim"]])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if r.chance(0.8):
            c[key] = r.choice([50.0, 30.0, round(r.uniform(0.5, 8), 2), None])
    if r.chance(0.5):
        c["hidden_activation"] = "gelu_pytorch_tanh"
    if r.chance(0.3):
        c["hidden_act"] = r.choice(["gelu", "gelu_pytorch_tanh", "silu"])
    if r.chance(0.4):
        c["attention_bias"] = r.chance(0.6)
    if r.chance(0.5):
        c["tie_word_embeddings"] = r.chance(0.5)
    return c


def gemma2(r):
    c = gemma(r)
    spelled(r, c, rope(r, c["max_position_embeddings"]))
    return "gemma2", "Gemma2ForCausalLM", c


def gemma3(r):
    c = gemma(r)
    c.pop("attn_logit_softcapping", None)  # transformers reads it, and does not apply it
    if "layer_types" not in c and r.chance(0.7):
        c["sliding_window_pattern"] = r.randint(1, 4)
    parameters = rope(r, c["max_position_embeddings"])
    local = dict(rope_type="default", rope_theta=r.choice([10000.0, 100.0, 12345.5]))
    parameters.pop("truncate", None)  # transformers looks for it in the wrong object
    if r.chance(0.5):
        c["rope_parameters"] = {GLOBAL: parameters, LOCAL: local}
        return "gemma3_text", "Gemma3ForCausalLM", c
    theta = parameters.pop("rope_theta")
    if r.chance(0.7):
        c["rope_theta"] = theta
    if r.chance(0.7):
        c["rope_local_base_freq"] = local["rope_theta"]
    if parameters["rope_type"] != "default":
        c["rope_scaling"] = parameters
    return "gemma3_text", "Gemma3ForCausalLM", c


def phi3(r):
    # transformers counts LongRoPE's factors by the width over the heads.
    c = sizes(r, True, (4, 8, 12, 16, 20, 24, 32))
    dim = turned = c["head_dim"]
    c["hidden_size"] = dim * c["num_attention_heads"]
    if r.chance(0.7):
        del c["head_dim"]
    if r.chance(0.5):
        windows(r, c, False)
    elif r.chance(0.5):
        c["sliding_window"] = None
    parameters = rope(r, c["max_position_embeddings"], ("default",))
    if r.chance(0.6):
        turned = r.choice(range(2, dim + 1, 2))
        parameters["partial_rotary_factor"] = turned / dim
    if r.chance(0.6):
        longrope(r, c, parameters, turned)
    spelled(r, c, parameters)
    scaling = c.get("rope_scaling")
    if scaling and "type" in scaling and r.chance(0.5):
        # The older names of the same; transformers then looks for the original context in the object alone.
        scaling["type"] = r.choice(["su", "yarn"])
        scaling["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    c["tie_word_embeddings"] = r.chance(0.3)
    c |= dict(embd_pdrop=0.0, resid_pdrop=0.0)
    return "phi3", "Phi3ForCausalLM", c


def longrope(r, c, parameters, turned):
    parameters["rope_type"] = "longrope"
    factors = [round(r.uniform(1, 3), 3) for _ in range(turned // 2)]
    parameters["short_factor"], parameters["long_factor"] = factors, [x * r.uniform(1, 9) for x in factors]
    c["original_max_position_embeddings"] = r.randint(20, c["max_position_embeddings"])
    if r.chance(0.5):
        parameters["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    if r.chance(0.2):
        parameters["attention_factor"] = 1.2
    if r.chance(0.2):
        parameters["factor"] = r.choice([0.5, 2.0, 32.0])


def olmo2(r):
    c = sizes(r, True)
    without_head_dim(r, c, 0.6)
    spelled(r, c, rope(r, c["max_position_embeddings"]))
    if r.chance(0.4):
        c["attention_bias"] = r.chance(0.6)
    c["tie_word_embeddings"] = r.chance(0.3)
    return "olmo2", "Olmo2ForCausalLM", c


def gpt2(r):
    heads = r.choice([1, 2, 3, 4, 5, 6])
    c = dict(vocab_size=r.randint(258, 340), n_positions=r.choice([24, 40, 64, 100, 131]),
             n_embd=heads * r.randint(1, 12), n_layer=r.choice([1, 2, 3, 5]), n_head=heads)
    c |= dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    if r.chance(0.5):
        c["n_inner"] = r.choice([None, r.randint(3, 90)])
    if r.chance(0.5):
        c["layer_norm_epsilon"] = r.choice([1e-5, 1e-6, 1e-3])
    if r.chance(0.5):
        c["activation_function"] = r.choice(["gelu_new", "gelu_pytorch_tanh"])
    if r.chance(0.5):
        c["tie_word_embeddings"] = r.chance(0.5)
    if r.chance(0.3):
        c["n_ctx"] = c["n_positions"]
    return "gpt2", "GPT2LMHeadModel", c


FAMILIES = dict(llama=llama, mistral=mistral, qwen2=lambda r: qwen(r, "qwen2"), qwen3=lambda r: qwen(r, "qwen3"),
                gemma2=gemma2, gemma3=gemma3, phi3=phi3, olmo2=olmo2, gpt2=gpt2)


def config(r, family):
    """A config.json, its keys in any order."""
    kind, architecture, c = FAMILIES[family](r)
    c |= dict(model_type=kind, architectures=[architecture], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if kind != "gpt2" and r.chance(0.7):
        c["rms_norm_eps"] = r.choice([1e-6, 1e-5, 1e-3, 0.02])
    if r.chance(0.5):
        c |= dict(use_cache=True, transformers_version="4.44.0", torch_dtype="bfloat16", attention_dropout=0.0)
    items = list(c.items())
    r.shuffle(items)
    return dict(items)
