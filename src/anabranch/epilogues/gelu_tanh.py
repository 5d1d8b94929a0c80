"""gelu_tanh: the tanh approximation of gelu (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, register


@register
@dataclass(frozen=True)
class GeluTanh(Epilogue):
    """``z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))) / 2``."""

    name = "gelu_tanh"

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.gelu(z, approximate="tanh")

    def backward(self, grad: Tensor, z: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (torch.ops.aten.gelu_backward(grad, z, approximate="tanh"),)
