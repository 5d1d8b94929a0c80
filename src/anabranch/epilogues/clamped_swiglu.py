"""clamped_swiglu: SwiGLU of operands clamped as gpt-oss clamps them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anabranch.epilogues.base import Epilogue, positive, register
from anabranch.epilogues.swiglu import Swiglu

_SWIGLU = Swiglu()


@register
@dataclass(frozen=True)
class ClampedSwiglu(Epilogue):
    """``silu(gate) * up``, with gate at most limit and up within +-limit.

    A clamped operand has gradient 0 beyond its limit, and passes the gradient at the limit itself.
    """

    name = "clamped_swiglu"
    columns = 2
    limit: float = 7.0

    def __post_init__(self) -> None:
        positive(self, "limit")

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        return _SWIGLU.forward(gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit))

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        d_gate, d_up = _SWIGLU.backward(grad, gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit))
        return d_gate * (gate <= self.limit), d_up * (up.abs() <= self.limit)
