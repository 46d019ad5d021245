#!/usr/bin/env python3
"""Golden values for two tiny models, computed with PyTorch in float64.

Writes gpt2_tiny.safetensors and llama_tiny.safetensors next to this script
(or into --out).  Weights, tokens and targets are not stored: they come from
an integer hash that the C++ tests reproduce bit for bit.  README.md in this
folder describes the hash, the stored tensors and sensible tolerances.

    python make_reference.py --check    # without --check: no finite differences

Needs torch and numpy; only the CPU is used.
"""

import argparse
import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F

VOCAB = 257
MICRO_BATCHES = 4
BATCH, TIME = 2, 32
VALID = [61, 49, 37, 25]  # valid targets in each micro-batch; the rest are IGNORE
IGNORE = -100

GPT2 = dict(model="gpt2", vocab_size=VOCAB, n_layer=3, n_embd=172, n_head=4,
            n_positions=40, n_inner=688, layer_norm_epsilon=1e-5,
            activation_function="gelu_new", tie_word_embeddings=True)
LLAMA = dict(model="llama", vocab_size=VOCAB, num_hidden_layers=5, hidden_size=176,
             num_attention_heads=8, num_key_value_heads=4, head_dim=22,
             intermediate_size=172, rms_norm_eps=1e-5, rope_theta=10000.0,
             tie_word_embeddings=False)
ADAMW = dict(steps=10, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_norm=0.5)


# ---------------------------------------------------------------- the hash

def fnv1a(name):
    """FNV-1a, 64 bits, of the UTF-8 bytes of `name`."""
    h = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def hashed(name, count):
    """uint64 [count]: the splitmix64 finaliser of fnv1a(name) + (i + 1) * golden."""
    i = np.arange(1, count + 1, dtype=np.uint64)
    z = np.uint64(fnv1a(name)) + i * np.uint64(0x9E3779B97F4A7C15)  # wraps
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


NORM_SUFFIXES = ("ln_1.weight", "ln_2.weight", "ln_f.weight", "layernorm.weight", "model.norm.weight")


def weight(name, shape):
    """float32 parameter: uniform, centred on 1 for norm weights and on 0 otherwise."""
    u = (hashed(name, math.prod(shape)) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5
    value = 1.0 + 0.4 * u if name.endswith(NORM_SUFFIXES) else 0.2 * u
    return torch.from_numpy(value.astype(np.float32).reshape(shape))


def batches():
    """The micro-batches: a list of (tokens, targets), each int64 [BATCH, TIME]."""
    shape = (MICRO_BATCHES, BATCH * TIME)
    ids = (hashed(name, math.prod(shape)) % np.uint64(VOCAB) for name in ("tokens", "targets"))
    tokens, targets = (torch.from_numpy(x.astype(np.int64).reshape(shape)) for x in ids)
    for m, valid in enumerate(VALID):
        targets[m, valid:] = IGNORE
    return [(x.view(BATCH, TIME), y.view(BATCH, TIME)) for x, y in zip(tokens, targets)]


# ---------------------------------------------------------------- the models

def attention(q, k, v):
    """Causal attention; q, k and v are [batch, heads, time, head size]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def split_heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x):
    return x.transpose(1, 2).flatten(2)


def gpt2_shapes(c):
    n, inner = c["n_embd"], c["n_inner"]
    shapes = {"wte.weight": (c["vocab_size"], n), "wpe.weight": (c["n_positions"], n)}
    for i in range(c["n_layer"]):
        block = {"ln_1.weight": (n,), "ln_1.bias": (n,),
                 "attn.c_attn.weight": (n, 3 * n), "attn.c_attn.bias": (3 * n,),
                 "attn.c_proj.weight": (n, n), "attn.c_proj.bias": (n,),
                 "ln_2.weight": (n,), "ln_2.bias": (n,),
                 "mlp.c_fc.weight": (n, inner), "mlp.c_fc.bias": (inner,),
                 "mlp.c_proj.weight": (inner, n), "mlp.c_proj.bias": (n,)}
        shapes |= {f"h.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {"ln_f.weight": (n,), "ln_f.bias": (n,)}


def gpt2(c, p, tokens):
    """Logits of GPT-2.  Linear weights are [in, out], as Hugging Face's Conv1D keeps them."""
    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], p[name + ".weight"], p[name + ".bias"], c["layer_norm_epsilon"])

    def linear(name, x):
        return x @ p[name + ".weight"] + p[name + ".bias"]

    x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]
    for i in range(c["n_layer"]):
        h = f"h.{i}."
        qkv = linear(h + "attn.c_attn", norm(h + "ln_1", x)).split(c["n_embd"], dim=-1)
        mixed = join_heads(attention(*(split_heads(t, c["n_head"]) for t in qkv)))
        x = x + linear(h + "attn.c_proj", mixed)
        hidden = F.gelu(linear(h + "mlp.c_fc", norm(h + "ln_2", x)), approximate="tanh")
        x = x + linear(h + "mlp.c_proj", hidden)
    return norm("ln_f", x) @ p["wte.weight"].T


