"""Views of a lease's bytes for NumPy and torch, neither of which this package needs: the lease's methods of these names.

They are no part of the C++ module, since Python ends threads in the middle of its own code when the interpreter ends,
which C++ under that code would not survive.
"""

_NUMPY = {"f64": "f8", "f32": "f4", "f16": "f2", "i64": "i8", "i32": "i4", "u16": "u2", "u8": "u1"}


def numpy_view(self, shape=None):
    """The bytes as a NumPy array, without a copy: of the given shape, or flat. bf16 comes as
    ml_dtypes.bfloat16 where that package is installed, else as the bits (uint16)."""
    import numpy as np

    dtype = _NUMPY.get(self.dtype, "u2")
    if self.dtype == "bf16":
        try:
            from ml_dtypes import bfloat16 as dtype
        except ImportError:
            pass  # its bits
    array = np.frombuffer(self, dtype=dtype)
    return array if shape is None else array.reshape(shape)


def torch_view(self, shape=None):
    """The bytes as a torch tensor, without a copy: of the given shape, or flat. A tensor of a lease
    for reading must not be written: torch cannot know."""
    import torch

    tensor = torch.from_dlpack(self)
    return tensor if shape is None else tensor.view(shape)
