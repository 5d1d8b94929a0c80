"""Calls that are remembered: all launches of one, made again for those that look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from anabranch import tuning
from anabranch._backends.triton import device as on
from anabranch._backends.triton import replay
from anabranch._backends.triton.operand import VECTOR
from anabranch._backends.triton.prepared import REMEMBERED
from anabranch._backends.triton.recording import recording
from anabranch.tuning.environment import variable

_ONCE = object()
"""In place of launches: there was one such call. Sizes that never come again are not worth a recording."""


@lru_cache(4 * REMEMBERED)
def _remembered(*facts: Any) -> list[Any]:
    """Of calls that look alike: what the tuner stood by at the last that did not repeat another, its launches, and
    what its results were in, a tuple or a list or neither; None for launches that cannot be made again."""
    return [None, None, None]


def results(
    kernel: Callable[..., Any], args: Sequence[Any], tensors: Sequence[Tensor | None], decides: Sequence[Any]
) -> Any:
    """``kernel(*args)``, or the same by the launches that it made for another call like this one.

    It returns tensors that it allocates. If it does more than allocate and launch, as where it looks into
    a tensor, it is called every time.

    Args:
        kernel: reads and writes nothing but ``tensors`` and what it allocates.
        args: its arguments.
        tensors: those among them, on one device. The first is not None.
        decides: whatever else among them, and anywhere, it decides by, but for the device, the tuner and how precise
            fp32 products are to be.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    standing = tuning.standing(device)
    # A search may follow, whose trials are launches too; or checks, which would be left out.
    if standing is None or variable("ANABRANCH_CHECK_VALUES"):
        return kernel(*args)
    facts = [kernel, on.gpu(device), on.input_precision(first.dtype), *decides]
    addresses: list[int | None] = []
    missing = 0
    for value in tensors:
        if value is None:
            facts.append(None)
            addresses.append(None)
            missing += 1
        else:
            address = value.data_ptr()
            facts += value.shape, value.stride(), value.dtype, address % VECTOR
            addresses.append(address)
    if len({*addresses}) + missing < len(addresses) + (missing > 0):
        facts.append(tuple(map(addresses.index, addresses)))  # one tensor, or its views, in several places
    entry = _remembered(*facts)
    stood, again, form = entry
    if stood is not standing:
        entry[:] = standing, _ONCE, None
        return kernel(*args)
    if again is None:
        return kernel(*args)
    if again is not _ONCE:
        found = again.run(tensors, addresses)
        return found[0] if form is None else form(found)
    with recording(tensors) as recorded:
        made = kernel(*args)
    form = type(made) if isinstance(made, (tuple, list)) else None
    entry[:] = standing, replay.of(recorded, tensors, [made] if form is None else made), form
    return made