def llama_shapes(c):
    n, inner = c["hidden_size"], c["intermediate_size"]
    q, kv = (c[k] * c["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], n)}
    for i in range(c["num_hidden_layers"]):
        block = {"input_layernorm": (n,),
                 "self_attn.q_proj": (q, n), "self_attn.k_proj": (kv, n),
                 "self_attn.v_proj": (kv, n), "self_attn.o_proj": (n, q),
                 "post_attention_layernorm": (n,),
                 "mlp.gate_proj": (inner, n), "mlp.up_proj": (inner, n), "mlp.down_proj": (n, inner)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes | {"model.norm.weight": (n,), "lm_head.weight": (c["vocab_size"], n)}


def rotate(x, theta):
    """RoPE, half-split: element j pairs with j + head size / 2; the angles are always float64."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def llama(c, p, tokens):
    """Logits of Llama.  Linear weights are [out, in]."""
    def norm(name, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + c["rms_norm_eps"])
        return x * scale * p[name + ".weight"]

    def linear(name, x):
        return x @ p[name + ".weight"].T

    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    x = p["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        h = f"model.layers.{i}."
        y = norm(h + "input_layernorm", x)
        q = rotate(split_heads(linear(h + "self_attn.q_proj", y), heads), c["rope_theta"])
        k = rotate(split_heads(linear(h + "self_attn.k_proj", y), kv_heads), c["rope_theta"])
        v = split_heads(linear(h + "self_attn.v_proj", y), kv_heads)
        # Query head j reads key/value head j // (heads / kv_heads).
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        x = x + linear(h + "self_attn.o_proj", join_heads(attention(q, k, v)))
        y = norm(h + "post_attention_layernorm", x)
        gated = F.silu(linear(h + "mlp.gate_proj", y)) * linear(h + "mlp.up_proj", y)
        x = x + linear(h + "mlp.down_proj", gated)
    return linear("lm_head", norm("model.norm", x))


# ---------------------------------------------------------------- loss, training, packing

def make_parameters(shapes, dtype):
    return {name: weight(name, shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def losses(forward, c, p, data):
    """One loss per micro-batch; their sum is the mean over all valid targets of all of them."""
    for tokens, targets in data:
        logits = forward(c, p, tokens)
        yield F.cross_entropy(logits.flatten(0, 1), targets.flatten(),
                              ignore_index=IGNORE, reduction="sum") / sum(VALID)


def backward(forward, c, p, data):
    """Adds the gradients of all micro-batches into p[...].grad; returns the loss."""
    total = 0.0
    for loss in losses(forward, c, p, data):
        loss.backward()
        total += loss.item()
    return total


def train(forward, c, p, data):
    """Takes the AdamW steps; returns each step's loss and gradient norm, before clipping."""
    optimizer = torch.optim.AdamW(
        [{"params": [t for t in p.values() if t.ndim == 2], "weight_decay": ADAMW["weight_decay"]},
         {"params": [t for t in p.values() if t.ndim == 1], "weight_decay": 0.0}],
        lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"], foreach=False)
    loss, grad_norm = [], []
    for _ in range(ADAMW["steps"]):
        optimizer.zero_grad(set_to_none=True)
        loss.append(backward(forward, c, p, data))
        norm = torch.sqrt(sum(t.grad.double().square().sum() for t in p.values())).item()
        grad_norm.append(norm)
        for t in p.values():
            t.grad *= min(1.0, ADAMW["max_norm"] / (norm + 1e-6))
        optimizer.step()
    return torch.tensor(loss, dtype=torch.float64), torch.tensor(grad_norm, dtype=torch.float64)


def pack(tensor):
    """float64 [7 + min(64, n)] digest of a tensor; README.md gives the layout."""
    x = tensor.detach().double().flatten()
    n = x.numel()
    sign = [torch.from_numpy(1.0 - 2.0 * (hashed(f"sign{j}", n) >> np.uint64(63)).astype(np.float64))
            for j in range(3)]
    argmax = int(x.abs().numpy().argmax())  # numpy: the first of equals
    head = [x.norm(), x.sum(), *((x * s).sum() for s in sign), x[argmax], float(argmax)]
    return torch.cat([torch.tensor(head, dtype=torch.float64), x[:: max(1, n // 64)][:64]])


def check(forward, c, p, data):
    """Compares gradients with central differences, at the largest element and at two others."""
    worst, step = 0.0, 1e-5
    with torch.no_grad():
        for name, t in p.items():
            flat, grad = t.view(-1), t.grad.flatten()
            for i in (int(grad.abs().argmax()), 0, grad.numel() // 2 + 1):
                old = flat[i].item()
                flat[i] = old + step
                up = sum(losses(forward, c, p, data)).item()
                flat[i] = old - step
                down = sum(losses(forward, c, p, data)).item()
                flat[i] = old
                worst = max(worst, abs((up - down) / (2 * step) - grad[i].item()) / grad.abs().max().item())
    print(f"  finite differences: worst error, relative to the tensor's largest gradient: {worst:.1e}")
    assert worst < 1e-5


def save(path, tensors, metadata):
    """Writes a safetensors file; the same content gives the same bytes (the library's order varies)."""
    header, chunks, start = {"__metadata__": metadata}, [], 0
    for name, t in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        chunks.append(t.contiguous().numpy().tobytes())
        header[name] = {"dtype": {8: "F64", 4: "F32"}[t.itemsize], "shape": list(t.shape),
                        "data_offsets": [start, start + len(chunks[-1])]}
        start += len(chunks[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def make(forward, shapes, c, path, with_check):
    data = batches()
    p = make_parameters(shapes, torch.float64)
    out = {"logits": forward(c, p, data[0][0]).detach().float(),
           "loss": torch.tensor([backward(forward, c, p, data)], dtype=torch.float64)}
    out |= {f"grad.{name}": pack(t.grad) for name, t in p.items()}
    print(f"{path.name}: {sum(t.numel() for t in p.values())} parameters, loss {out['loss'].item():.15g}")
    if with_check:
        check(forward, c, p, data)

    out["adamw.loss"], out["adamw.grad_norm"] = train(forward, c, p, data)
    out |= {f"final.{name}": pack(t) for name, t in p.items()}
    p32 = make_parameters(shapes, torch.float32)
    out["adamw32.loss"], out["adamw32.grad_norm"] = train(forward, c, p32, data)
    for key in ("loss", "grad_norm"):
        exact, single = out[f"adamw.{key}"], out[f"adamw32.{key}"]
        print(f"  {key}: {exact[0]:.9f} ... {exact[-1]:.9f};"
              f" float32 differs by at most {((single - exact) / exact).abs().max():.1e} of it")

    save(path, out, metadata={
        "config": json.dumps(c), "adamw": json.dumps(ADAMW),
        "data": json.dumps(dict(micro_batches=MICRO_BATCHES, batch=BATCH, time=TIME, valid=VALID)),
        "torch": torch.__version__, "made_by": "tests/reference/make_reference.py, on the CPU, float64"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("--check", action="store_true", help="try the gradients with finite differences")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    make(gpt2, gpt2_shapes(GPT2), GPT2, args.out / "gpt2_tiny.safetensors", args.check)
    make(llama, llama_shapes(LLAMA), LLAMA, args.out / "llama_tiny.safetensors", args.check)


if __name__ == "__main__":
    main()
