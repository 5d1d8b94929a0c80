"""What is measured: shapes by name or by numbers, routings, and numbers of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from anabranch.cli.failure import Failure
from anabranch.ops.moe_mlp.cases import Case

ZIPF = 1.2
SMALL = 256
"""Up to so many tokens a forward is also replayed from a CUDA graph, and its time on the host is taken."""


@dataclass(frozen=True)
class Cell:
    """One measurement of all variants. ``part`` says what for: a shape, or a point of a sweep."""

    part: str
    shape: str
    case: Case
    dtype: torch.dtype
    exponent: float

    @property
    def routing(self) -> str:
        """In words."""
        return f"zipf {self.exponent:g}" if self.exponent else "random"

    @property
    def title(self) -> str:
        """In words, for messages."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.shape}, {self.case.tokens} tokens, {self.routing}, {dtype}"


def plan(
    shapes: Sequence[str],
    tokens: str | None,
    skew: str | None,
    dtypes: Sequence[torch.dtype],
    exponents: Sequence[float],
    cases: Mapping[str, Case],
) -> list[Cell]:
    """The cells, the most important first. Sweeps are of the first shape, in the first dtype.

    Raises:
        Failure: a shape or a list of numbers that is none.
    """
    found = {name: read_shape(name, cases) for name in shapes}
    cells = [
        Cell("shape", name, case, dtype, exponent)
        for name, case in found.items()
        for dtype in dtypes
        for exponent in exponents
    ]
    name, case = next(iter(found.items()))
    for count in read_numbers("--tokens", tokens):
        if count != int(count) or count < 1:
            raise Failure(f"--tokens takes whole numbers above 0, not {count:g}")
        cells.append(Cell("tokens", name, replace(case, tokens=int(count)), dtypes[0], exponents[0]))
    cells += [Cell("skew", name, case, dtypes[0], exponent) for exponent in read_numbers("--skew", skew)]
    return cells


def read_shape(text: str, cases: Mapping[str, Case]) -> Case:
    """A shape by its name, or T,H,I,E,K as numbers.

    Raises:
        Failure: it is neither.
    """
    if text in cases:
        return cases[text]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 5:
        raise Failure(f"there is no shape {text!r}; there are {', '.join(cases)}, or T,H,I,E,K as numbers")
    if min(sizes) < 1 or sizes[4] > sizes[3]:
        raise Failure(f"sizes are positive, and K at most E; got {text}")
    tokens, hidden, intermediate, experts, top_k = sizes
    return Case(tokens, hidden, intermediate, experts, top_k)


def read_numbers(option: str, text: str | None) -> list[float]:
    """Numbers with commas between them; none of None.

    Raises:
        Failure: something else.
    """
    if text is None:
        return []
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= number < 1e9 for number in numbers):
        raise Failure(f"{option} takes numbers with commas between them, not {text!r}")
    return numbers
