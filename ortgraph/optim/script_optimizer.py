"""What optimizers for training scripts have in common."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ortgraph.errors import InputError, RuntimeSetupError
from ortgraph.ops import updates

TYPES = {torch.float32: updates.FLOAT32, torch.float16: updates.FLOAT16, torch.bfloat16: updates.BFLOAT16}


@functools.cache
def compiled() -> bool:
    """Whether the compiled updates can be used; where they cannot, a warning says why, once."""
    try:
        updates.load()
    except (RuntimeSetupError, OSError) as error:
        warnings.warn(f"FusedAdam and FusedLAMB run on PyTorch operators: {error}", RuntimeWarning, stacklevel=3)
        return False
    return True


def by_kernel(tensor: torch.Tensor) -> bool:
    """Whether the compiled functions can work on the tensor's memory (on a copy, where it is not contiguous)."""
    return tensor.device.type == "cpu" and tensor.dtype in TYPES and compiled()


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What a closure that evaluates the loss again returns, with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError when a gradient is sparse or complex, before anything is updated."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and (p.grad.is_sparse or p.is_complex()):
                raise InputError(
                    f"{type(optimizer).__name__} takes dense, real gradients", "use torch.optim.SparseAdam or AdamW"
                )


class Flat:
    """A tensor's memory in logical order: its own where it is contiguous, else a copy that is put back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._flat = self._tensor.contiguous()
        self.address = self._flat.data_ptr()

    def put_back(self) -> None:
        if self._flat is not self._tensor and self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat)
