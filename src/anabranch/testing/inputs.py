"""Inputs for tests and benchmarks: routings as models make them, and tensors of every memory layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anabranch.testing.backends import here

__all__ = ["ROUTINGS", "STRIDES", "empty_patterns", "randn", "routing", "strided"]

ROUTINGS = ("even", "random", "zipf", "one_expert", "empty_first", "empty_last", "every_other", "duplicates")
"""Kinds of routing that :func:`routing` makes."""


def routing(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    kind: str = "random",
    *,
    dropped: float = 0.0,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(T, K) expert ids.

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: K.
        kind: ``even`` deals slots out in turn; ``random`` and ``zipf`` choose distinct experts, alike and by
            Zipf's law; ``one_expert`` sends all to the last; ``empty_first``, ``empty_last`` and
            ``every_other`` leave experts without rows; ``duplicates`` draws with replacement.
        dropped: fraction of slots whose id is out of range, below and above in turn.
        dtype: int32 or int64.
        device: where the ids live; None for :func:`~anabranch.testing.here`.
        generator: a CPU generator.
    """
    slots = num_tokens * top_k
    scores = torch.zeros(num_experts)
    if kind == "zipf":
        scores = -1.2 * torch.arange(1, num_experts + 1).log()
    elif kind in ("empty_first", "empty_last", "every_other") and num_experts > 1:
        empty = {"empty_first": slice(0, 1), "empty_last": slice(-1, None), "every_other": slice(0, None, 2)}
        scores[empty[kind]] = -math.inf
    elif kind not in ROUTINGS:
        raise ValueError(f"routing: kind: expected one of {', '.join(ROUTINGS)}, got {kind!r}")
    if kind == "even":
        ids = (torch.arange(slots) % num_experts).view(num_tokens, top_k)
    elif kind == "one_expert":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    elif kind == "duplicates" or top_k > int(scores.isfinite().sum()):
        ids = torch.multinomial(scores.softmax(0), max(slots, 1), replacement=True, generator=generator)
        ids = ids[:slots].view(num_tokens, top_k)
    else:
        # Gumbel noise makes top-k a draw without replacement.
        noise = -torch.rand(num_tokens, num_experts, generator=generator).clamp(1e-7, 1 - 1e-7).log()
        ids = (scores - noise.log()).topk(top_k, dim=-1).indices
    if dropped:
        lost = torch.randperm(slots, generator=generator)[: round(dropped * slots)]
        ids.view(-1)[lost] = torch.tensor([-1, num_experts]).repeat(slots)[: lost.numel()]
    return ids.to(here() if device is None else device, dtype)


def randn(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Normal numbers, drawn in fp64 on the CPU: the same for every dtype and device, but for rounding."""
    value = scale * torch.randn(*shape, dtype=torch.float64, generator=generator)
    return value.to(here() if device is None else device, dtype)


def _gap(value: Tensor) -> float:
    return math.nan if value.is_floating_point() else 2**30


def _transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT if value.dim() > 1 else _every_second(value)


def _offset(value: Tensor) -> Tensor:
    buffer = value.new_full((value.numel() + 3,), _gap(value))
    view = buffer[3:].view(value.shape)
    return view.copy_(value)


def _padded(value: Tensor) -> Tensor:
    buffer = value.new_full((*value.shape[:-1], value.shape[-1] + 5), _gap(value))
    return buffer[..., : value.shape[-1]].copy_(value)


def _every_second(value: Tensor) -> Tensor:
    buffer = value.new_full((*value.shape[:-1], 2 * value.shape[-1] + 1), _gap(value))
    return buffer[..., 1::2].copy_(value)


def _every_second_row(value: Tensor) -> Tensor:
    if value.dim() < 2:
        return _every_second(value)
    buffer = value.new_full((*value.shape[:-2], 2 * value.shape[-2] + 1, value.shape[-1]), _gap(value))
    return buffer[..., 1::2, :].copy_(value)


def _expanded(value: Tensor) -> Tensor:
    return value[:1].clone().expand(value.shape)


def _expanded_columns(value: Tensor) -> Tensor:
    return value[..., :1].clone().expand(value.shape)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda value: value.contiguous(),
    "transposed": _transposed,
    "offset": _offset,
    "padded": _padded,
    "every_second": _every_second,
    "every_second_row": _every_second_row,
    "expanded": _expanded,
    "expanded_columns": _expanded_columns,
}
"""Memory layouts by name. The gaps of a layout hold NaN, or 2**30 if it is of integers."""


def strided(value: Tensor, layout: str) -> Tensor:
    """``value`` in one of :data:`STRIDES`: same shape and, but for the two expanded ones, same numbers.

    The expanded ones repeat the first slice along the first dimension, or the first column: a stride of 0.
    """
    with torch.no_grad():
        return STRIDES[layout](value.detach())


def empty_patterns(num_experts: int, rows: int = 3) -> Iterator[list[int]]:
    """Counts for all 2**E patterns of empty experts; expert e has ``rows + e`` rows where it has any."""
    for pattern in itertools.product((False, True), repeat=num_experts):
        yield [rows + expert if full else 0 for expert, full in enumerate(pattern)]
