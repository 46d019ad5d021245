#!/usr/bin/env python3
"""Tiny Llamas whose matrices are coded in 4 or 8 bits, and golden values of adapters beside them.

For each format, in coded/NAME next to this script (or in --out): a directory as the format's own library saves it
(bitsandbytes, compressed-tensors, transformers' FP8; of GPTQ and AWQ, whose libraries want a GPU, as their files are
documented), the elements that the library decodes, and PEFT's logits, loss, gradients of all A and B and ten AdamW steps
over these elements in float64, as make_lora.py has them.

    python make_coded.py [NAME ...]

Also trains NF4 by transformers, PEFT and bitsandbytes themselves, in float32, and says how far that is from the golden
values. Needs torch, transformers, peft, bitsandbytes, compressed-tensors, accelerate and numpy; only the CPU is used.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import types

HERE = pathlib.Path(__file__).parent
SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
             attention_dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager",
             rope_parameters=dict(rope_type="default", rope_theta=1e4))
ADAPTER = dict(r=3, lora_alpha=5, target_modules="all-linear")
NAMES = ["nf4", "nf4_double", "fp8", "fp8_rows", "int4", "int4_zeros", "mxfp4", "gptq", "gptq_v2", "awq"]


def plain_model():
    """In bf16, filled as make_families.py fills models."""
    import numpy as np
    import torch
    import transformers
    from make_reference import hashed

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, p in model.named_parameters():
            u = (hashed(name, p.numel()) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5
            p.copy_(torch.from_numpy((1.0 if "norm.weight" in name else 0.0) + 0.4 * u).view(p.shape))
    return model.to(torch.bfloat16).eval()


def matrices(model):
    """The weights that are coded: all of the blocks' linear layers."""
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith("_proj.weight")}


def write(folder, model, tensors, quantization):
    """tensors: all that the file has in place of the coded matrices."""
    from safetensors.torch import save_file

    coded = matrices(model)
    kept = {n: p.detach() for n, p in model.named_parameters() if n not in coded}
    save_file({n: t.contiguous() for n, t in (kept | tensors).items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def make_nf4(folder, model, double=False):
    """Saved by transformers. Double: scales that are codes, too.

    In float32, since backward, unlike forward, rounds elements to the type that they had before they were coded.
    """
    import bitsandbytes.functional as bnb
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        coded = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, device_map="cpu",
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
                bnb_4bit_compute_dtype=torch.float32))
    coded.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return {n + ".weight": bnb.dequantize_4bit(m.weight.data, m.weight.quant_state)
            for n, m in coded.named_modules() if hasattr(getattr(m, "weight", None), "quant_state")}


def make_fp8(folder, model):
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = types.SimpleNamespace(quantization_config=types.SimpleNamespace(
        weight_block_size=(16, 32), scale_fmt="float", modules_to_not_convert=None))
    tensors, elements = {}, {}
    for name, weight in matrices(model).items():
        made = Fp8Quantize(quantizer)._quantize_one(name, weight)
        tensors |= made
        elements[name] = Fp8Dequantize(quantizer)._dequantize_one(
            made[name], made[name.replace(".weight", ".weight_scale_inv")], output_dtype=torch.float32)
    write(folder, model, tensors, {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic", "fmt": "e4m3"})
    return elements


def make_compressed(folder, model, compressor, weights, form):
    import torch
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    def exact(scales):
        return scales.float() if scales.is_floating_point() else scales

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors, elements = {}, {}
    for name, weight in matrices(model).items():
        group = weights.group_size or weight.shape[1]
        groups = weight.view(weight.shape[0], -1, group)
        scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), weights)
        state = {"weight": weight, "weight_scale": scales.to(weight.dtype)}
        if not weights.symmetric:
            state["weight_zero_point"] = zeros.to(torch.int8)
        packed = compressor.compress(state, scheme)
        module = name.removesuffix("weight")
        tensors |= {module + key: value for key, value in packed.items()}
        # Elements take the type of the scales.
        elements[name] = compressor.decompress(packed | {"weight_scale": exact(packed["weight_scale"])}, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}
    write(folder, model, tensors, {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
                                   "ignore": ["lm_head"], "quantization_status": "compressed"})
    return elements


