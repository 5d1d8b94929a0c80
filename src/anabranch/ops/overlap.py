"""Whether tensors share memory, decided exactly: q and k, or two outputs, are often views of one buffer.

All of it reads addresses, so it runs inside operators, not in traced code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from anabranch.errors import ArgumentError

BUDGET = 4096
"""Steps of the search; ordinary views take a few dozen. One that runs out counts as overlapping."""


def no_overlap(op: str, argument: str, out: Tensor, **others: Tensor | None) -> None:
    """Demands that each element of an output has memory of its own, apart from that of the others."""
    if overlaps_itself(out):
        expected = "no two elements in one place of memory"
        raise ArgumentError(op, argument, expected=expected, got=f"strides {out.stride()}")
    for name, value in others.items():
        if value is not None and overlap(out, value):
            raise ArgumentError(op, argument, expected=f"memory apart from {name}", got="overlapping memory")


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
    """Whether two tensors share a byte."""
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    start, other_start = first.data_ptr(), second.data_ptr()
    # Most tensors lie apart as a whole, which is quick to see.
    if start + _reach(first) <= other_start or other_start + _reach(second) <= start:
        return False
    # Byte i of the first is byte j of the second where sum(i * stride) - sum(j * stride') == distance.
    # Along each stride, i - j lies between these bounds.
    bounds: dict[int, tuple[int, int]] = {}
    for size, stride in _bytes(first):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = low, high + size - 1
    for size, stride in _bytes(second):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = low - (size - 1), high
    steps = sorted(((stride, low, high) for stride, (low, high) in bounds.items()), reverse=True)
    return _reaches(steps, other_start - start, [BUDGET])


def _reach(tensor: Tensor) -> int:
    """Bytes from the first to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Size and stride of each dimension that leads from byte to byte."""
    width = tensor.element_size()
    yield width, 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride > 0:
            yield size, stride * width


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
