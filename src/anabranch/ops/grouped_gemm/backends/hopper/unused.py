"""Zeros in the rows that no slot has: the product stores whole tiles of an expert's rows, and nothing past the last."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch

ROWS = 64
"""Rows that a program looks at: almost all programs find nothing to do."""


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _clear_kernel(
    out, offsets, row_to_slot, num_rows, num_experts, N, stride_m, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Writes zeros to rows whose slot is negative, and to those from ``offsets[E]`` on."""
    total = tl.load(offsets + num_experts)
    first = tl.program_id(0) * ROWS
    o_r = first + tl.arange(0, ROWS)
    slots = tl.load(row_to_slot + o_r, mask=o_r < num_rows, other=0)
    last = tl.minimum(first + ROWS, num_rows)
    if (tl.min(slots, 0) < 0) | (last > total):
        zeros = tl.zeros([BLOCK_N], out.dtype.element_ty)
        for row in range(first, last):
            if (tl.load(row_to_slot + row) < 0) | (row >= total):
                p_row = out + tl.cast(row, tl.int64) * stride_m
                for n in range(0, N, BLOCK_N):
                    o_n = n + tl.arange(0, BLOCK_N)
                    tl.store(p_row + o_n, zeros, mask=o_n < N)


def clear(out: Tensor, offsets: Tensor, row_to_slot: Tensor) -> None:
    """Writes zeros to the rows of (R, N), contiguous along N, that are nobody's."""
    if out.numel():
        known = operand.of
        _prepare(out.device, known(out), known(offsets), known(row_to_slot))(out, offsets, row_to_slot)


@lru_cache(REMEMBERED)
def _prepare(device: torch.device, out: Operand, offsets: Operand, row_to_slot: Operand) -> Launch:
    num_rows, columns = out.shape
    return Launch(
        device, _clear_kernel, (triton.cdiv(num_rows, ROWS),),
        num_rows, offsets.shape[0] - 1, columns, out.stride[0], ROWS=ROWS, BLOCK_N=1024, num_warps=4,
    )  # fmt: skip
