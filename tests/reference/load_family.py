#!/usr/bin/env python3
"""Loads a saved model with transformers and compares its logits with ours.

    python load_family.py DIR

DIR has config.json and the weights, tokens.i32 [rows * 24] and logits.f64
[rows * 24, vocabulary], which the test has written.  Prints the largest
difference; exit code 0: it is below 1e-10 of the largest logit; 1: it is not;
77: there is no torch or no transformers.
"""

import pathlib
import sys

import numpy as np

try:
    import torch
    import transformers
except ImportError as error:
    print(error)
    sys.exit(77)


def load(directory):
    """The model as transformers loads it, in float64, and what was amiss with the names of its weights."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if hasattr(loaded.config, "num_experts_per_tok"):  # other ways to compute experts have no float64
        loaded.set_experts_implementation("eager")
    state = {name: value.double() for name, value in loaded.state_dict().items()}
    torch.float32 = torch.float = torch.float64  # see make_families.py
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    model = type(loaded)(loaded.config).double().eval()
    model.load_state_dict(state)
    return model, {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}


def main():
    directory = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    model, wrong = load(directory)
    tokens = torch.from_numpy(np.fromfile(directory / "tokens.i32", dtype=np.int32).astype(np.int64)).view(-1, 24)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    ours = torch.from_numpy(np.fromfile(directory / "logits.f64", dtype=np.float64)).view(logits.shape)
    difference, largest = (logits - ours).abs().max().item(), ours.abs().max().item()
    print(f"{type(model).__name__}: difference {difference:.1e} of {largest:.2f}; names: {wrong or 'all known'}")
    return int(bool(wrong) or not difference <= 1e-10 * largest)


if __name__ == "__main__":
    sys.exit(main())
