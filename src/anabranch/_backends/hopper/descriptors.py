"""Tiles for Gluon kernels: as those for Triton kernels, with the layout a tile has in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.language import bfloat16

from anabranch._backends.hopper.gluon import TensorDescriptor, gl
from anabranch._backends.triton import ragged as triton_tiles
from anabranch._backends.triton.operand import Operand


class Tiles(NamedTuple):
    """How the tensor memory accelerator goes over an operand."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any

    def of(self, value: Tensor) -> TensorDescriptor:
        """The descriptor of a tensor like the operand."""
        # The class's own __init__ checks at every launch what tma_refusal has checked once.
        found = object.__new__(TensorDescriptor)
        found.base, found.shape, found.strides = value, self.shape, self.strides
        found.block_shape, found.layout, found.padding = self.block, self.layout, "zero"
        return found


def layout(block: list[int]) -> Any:
    """The layout of a tile of 16-bit elements, for the tensor memory accelerator and for products."""
    return gl.NVMMASharedLayout.get_default_for(block, bfloat16)


def dense(value: Operand, block: list[int]) -> Tiles:
    """Tiles of ``block`` of the whole tensor."""
    return Tiles(*triton_tiles.dense(value, block), layout(block))


def ragged(value: Operand, block: list[int]) -> Tiles:
    """Tiles of ``block`` of (rows, columns) that end at an expert's last row: see the Triton backends' ragged.py."""
    found = triton_tiles.ragged(value, block)
    return Tiles(*found, layout(found.block))
