#!/usr/bin/env python3
"""What libraries make of matrices in 4 and 8 bits: checksums of their codes, scales and decoded elements.

Writes codes.txt next to this script (or into --out), a line for each array: its name and the CRC-32 of its bytes.
Matrices, codes and scales are not stored: they come from the hash of make_reference.py, of the names below.

    python make_codes.py

Needs torch, transformers, bitsandbytes, compressed-tensors and numpy; only the CPU is used.  README.md in this folder
says more.
"""

import argparse
import pathlib
import types
import zlib

import bitsandbytes.functional as bnb
import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from make_reference import hashed
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def numbers(name, *shape):
    """float32: 0.2 * (u - 0.5), u in [0, 1)."""
    u = (hashed(name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5
    return torch.from_numpy((0.2 * u).astype(np.float32)).view(shape)


def octets(name, *shape):
    return torch.from_numpy((hashed(name, int(np.prod(shape))) >> np.uint64(56)).astype(np.uint8)).view(shape)


def nf4(note):
    """Three rows of zeros, an odd number of elements, and a last block that is not whole."""
    x = numbers("nf4", 301, 701)
    x[3:6] = 0
    codes, state = bnb.quantize_4bit(x, quant_type="nf4", blocksize=64)
    note("nf4.codes", codes), note("nf4.scales", state.absmax)
    for name, dtype in TYPES.items():
        state.dtype = dtype
        note(f"nf4.{name}", bnb.dequantize_4bit(codes, state))
    # Scales that are codes themselves.
    blocks = state.absmax.numel()
    state.nested, state.offset = True, torch.tensor(0.05)
    state.absmax = octets("nf4.nested", blocks)
    state.state2 = types.SimpleNamespace(
        absmax=numbers("nf4.nested.scales", -(-blocks // 256)).abs(), code=numbers("nf4.nested.levels", 256),
        blocksize=256, dtype=torch.float32, nested=False)
    for name, dtype in TYPES.items():
        state.dtype = dtype
        note(f"nf4.nested.{name}", bnb.dequantize_4bit(codes, state))


def fp8(note):
    x = numbers("fp8", 256, 384)
    x[:128, 128:256] = 0
    quantizer = types.SimpleNamespace(quantization_config=types.SimpleNamespace(
        weight_block_size=(128, 128), scale_fmt="float", modules_to_not_convert=None))
    made = Fp8Quantize(quantizer)._quantize_one("x.weight", x)
    codes, scales = made["x.weight"], made["x.weight_scale_inv"]
    note("fp8.codes", codes.view(torch.uint8)), note("fp8.scales", scales)
    decode = Fp8Dequantize(quantizer)._dequantize_one
    codes = octets("fp8.codes", 256, 384).view(torch.float8_e4m3fn)
    codes = torch.where(codes.isnan(), torch.zeros_like(codes), codes)  # a NaN has no bits of its own
    powers = 96 + octets("fp8.powers", 2, 3) % 64
    for name in ("f32", "bf16"):
        note(f"fp8.{name}", decode(codes, scales, output_dtype=TYPES[name]))
        note(f"fp8.powers.{name}", decode(codes, powers, output_dtype=TYPES[name]))


def int4(note):
    """Groups of 128; scales in bf16, as files have them. Zero points are packed along the rows."""
    x = numbers("int4", 96, 512)
    args = QuantizationArgs(num_bits=4, group_size=128, strategy="group", symmetric=True)
    groups = x.view(96, 4, 128)
    scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), args)
    scales = scales.bfloat16()
    codes = quantize(x, scales.float(), zeros, args, dtype=torch.int8)
    packed = pack_to_int32(codes, 4)
    note("int4.codes", packed), note("int4.scales", scales.view(torch.int16))
    note("int4.f32", dequantize(codes, scales.float(), None, args))
    note("int4.bf16", dequantize(codes, scales, None, args))
    zeros = (octets("int4.zeros", 96, 4) % 16).to(torch.int8) - 8
    assert torch.equal(unpack_from_int32(pack_to_int32(zeros, 4, packed_dim=0), 4, zeros.shape, packed_dim=0), zeros)
    note("int4.packed_zeros", pack_to_int32(zeros, 4, packed_dim=0))
    args = QuantizationArgs(num_bits=4, group_size=128, strategy="group", symmetric=False)
    note("int4.zeros.f32", dequantize(codes, scales.float(), zeros, args))
    note("int4.zeros.bf16", dequantize(codes, scales, zeros, args))


def mxfp4(note):
    """[experts, rows, blocks, 16]; transformers turns the matrix, which is turned back here."""
    blocks, scales = octets("mxfp4", 1, 24, 5, 16), 96 + octets("mxfp4.scales", 1, 24, 5) % 64
    for name in ("f32", "bf16"):
        note(f"mxfp4.{name}", convert_moe_packed_tensors(blocks, scales, dtype=TYPES[name])[0].T)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    lines = [f"# tests/reference/make_codes.py: torch {torch.__version__.partition('+')[0]}, transformers "
             f"{transformers.__version__}, compressed-tensors {compressed_tensors.__version__}"]

    def note(name, tensor):
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        lines.append(f"{name} {zlib.crc32(content)}")

    for make in (nf4, fp8, int4, mxfp4):
        make(note)
    (args.out / "codes.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
