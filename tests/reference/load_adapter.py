#!/usr/bin/env python3
"""Loads saved adapters with PEFT, compares the model's logits with ours, and saves the adapters again.

    python load_adapter.py BASE ADAPTER OUT

BASE is as for load_family.py: tokens.i32 and logits.f64 are those of the model
with its adapters.  Prints the largest difference; exit code 0: it is below
1e-10 of the largest logit; 1: it is not; 77: there is no torch or no peft.
"""

import pathlib
import sys

import numpy as np

try:
    import peft
    import torch
    import transformers
except ImportError as error:
    print(error)
    sys.exit(77)


def main():
    base, adapter, out = (pathlib.Path(path) for path in sys.argv[1:4])
    torch.set_num_threads(1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if hasattr(loaded.config, "num_experts_per_tok"):
        loaded.set_experts_implementation("eager")
    adapted = peft.PeftModel.from_pretrained(loaded, adapter)
    adapted.save_pretrained(out)
    state = {name: value.double() for name, value in adapted.state_dict().items()}
    torch.float32 = torch.float = torch.float64  # see make_families.py
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    fresh = type(loaded)(loaded.config).double()
    model = peft.get_peft_model(fresh, adapted.peft_config["default"], autocast_adapter_dtype=False).double().eval()
    wrong = model.load_state_dict(state, strict=False)
    tokens = torch.from_numpy(np.fromfile(base / "tokens.i32", dtype=np.int32).astype(np.int64)).view(-1, 24)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    ours = torch.from_numpy(np.fromfile(base / "logits.f64", dtype=np.float64)).view(logits.shape)
    difference, largest = (logits - ours).abs().max().item(), ours.abs().max().item()
    names = wrong.missing_keys + wrong.unexpected_keys
    print(f"{type(loaded).__name__}: difference {difference:.1e} of {largest:.2f}; names: {names or 'all known'}")
    return int(bool(names) or not difference <= 1e-10 * largest)


if __name__ == "__main__":
    sys.exit(main())
