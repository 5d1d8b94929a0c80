"""mrope's sections: which of the three rows (temporal, height, width) each pair of channels follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks

ORDERS = ("blocked", "interleaved")


def check_sections(op: str, sections: object, order: str, pairs: int) -> tuple[int, ...]:
    """Demands three sizes that cover the pairs and, interleaved, fit between them."""
    if isinstance(sections, (str, torch.Tensor)) or not isinstance(sections, Sequence):
        raise ArgumentTypeError(op, "sections", expected="a list of three ints", got=type(sections).__name__)
    for size in sections:
        checks.integer(op, "sections", size, minimum=0)
    sizes = tuple(sections)
    if len(sizes) != 3 or sum(sizes) != pairs:
        expected = f"three sizes that add up to rotary_dim / 2 = {pairs}"
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


def columns(sections: Sequence[int], order: str) -> list[tuple[int, slice]]:
    """(row, the pairs that follow it), to be assigned in this order: a later one overwrites an earlier."""
    if order == "interleaved":
        _, height, width = sections
        return [(0, slice(0, None)), (1, slice(1, 3 * height, 3)), (2, slice(2, 3 * width, 3))]
    first, second = sections[0], sections[0] + sections[1]
    return [(0, slice(0, first)), (1, slice(first, second)), (2, slice(second, second + sections[2]))]
