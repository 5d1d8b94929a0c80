"""gpt_oss: the clamped gate of the gpt-oss models (OpenAI 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, finite, positive, register


@register
@dataclass(frozen=True)
class GptOss(Epilogue):
    """``(up + 1) * gate * sigmoid(alpha * gate)``, with gate at most limit and up within +-limit.

    A clamped operand has gradient 0 beyond its limit, and passes the gradient at the limit itself.
    """

    name = "gpt_oss"
    columns = 2
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        finite(self, "alpha")
        positive(self, "limit")

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * gate * torch.sigmoid(self.alpha * gate)

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        inside_gate, inside_up = gate <= self.limit, up.abs() <= self.limit
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        sigmoid = torch.sigmoid(self.alpha * gate)
        slope = sigmoid * (1 + self.alpha * gate * (1 - sigmoid))
        return grad * (up + 1) * slope * inside_gate, grad * gate * sigmoid * inside_up
