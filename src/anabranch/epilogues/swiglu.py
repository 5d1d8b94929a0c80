"""swiglu: silu(gate) * up (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.epilogues.base import Gated, register
from anabranch.epilogues.silu import Silu


@register
@dataclass(frozen=True)
class Swiglu(Gated):
    """``silu(gate) * up``."""

    name = "swiglu"
    inner = Silu()
