"""gelu: z * Phi(z), with the Gaussian's exact distribution function (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, register


@register
@dataclass(frozen=True)
class Gelu(Epilogue):
    """``z * (1 + erf(z / sqrt(2))) / 2``."""

    name = "gelu"

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.gelu(z)

    def backward(self, grad: Tensor, z: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (torch.ops.aten.gelu_backward(grad, z),)
