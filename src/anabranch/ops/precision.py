"""What the operations compute in: the accumulator's dtype, and what autocast asks for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_AS_IT_IS = nullcontext()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulator's dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device. The meta device knows none, and asking for it would raise."""
    if not torch._C._is_any_autocast_enabled():  # which is asked in a tenth of the time
        return False
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def cast_like_matmul(first: Tensor, *others: Any) -> tuple[Any, ...]:
    """Under autocast, casts floating tensors (but fp64) as torch.matmul's operands are cast."""
    values = (first, *others)
    if not autocasts(first.device):
        return values
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() and v.dtype != torch.float64 else v
        for v in values
    )


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside an operator the casts are made already: what it calls must not cast again."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else _AS_IT_IS
