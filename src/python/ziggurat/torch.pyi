from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer

from . import Record, Store
from ._trainer import TrainerCallback as TrainerCallback, trainer_optimizer as trainer_optimizer

_Size = int | str
_Overlap = Literal["step", "forward", "backward"]
_State = Literal["fp32", "split", "bf16", "int8"]
_Drives = Mapping[Any, _Size] | Iterable[tuple[Any, _Size]]
_Params = Iterable[Any]

class _StoredOptimizer(Optimizer):
    @property
    def store(self) -> Store: ...
    @property
    def grad_norm(self) -> float | None: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any: ...
    def flush(self) -> None: ...
    def attach(self, model: torch.nn.Module) -> list[Any]: ...
    def state_bytes(self) -> int: ...
    def above_limit(self) -> bool: ...
    def save(self, directory: Any) -> str: ...
    def load(self, path: Any) -> None: ...
    def close(self) -> None: ...

class AdamW(_StoredOptimizer):
    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        store: Store | None = None,
        host_bytes: _Size | None = None,
        drives: _Drives = (),
        state: _State = "fp32",
        overlap: _Overlap = "step",
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        segment_bytes: _Size = ...,
        state_dict_limit: _Size | None = None,
        seed: int = 0,
    ) -> None: ...

class Adam(AdamW):
    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        **options: Any,
    ) -> None: ...

class Lion(_StoredOptimizer):
    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        **options: Any,
    ) -> None: ...

class SGD(_StoredOptimizer):
    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        **options: Any,
    ) -> None: ...

class Stored:
    """Parameters, gradients and detached values whose bytes lie in a store; also torch.Tensor."""

class lent:
    def __init__(self, *tensors: torch.Tensor, mode: Literal["read", "write", "overwrite"] = "read") -> None: ...
    def __enter__(self) -> lent: ...
    def __exit__(self, *error: object) -> None: ...

class OffloadStatistics(Record): ...

class Offloaded:
    model: torch.nn.Module
    @property
    def store(self) -> Store: ...
    def statistics(self) -> OffloadStatistics: ...
    def explain(self, name: str | None = None) -> str: ...
    def close(self, restore: bool = True) -> None: ...
    def __enter__(self) -> Offloaded: ...
    def __exit__(self, *error: object) -> None: ...

def offload(
    model: torch.nn.Module,
    *,
    store: Store | None = None,
    host_bytes: _Size | None = None,
    drives: _Drives = (),
    device: str | torch.device | None = None,
    device_bytes: _Size | None = None,
    files: Any = None,
    min_bytes: _Size = ...,
    gradient_dtype: torch.dtype | None = None,
) -> Offloaded: ...
def empty_parameters() -> AbstractContextManager[None]: ...

class offload_activations(ContextDecorator):
    def __init__(
        self,
        store: Store,
        *,
        min_bytes: _Size = ...,
        lowest: Literal["nvme", "host"] = "nvme",
        skip: Callable[[torch.Tensor], bool] = ...,
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
