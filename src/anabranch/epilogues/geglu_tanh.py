"""geglu_tanh: gelu_tanh(gate) * up (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.epilogues.base import Gated, register
from anabranch.epilogues.gelu_tanh import GeluTanh


@register
@dataclass(frozen=True)
class GegluTanh(Gated):
    """``gelu_tanh(gate) * up``."""

    name = "geglu_tanh"
    inner = GeluTanh()
