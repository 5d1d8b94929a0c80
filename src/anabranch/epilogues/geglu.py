"""geglu: gelu(gate) * up (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.epilogues.base import Gated, register
from anabranch.epilogues.gelu import Gelu


@register
@dataclass(frozen=True)
class Geglu(Gated):
    """``gelu(gate) * up``."""

    name = "geglu"
    inner = Gelu()
