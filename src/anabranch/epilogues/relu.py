"""relu: max(z, 0)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, register


@register
@dataclass(frozen=True)
class Relu(Epilogue):
    """``max(z, 0)``, with gradient 0 at 0."""

    name = "relu"

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return torch.relu(z)

    def backward(self, grad: Tensor, z: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (torch.ops.aten.threshold_backward(grad, z, 0),)
