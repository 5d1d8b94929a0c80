"""identity: z."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anabranch.epilogues.base import Epilogue, register


@register
@dataclass(frozen=True)
class Identity(Epilogue):
    """``z``."""

    name = "identity"

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return z

    def backward(self, grad: Tensor, z: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (grad,)
