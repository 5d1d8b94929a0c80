"""What may be rotated in place: elements in places of their own.

Whether tensors share elements is decided exactly, as q and k are often views of one projection.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.ops import checks

BUDGET = 4096
"""Steps of the search; ordinary views take a few dozen. One that runs out counts as overlapping."""


def check_inplace(op: str, q: Tensor, k: Tensor | None, **tables: Tensor | None) -> None:
    """Demands that q and k can be overwritten. Reads addresses, so it runs inside operators."""
    for name, value in (("q", q), ("k", k)):
        if value is None:
            continue
        if overlaps_itself(value):
            expected = "no two elements in one place of memory, with inplace"
            raise ArgumentError(op, name, expected=expected, got=f"strides {value.stride()}")
        checks.no_overlap(op, name, value, **tables)
    if k is not None and overlap(q, k):
        expected = "memory apart from q, with inplace"
        raise ArgumentError(op, "k", expected=expected, got="overlapping memory")


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may be one: each stride must step over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one dtype, neither overlapping itself, share an element."""
    if first.numel() == 0 or second.numel() == 0:
        return False
    # Element i of the first is element j of the second where sum(i * stride) - sum(j * stride') == distance.
    # Along each stride, i - j lies between these bounds.
    bounds: dict[int, tuple[int, int]] = {}
    for size, stride in zip(first.shape, first.stride(), strict=True):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = low, high + size - 1
    for size, stride in zip(second.shape, second.stride(), strict=True):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = low - (size - 1), high
    distance, rest = divmod(second.data_ptr() - first.data_ptr(), first.element_size())
    steps = sorted(
        ((stride, low, high) for stride, (low, high) in bounds.items() if low < high), reverse=True
    )
    return bool(rest) or _reaches(steps, distance, [BUDGET])


def _reaches(steps: Sequence[tuple[int, int, int]], distance: int, budget: list[int]) -> bool:
    """Whether some n within their bounds have ``sum(n * stride) == distance``."""
    budget[0] -= 1
    if budget[0] < 0:
        return True
    if not steps:
        return distance == 0
    (stride, low, high), *smaller = steps
    least = sum(s * lowest for s, lowest, _ in smaller)
    most = sum(s * highest for s, _, highest in smaller)
    # What n * stride leaves must be within reach of the smaller strides.
    low = max(low, -((most - distance) // stride))
    high = min(high, (distance - least) // stride)
    return any(_reaches(smaller, distance - n * stride, budget) for n in range(low, high + 1))
