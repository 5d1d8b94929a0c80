"""What the Triton backends have to say to explain()."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor


def load_path(refusal: str | None) -> str:
    """How tiles of an operand are loaded or stored, from the reason against the tensor memory accelerator."""
    return "TMA" if refusal is None else f"pointers, as {refusal}"


def expert_rows(offsets: Tensor, num_rows: int) -> list[int]:
    """How many rows each expert has. Waits for the device."""
    stops = [min(max(stop, 0), num_rows) for stop in offsets.tolist()]
    return [max(0, stop - start) for start, stop in pairwise(stops)]


def padding(products: Iterable[tuple[Iterable[int], int]]) -> float | None:
    """Share of padding in the rows that are computed, for the rows of every matrix and of a tile in each product."""
    present = computed = 0
    for matrices, block in products:
        for rows in matrices:
            present += rows
            computed += -(-rows // block) * block
    return 1 - present / computed if computed else None
