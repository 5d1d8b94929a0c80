"""The demo's model with its experts as a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from anabranch.cli.demo.model import Transformer, layers_of
from anabranch.cli.peers import moe_loop
from anabranch.nn import Experts


class LoopExperts(nn.Module):
    """:class:`anabranch.nn.Experts` as a loop, with the same parameters."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.gate_up, self.down = experts.gate_up, experts.down

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """As that of Experts."""
        return moe_loop(x, self.gate_up, self.down, expert_ids, expert_weights)


@contextmanager
def as_loop(model: Transformer) -> Iterator[None]:
    """Inside, the model's experts are loops."""
    kept = [(layer, layer.experts) for layer in layers_of(model)]
    for layer, experts in kept:
        # A layer takes whatever is called alike, though its type names Experts.
        layer.experts = cast(Experts, LoopExperts(experts))
    try:
        yield
    finally:
        for layer, experts in kept:
            layer.experts = experts
