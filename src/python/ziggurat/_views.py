"""Views of a lease's bytes for NumPy and torch, neither of which this package needs."""

_NUMPY = {"f64": "f8", "f32": "f4", "f16": "f2", "i64": "i8", "i32": "i4", "u16": "u2", "u8": "u1"}


def numpy_view(lease, shape=None):
    """The lease as a NumPy array, without a copy."""
    import numpy as np

    dtype = _NUMPY.get(lease.dtype, "u2")
    if lease.dtype == "bf16":
        try:
            from ml_dtypes import bfloat16 as dtype
        except ImportError:
            pass  # its bits
    array = np.frombuffer(lease, dtype=dtype)
    return array if shape is None else array.reshape(shape)


def torch_view(lease, shape=None):
    """The lease as a torch tensor, without a copy."""
    import torch

    tensor = torch.from_dlpack(lease)
    return tensor if shape is None else tensor.view(shape)
