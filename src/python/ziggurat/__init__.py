"""Ziggurat: tensors and training larger than memory.

    Store              named tensors over host memory and NVMe, within budgets
    Tensor             one of them, cut into segments; acquire() gives a Lease
    Lease, Pin         access to a segment's bytes (NumPy, torch, DLPack), and the right that it stays at a tier
    ziggurat.torch     AdamW, Adam, Lion and SGD for PyTorch whose state lies in a store (needs torch)
    io_bench, io_tune  how fast drives are, and with which settings
    probe              what this machine has
    train              a training run in this process, with a callback for each step
    read_log           the log of a training run
    Error              and its classes: UsageError, IoError, MemoryLimitError, DeviceError, NumericError, ForkError

Start with help(ziggurat.Store) or help(ziggurat.torch.AdamW). Neither NumPy nor torch is needed to import this.
"""
from ._core import Lease, Pin, set_log_level
from ._core import version as __version__
from ._errors import (DeviceError, Error, ForkError, Interrupted, IoError, MemoryLimitError, NumericError,
                      UsageError)  # fmt: skip
from ._log import Log, read_log
from ._measure import io_bench, io_tune, probe
from ._records import BenchResult, Probe, Record, Statistics, TuneResult
from ._run import RunResult, train
from ._store import Store, Tensor, bytes_of
from ._views import numpy_view, torch_view

Lease.numpy, Lease.torch = numpy_view, torch_view
del numpy_view, torch_view

__all__ = [
    "Store", "Tensor", "Lease", "Pin", "train", "RunResult", "io_bench", "io_tune", "probe", "read_log", "Log",
    "Statistics", "BenchResult", "Probe", "TuneResult", "Record", "Error", "UsageError", "IoError",
    "MemoryLimitError", "DeviceError", "NumericError", "Interrupted", "ForkError", "set_log_level", "bytes_of",
    "__version__",
]  # fmt: skip
