"""relu_squared: max(z, 0)**2 (So et al. 2021, Primer)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, register


@register
@dataclass(frozen=True)
class ReluSquared(Epilogue):
    """``max(z, 0)**2``."""

    name = "relu_squared"

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return torch.relu(z).square()

    def backward(self, grad: Tensor, z: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (2 * grad * torch.relu(z),)
