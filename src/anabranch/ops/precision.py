"""What the operations compute in."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulator's dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
