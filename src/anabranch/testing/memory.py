"""Hostile memory: what nobody wrote holds NaN, and what nobody may write is watched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anabranch.testing.backends import here

__all__ = ["guard_band", "poison"]

_NAN_BITS = 0x7FFF
"""Repeated, these 16 bits are NaN in fp16, bf16, fp32 and fp64, and a huge number in int32 and int64."""
_SIZES = tuple(2**power for power in range(9, 25))


def poison(device: torch.device | str | None = None, *like: Tensor, copies: int = 2) -> None:
    """Leaves NaN in the memory that the next allocations on ``device`` are likely to get.

    Blocks of the byte sizes of ``like`` (the outputs to come), and on an accelerator of the powers of two up
    to 16 MiB too, are filled and handed back to the allocator. A caching allocator returns them as they are.
    The CPU's gives big blocks back to the system, which clears them; there, tests poison allocation itself.
    """
    device = here() if device is None else torch.device(device)
    sizes = [value.numel() * value.element_size() for value in like]
    if device.type != "cpu":
        sizes.extend(_SIZES)
    blocks = [
        torch.full(((size + 1) // 2,), _NAN_BITS, dtype=torch.int16, device=device)
        for size in sorted(sizes, reverse=True)
        for _ in range(copies)
    ]
    del blocks


def guard_band(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    *,
    sentinel: float = 123.0,
    band: int = 16,
    columns: int = 0,
) -> tuple[Tensor, Callable[[], None]]:
    """A tensor inside a larger buffer, and a check that the rest of the buffer is as it was.

    Args:
        shape: of the tensor, one dimension or more.
        dtype: of the tensor.
        device: of the tensor; None for :func:`~anabranch.testing.here`.
        sentinel: what the buffer holds around it. The tensor itself starts as NaN, or huge if it is integral.
        band: elements before and after it, or rows if it is a matrix.
        columns: columns to the right of a matrix; 0 leaves it contiguous.

    Returns:
        The tensor, and a function that raises AssertionError if anything around it has changed.
    """
    device = here() if device is None else device
    if len(shape) >= 2:
        buffer = torch.full(
            (shape[0] + 2 * band, *shape[1:-1], shape[-1] + columns), sentinel, dtype=dtype, device=device
        )
        view = buffer[band : band + shape[0], ..., : shape[-1]]
    else:
        buffer = torch.full((shape[0] + 2 * band,), sentinel, dtype=dtype, device=device)
        view = buffer[band : band + shape[0]]
    view.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)
    kept = torch.full_like(buffer, sentinel)

    def check() -> None:
        around = buffer.clone()
        inside = around[band : band + shape[0], ..., : shape[-1]] if len(shape) >= 2 else around[band:-band]
        inside.fill_(sentinel)
        changed = torch.nonzero(around != kept)
        if changed.numel():
            place = [index - band if axis == 0 else index for axis, index in enumerate(changed[0].tolist())]
            raise AssertionError(
                f"{changed.shape[0]} elements around a tensor of shape {tuple(shape)} were written, "
                f"the first at {place} of the tensor"
            )

    return view, check
