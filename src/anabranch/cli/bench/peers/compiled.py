"""torch's grouped product on sorted rows, under torch.compile."""

import types

import torch
from torch import Tensor

from anabranch.cli import peers
from anabranch.cli.bench.variants import Variant

STATIC = 3
"""So many shapes get code of their own, within torch's limit of versions; those of a sweep share dynamic code."""


def load() -> Variant:
    """Compiles at its first use of a shape."""
    if not peers.has_grouped_mm():
        raise ImportError("this torch has no torch.nn.functional.grouped_mm")
    layer = peers.moe_grouped_mm
    # A code object of its own, for torch counts the versions of each.
    code = layer.__code__.replace(co_name="moe_grouped_mm_of_any_size")
    any_size = torch.compile(types.FunctionType(code, layer.__globals__), dynamic=True)
    one_size = torch.compile(layer, dynamic=False)
    known: set[torch.Size] = set()

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if len(known) < STATIC:
            known.add(torch.Size((*x.shape, *gate_up.shape)))
        static = torch.Size((*x.shape, *gate_up.shape)) in known
        return (one_size if static else any_size)(x, gate_up, down, ids, weights)

    return Variant("torch grouped_mm, compiled", run, tunes=True)