def make_int4(folder, model, symmetric=True):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=symmetric)
    return make_compressed(folder, model, PackedQuantizationCompressor, args, "pack-quantized")


def make_mxfp4(folder, model):
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=4, type="float", group_size=32, strategy="group", symmetric=True,
                            scale_dtype=torch.uint8, zp_dtype=torch.uint8)
    return make_compressed(folder, model, MXFP4PackedCompressor, args, "mxfp4-pack-quantized")


def make_fp8_rows(folder, model):
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    return make_compressed(folder, model, FloatQuantizationCompressor, args, "float-quantized")


def rounded_codes(weight, groups, group_count):
    """Codes 0 to 15, scales (float16) and zero points for each row and group of columns: [rows, cols], [rows, groups]."""
    import torch

    w = weight.float()
    scales, zeros = torch.zeros(w.shape[0], group_count), torch.zeros(w.shape[0], group_count)
    for g in range(group_count):
        part = w[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / 15).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(1, 15)
    codes = (w / scales[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    elements = (codes - zeros[:, groups]) * scales[:, groups]
    return codes.int(), scales.half(), zeros.int(), elements


def packed(codes, order=range(8)):
    """[n, 8 * m] -> int32 [n, m]: half byte i of a word has column order[i] of its eight."""
    import numpy as np

    eights = codes.numpy().astype(np.uint32).reshape(codes.shape[0], -1, 8)
    words = sum(eights[:, :, column] << np.uint32(4 * i) for i, column in enumerate(order))
    import torch

    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def make_gptq(folder, model, version=1):
    """Version 1: columns in groups by chance (desc_act); version 2: one after the other."""
    import numpy as np
    import torch
    from make_reference import hashed

    tensors, elements = {}, {}
    for name, weight in matrices(model).items():
        cols, group = weight.shape[1], 32
        groups = torch.arange(cols, dtype=torch.int32) // group
        if version == 1:
            groups = groups[torch.from_numpy(np.argsort(hashed(name + ".order", cols)))]
        codes, scales, zeros, elements[name] = rounded_codes(weight, groups, cols // group)
        module = name.removesuffix("weight")
        tensors[module + "qweight"] = packed(codes).T
        tensors[module + "qzeros"] = packed((zeros - (1 if version == 1 else 0)).T)
        tensors[module + "scales"] = scales.T
        tensors[module + "g_idx"] = groups
        tensors[module + "bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)  # as some programs write it
    write(folder, model, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": version == 1, "sym": False,
                                   "checkpoint_format": "gptq" if version == 1 else "gptq_v2"})
    return elements


def make_awq(folder, model):
    import torch

    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors, elements = {}, {}
    for name, weight in matrices(model).items():
        cols, group = weight.shape[1], 32
        codes, scales, zeros, elements[name] = rounded_codes(weight, torch.arange(cols) // group, cols // group)
        module = name.removesuffix("weight")
        tensors[module + "qweight"], tensors[module + "qzeros"] = packed(codes.T, order), packed(zeros.T, order)
        tensors[module + "scales"] = scales.T
    write(folder, model, tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True})
    return elements


MAKERS = {"nf4": make_nf4, "nf4_double": lambda f, m: make_nf4(f, m, True), "fp8": make_fp8, "fp8_rows": make_fp8_rows,
          "int4": make_int4, "int4_zeros": lambda f, m: make_int4(f, m, False), "mxfp4": make_mxfp4, "gptq": make_gptq,
          "gptq_v2": lambda f, m: make_gptq(f, m, 2), "awq": make_awq}


def make_files(name, folder, decoded):
    """The directory of a model, and the decoded elements in float32 for the second part."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model = plain_model()
    elements = MAKERS[name](folder, model)
    assert elements.keys() == matrices(model).keys(), elements.keys()
    error = max((elements[n].float() - w.float()).abs().max().item() for n, w in matrices(model).items())
    print(f"{name}: largest error {error:.3g} of weights up to 0.2")
    weights = {n: p.detach().float() for n, p in model.named_parameters()} | {n: e.float() for n, e in elements.items()}
    save_file({n: w.contiguous().clone() for n, w in weights.items()}, decoded)


def adapted_model(model):
    """With adapters from the hash of their names, which alone are trained."""
    import numpy as np
    import peft
    import torch
    from make_reference import hashed

    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTER), autocast_adapter_dtype=False).eval()
    trained = [(n.removeprefix("base_model.model.").replace(".default", ""), p) for n, p in adapted.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for n, p in trained:
            u = torch.from_numpy((hashed(n, p.numel()) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5)
            p.copy_((0.4 * u).view(p.shape))
    return adapted, trained


def make_values(name, folder, decoded):
    """PEFT in float64 over the decoded elements."""
    from make_families import backward, batches, digest, logits_of, train  # makes float32 mean float64
    from make_lora import Trained

    import numpy as np
    import peft
    import torch
    import transformers
    from make_reference import save
    from safetensors.numpy import load_file

    torch.set_num_threads(1)
    weights = load_file(decoded)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.float64)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(torch.from_numpy(weights[n].astype(np.float64)))
    adapted, trained = adapted_model(model)
    data = batches()
    values = {f"decoded.{n}": digest(torch.from_numpy(w.astype(np.float64))) for n, w in weights.items() if n.endswith("_proj.weight")}
    values["logits"] = digest(logits_of(adapted, data[0][0]))
    values["loss"] = torch.tensor([backward(adapted, data)])
    values |= {f"grad.{n}": digest(p.grad) for n, p in trained}
    values["adamw.loss"], values["adamw.grad_norm"] = train(Trained(adapted, trained), data)
    values |= {f"final.{n}": digest(p) for n, p in trained}
    print(f"{name}: loss {values['loss'].item():.15g}, {values['adamw.loss'][-1]:.9f} after ten steps")
    kept = dict(peft_type="LORA", lora_dropout=0.0, use_rslora=False, bias="none", r=ADAPTER["r"], lora_alpha=ADAPTER["lora_alpha"],
                target_modules=sorted(adapted.peft_config["default"].target_modules))
    save(folder / "values.safetensors", values, metadata={
        "adapter": json.dumps(kept), "peft": peft.__version__, "transformers": transformers.__version__,
        "torch": torch.__version__, "made_by": "tests/reference/make_coded.py, on the CPU, float64"})


def check_bitsandbytes(folder, values):
    """Loss and gradients of the directory as transformers, PEFT and bitsandbytes compute them, in float32."""
    import numpy as np
    import torch
    import transformers
    from make_reference import IGNORE, hashed
    from safetensors.torch import load_file

    golden = load_file(values)
    adapted, trained = adapted_model(transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", attn_implementation="eager"))
    total, valid = 0.0, [41, 17]
    ids = [(hashed(n, 96) % np.uint64(97)).astype(np.int64).reshape(2, 48) for n in ("tokens", "targets")]
    for m, count in enumerate(valid):
        tokens, targets = torch.from_numpy(ids[0][m]).view(2, 24), torch.from_numpy(ids[1][m]).clone()
        targets[count:] = IGNORE
        logits = adapted(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum") / sum(valid)
        loss.backward()
        total += loss.item()
    worst = max(abs(p.grad.double().norm().item() - golden[f"grad.{n}"][0].item()) / golden[f"grad.{n}"][0].item() for n, p in trained)
    difference = abs(total - golden["loss"].item())
    print(f"{folder.name}: bitsandbytes in float32 differs by {difference:.1e} in the loss, {worst:.1e} in norms of gradients")
    assert difference < 1e-6 and worst < 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "coded")
    parser.add_argument("--part", choices=("files", "values", "check"), help="for this script itself: one part, in a process of its own")
    parser.add_argument("--decoded", type=pathlib.Path)
    args = parser.parse_args()
    for name in args.names:
        folder = args.out / name
        if args.part == "files":
            make_files(name, folder, args.decoded)
        elif args.part == "values":
            make_values(name, folder, args.decoded)
        elif args.part == "check":
            check_bitsandbytes(folder, folder / "values.safetensors")
        else:
            with tempfile.TemporaryDirectory() as scratch:
                for part in ("files", "values") + ("check",) * name.startswith("nf4"):
                    subprocess.run([sys.executable, "-B", __file__, name, "--out", args.out, "--part", part, "--decoded",
                                    pathlib.Path(scratch) / "decoded.safetensors"], check=True)


if __name__ == "__main__":
    main()
