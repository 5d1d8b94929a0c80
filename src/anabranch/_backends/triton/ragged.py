"""Descriptors of tiles: dense ones, and ragged ones that stop at a row given with the coordinates.

A ragged descriptor reads and writes one expert's rows in full tiles and partial. Its row coordinate counts back
from 2**30, and two more dimensions, whose strides wrap around 2**64 bytes, bring it to its place; so what lies past
the expert's last row is out of bounds, reads as zeros and is not written (the idea is triton.tools.ragged_tma's).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch._backends.triton.operand import Operand


class Tiles(NamedTuple):
    """How the tensor memory accelerator goes over an operand."""

    shape: list[int]
    strides: list[int]
    block: list[int]

    def of(self, value: Tensor) -> TensorDescriptor:
        """The descriptor of a tensor like the operand."""
        # The class's own __init__ checks at every launch what tma_refusal has checked once.
        found = object.__new__(TensorDescriptor)
        found.base, found.shape, found.strides, found.block_shape = (
            value,
            self.shape,
            self.strides,
            self.block,
        )
        found.padding = "zero"
        return found


def dense(value: Operand, block: list[int]) -> Tiles:
    """Tiles of ``block`` of the whole tensor."""
    return Tiles(list(value.shape), list(value.stride), block)


def ragged(value: Operand, block: list[int]) -> Tiles:
    """Tiles of ``block`` of (rows, columns), for :func:`load_ragged` and :func:`store_ragged`."""
    step = value.stride[0]
    shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, value.shape[1]]
    return Tiles(shape, [2**34 - step, step, step, 1], [1, 1, *block])


@triton.jit
def load_ragged(descriptor, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile at (row, column), zeros from row ``end`` on."""
    return tl.reshape(descriptor.load([1 << 30, end, (1 << 30) - end + row, column]), [ROWS, COLUMNS])


@triton.jit
def store_ragged(descriptor, value, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes the tile at (row, column) up to row ``end``, in halves where it is wide: shared memory is short."""
    if COLUMNS > 128:
        left, right = halves(value, ROWS, COLUMNS)
        _store(descriptor, left, row, end, column, ROWS, COLUMNS // 2)
        _store(descriptor, right, row, end, column + COLUMNS // 2, ROWS, COLUMNS // 2)
    else:
        _store(descriptor, value, row, end, column, ROWS, COLUMNS)


@triton.jit
def _store(descriptor, value, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.reshape(value.to(descriptor.dtype), [1, 1, ROWS, COLUMNS])
    descriptor.store([1 << 30, end, (1 << 30) - end + row, column], tile)


@triton.jit
def halves(value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(value, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


def store_width(columns: int) -> int:
    """Columns of one store of :func:`store_ragged`."""
    return columns // 2 if columns > 128 else columns
