"""What a launcher may know of a tensor: plain values, by which its decisions are remembered."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VECTOR = 16
"""Bytes of the widest access, of which addresses for it have to be multiples."""


class Operand(NamedTuple):
    """A tensor but for its contents and most of its address.

    Attributes:
        shape: its sizes.
        stride: its strides, in elements.
        dtype: its dtype.
        shift: how many bytes past a multiple of 16 it starts.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    shift: int

    @property
    def mT(self) -> Operand:  # noqa: N802 (as of a tensor)
        """Its last two dimensions exchanged."""
        *first, a, b = range(len(self.shape))
        shape, stride = (tuple(values[i] for i in (*first, b, a)) for values in (self.shape, self.stride))
        return self._replace(shape=shape, stride=stride)

    def columns(self, start: int, stop: int) -> Operand:
        """Some columns of a matrix."""
        shift = (self.shift + start * self.stride[-1] * self.dtype.itemsize) % VECTOR
        return self._replace(shape=(*self.shape[:-1], stop - start), shift=shift)


def of(value: Tensor) -> Operand:
    """What there is to know of a tensor."""
    return _new(Operand, (value.shape, value.stride(), value.dtype, value.data_ptr() % VECTOR))


def maybe(value: Tensor | None) -> Operand | None:
    """The same of a tensor that may be missing."""
    return None if value is None else of(value)


def reach(value: Operand | None) -> int:
    """The furthest of its elements from its start, in elements."""
    if value is None:
        return 0
    return sum((size - 1) * abs(step) for size, step in zip(value.shape, value.stride, strict=True))


def tma_refusal(value: Operand, capability: tuple[int, int], inner: int = -1) -> str | None:
    """Why the tensor memory accelerator cannot read or write ``value``, or None if it can.

    ``inner`` is the dimension that a tile is contiguous along.
    """
    if capability < (9, 0):
        return "the device has no tensor memory accelerator"
    if 0 in value.shape:
        return "the tensor is empty"
    if value.stride[inner] != 1:
        return "the tile's inner dimension is not contiguous"
    if value.shift:
        return "the base address is not a multiple of 16 bytes"
    for dim, step in enumerate(value.stride):
        if dim != inner % len(value.stride) and (step * value.dtype.itemsize % VECTOR or step <= 0):
            return f"stride {step} of dimension {dim} is not a positive multiple of 16 bytes"
    if value.shape[inner] * value.dtype.itemsize % VECTOR:
        # Seen on an H200: the last 16 bytes of a row are read and written whole, whatever the descriptor says.
        return f"size {value.shape[inner]} of the tile's inner dimension is not a multiple of 16 bytes"
    return None


_new = tuple.__new__  # all that the class's own does, in a third of the time
