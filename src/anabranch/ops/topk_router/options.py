"""How to choose experts: what may be asked for, checked for the function and for modules that keep it."""

from __future__ import annotations

import torch

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks

SCORES = ("softmax", "sigmoid")
ORDERS = ("score_then_topk", "topk_then_score")


def check_options(
    op: str,
    num_experts: int,
    k: int,
    *,
    score: str,
    order: str,
    num_groups: int | None,
    top_groups: int | None,
    scaling: float,
    k_name: str = "k",
) -> None:
    """Demands options that fit E experts; ``k_name`` is what the caller calls k."""
    checks.integer(op, k_name, k, minimum=1)
    if k > num_experts:
        raise ArgumentError(op, k_name, expected=f"at most E = {num_experts} experts", got=k)
    checks.choice(op, "score", score, SCORES)
    checks.choice(op, "order", order, ORDERS)
    if isinstance(scaling, bool) or not isinstance(scaling, (int, float, torch.SymFloat)):
        raise ArgumentTypeError(op, "scaling", expected="a float", got=type(scaling).__name__)
    if isinstance(scaling, int) and abs(scaling) > 2**63:
        raise ArgumentError(op, "scaling", expected="a number that a float can hold", got="a larger one")
    if num_groups is None or top_groups is None:
        for name, value in (("num_groups", num_groups), ("top_groups", top_groups)):
            if value is not None:
                raise ArgumentError(
                    op, name, expected="num_groups and top_groups, or neither", got="one alone"
                )
        return
    checks.integer(op, "num_groups", num_groups, minimum=1)
    checks.integer(op, "top_groups", top_groups, minimum=1)
    if num_experts % num_groups:
        raise ArgumentError(op, "num_groups", expected=f"a divisor of E = {num_experts}", got=num_groups)
    if top_groups > num_groups:
        raise ArgumentError(op, "top_groups", expected=f"at most num_groups = {num_groups}", got=top_groups)
    left = top_groups * (num_experts // num_groups)
    if k > left:
        expected = f"groups of at least {k_name} = {k} experts together"
        raise ArgumentError(op, "top_groups", expected=expected, got=f"{top_groups} groups of {left} experts")
