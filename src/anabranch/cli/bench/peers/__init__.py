"""One adapter a peer. Each module's ``load`` imports the peer and returns its variant, or raises."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from anabranch.cli.bench.variants import Variant
from anabranch.cli.failure import Failure

PEERS = {
    "loop": "torch loop",
    "grouped_mm": "torch grouped_mm",
    "compiled": "torch grouped_mm, compiled",
    "transformers": "transformers grouped_mm",
    "sonicmoe": "SonicMoE",
    "liger": "Liger",
    "moe_ops": "moe-ops",
    "unsloth": "unsloth",
    "scattermoe": "ScatterMoE",
}
"""What each module in this folder calls its variant."""
PLAIN = ("loop", "grouped_mm")
"""Those that need nothing but torch, and no compiler."""


def select(peers: str | None, device: str) -> list[str]:
    """Names of peers from ``none``, ``all``, or names with commas; None is what fits the device.

    Raises:
        Failure: a name of none.
    """
    if peers is None:
        return list(PLAIN if device == "cpu" else PEERS)
    if peers in ("none", "all"):
        return list(PEERS) if peers == "all" else []
    names = [name.replace("-", "_") for name in peers.split(",")]
    for name in names:
        if name not in PEERS:
            raise Failure(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    return names


def load(names: Sequence[str]) -> tuple[list[Variant], dict[str, str]]:
    """The variants of the peers that import here, and why the others do not."""
    found, absent = [], {}
    for name in names:
        try:
            found.append(importlib.import_module(f"{__name__}.{name}").load())
        except Exception as error:  # a peer may fail in any way: it is left out, and the rest goes on
            absent[PEERS[name]] = reason(error)
    return found, absent


def reason(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
