"""silu: z * sigmoid(z) (Elfwing et al. 2017, Ramachandran et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, register


@register
@dataclass(frozen=True)
class Silu(Epilogue):
    """``z * sigmoid(z)``."""

    name = "silu"

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.silu(z)

    def backward(self, grad: Tensor, z: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (torch.ops.aten.silu_backward(grad, z),)
