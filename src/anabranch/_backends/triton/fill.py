"""Small passes over contiguous memory that PyTorch has too: as launches they are remembered with those of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton.prepared import launch

BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _zero_kernel(out, size, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.zeros([BLOCK], out.dtype.element_ty), mask=o < size)


@triton.jit(do_not_specialize=["size"])
def _add_up_kernel(parts, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """``out[i] = sum_p parts[p, i]`` in fp32, from the first part to the last."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(COUNT):
        acc += tl.load(parts + i * size + o, mask=o < size, other=0.0).to(tl.float32)
    tl.store(out + o, acc.to(out.dtype.element_ty), mask=o < size)


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros."""
    return zero(torch.empty(sizes, dtype=dtype, device=device))


def zero(value: Tensor) -> Tensor:
    """The tensor, contiguous, which then holds zeros."""
    _over(value, _zero_kernel, value)
    return value


def add_up(parts: Tensor, out: Tensor) -> Tensor:
    """``out``, which then holds the sum of parts (P, *sizes), all contiguous."""
    _over(out, _add_up_kernel, parts, out, COUNT=parts.shape[0])
    return out


def converted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of floats in another dtype; itself if it has that."""
    return value if value.dtype == dtype else add_up(value[None], torch.empty_like(value, dtype=dtype))


def _over(out: Tensor, kernel: Any, *tensors: Tensor, **constants: int) -> None:
    size = out.numel()
    if size:
        grid = (-(-size // BLOCK),)
        launch(out.device, kernel, grid, tensors, size, BLOCK=BLOCK, num_warps=4, **constants)
