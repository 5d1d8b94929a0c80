"""The forwards that the Triton and the Hopper backend remember: all of their launches, for calls that look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from anabranch import tuning
from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand, replay
from anabranch._backends.triton.prepared import REMEMBERED
from anabranch.ops.moe_mlp.call import MoeMlpCall
from anabranch.ops.route.call import Fields, Routing

Forward = Callable[[MoeMlpCall, Tensor, "Tensor | None"], "Sequence[Tensor] | None"]
"""Writes the output and h by launches alone, and returns the other tensors that these wrote, or None if it did more."""


@lru_cache(REMEMBERED)
def _remembered(*facts: Any) -> list[tuple[object, bool, replay.Replay | None]]:
    """Of forwards that look alike, one entry: what the tuner stood by when one was recorded, whether its launches
    route too, and the launches; None in their place if they cannot be made again."""
    return [(None, False, None)]


def forward(make: Forward, call: MoeMlpCall, out: Tensor, h: Tensor | None, routing: Routing) -> Fields:
    """Routes and calls ``make``, or makes the launches that both made for a call like this one if there was one.

    out and h are freshly allocated. Returns the fields of the layout, which ``make`` finds in its call.
    """
    ids, experts = call.expert_ids, call.down.shape[0]
    assert ids is not None
    standing = tuning.standing(call.device)
    if standing is None:  # a search may follow: recording would keep the tensors of all its trials
        fields = routing.topk(ids, experts)
        make(call.routed(fields), out, h)
        return fields
    known, maybe = operand.of, operand.maybe
    memory = _remembered(
        make, on.gpu(call.device), on.input_precision(call.dtype), known(call.x), known(call.gate_up),
        known(call.down), known(ids), known(call.expert_weights), maybe(call.gate_up_bias), maybe(call.down_bias),
        h is None, call.epilogue, call.transpose_weight, call.gate_layout, call.weight_on,
    )  # fmt: skip
    given = (call.x, call.gate_up, call.down, ids, call.expert_weights, call.gate_up_bias, call.down_bias)
    stood, routes, found = memory[0]
    if stood is not standing:
        with replay.recording() as recorded:
            fields = routing.topk(ids, experts)
            routes = bool(recorded.steps)
            temporaries = make(call.routed(fields), out, h)
        made = None if temporaries is None else replay.of(recorded, given, (out, h, *fields), temporaries)
        memory[0] = standing, routes, made
    elif found is None:
        fields = routing.topk(ids, experts)
        make(call.routed(fields), out, h)
    else:
        fields = routing.empty(ids, experts) if routes else routing.topk(ids, experts)
        found.run((*given, out, h, *fields))
    return fields
