"""The ways to compute a moe_mlp that are compared: ours, and the peers that import here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import anabranch
from anabranch.cli.failure import Failure
from anabranch.dispatch import BACKENDS

Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]
OURS = "anabranch"


@dataclass(frozen=True)
class Variant:
    """One way to compute ``(x, gate_up, down, ids, weights) -> out``."""

    name: str
    run: Run
    pack: Callable[[Tensor, Tensor], Pair] | None = None
    """gate_up and down as this variant stores them; done once, outside what is timed."""
    unpack: Callable[[Tensor, Tensor], Pair] | None = None
    """Gradients of what pack made, as those of gate_up and down."""
    ids_dtype: torch.dtype = torch.int64
    tunes: bool = False
    """Compiles, or searches for its tiles, when it first meets a shape: for up to minutes."""
    waits: bool = False
    """Its forward waits for the device, so that a CUDA graph cannot hold it."""

    @property
    def is_ours(self) -> bool:
        """Whether it is this library."""
        return self.name.split(",")[0] == OURS


def ours(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """anabranch.moe_mlp."""
    return anabranch.moe_mlp(x, gate_up, down, ids, weights)


def own(backends: str | None) -> list[Variant]:
    """Ours: as it chooses itself, and with each backend named.

    Raises:
        Failure: a backend that there is not.
    """
    found = [Variant(OURS, ours)]
    for name in backends.split(",") if backends else ():
        if name not in BACKENDS:
            raise Failure(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
        found.append(Variant(f"{OURS}, {name}", _with(name)))
    return found


def _with(backend: str) -> Run:
    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return anabranch.moe_mlp(x, gate_up, down, ids, weights, backend=backend)

    return run
