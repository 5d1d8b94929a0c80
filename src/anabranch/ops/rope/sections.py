"""mrope's sections: which of the three rows (temporal, height, width) each pair of channels, or channel, follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks

PAIR_ORDERS = ("blocked", "interleaved")
"""Sections count pairs; models rotate so."""
ORDERS = (*PAIR_ORDERS, "channels")


def check_sections(op: str, sections: object, order: str, pairs: int) -> tuple[int, ...]:
    """Demands three sizes that cover the pairs, or all channels, and, interleaved, fit between them."""
    if isinstance(sections, (str, torch.Tensor)) or not isinstance(sections, Sequence):
        raise ArgumentTypeError(op, "sections", expected="a list of three ints", got=type(sections).__name__)
    for i, size in enumerate(sections):
        checks.integer(op, f"sections[{i}]", size, minimum=0)
    sizes = tuple(sections)
    covered, what = (2 * pairs, "rotary_dim") if order == "channels" else (pairs, "rotary_dim / 2")
    if len(sizes) != 3 or sum(sizes) != covered:
        expected = f"three sizes that add up to {what} = {covered}"
        raise ArgumentError(
            op, "sections", expected=expected, got=f"{list(sizes)}, which add up to {sum(sizes)}"
        )
    if order == "interleaved":
        # Pair 3j + r is row r's j-th: the last such of rows 1 and 2 must exist.
        for row in (1, 2):
            last = 3 * (sizes[row] - 1) + row
            if last >= pairs:
                expected = f"sizes that can be interleaved: section {row} ends at pair {last} of {pairs}"
                raise ArgumentError(op, "sections", expected=expected, got=list(sizes))
    return sizes


def columns(sections: Sequence[int], order: str, *, second: bool = False) -> list[tuple[int, slice]]:
    """(row, the pairs that follow it), to be assigned in this order: a later one overwrites an earlier.

    Of the pairs' first channels, or with ``second`` of their second, which differ in the order "channels" alone.
    """
    if order == "interleaved":
        _, height, width = sections
        return [(0, slice(0, None)), (1, slice(1, 3 * height, 3)), (2, slice(2, 3 * width, 3))]
    bounds = list(accumulate(sections, initial=0))
    if order == "channels":
        pairs = bounds[-1] // 2
        before = pairs if second else 0
        bounds = [min(max(bound - before, 0), pairs) for bound in bounds]
    return [(row, slice(*bounds[row : row + 2])) for row in range(3)]
