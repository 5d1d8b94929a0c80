"""reglu: relu(gate) * up (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.epilogues.base import Gated, register
from anabranch.epilogues.relu import Relu


@register
@dataclass(frozen=True)
class Reglu(Gated):
    """``relu(gate) * up``."""

    name = "reglu"
    inner = Relu()
