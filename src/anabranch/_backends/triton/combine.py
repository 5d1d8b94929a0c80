"""The sum over a token's rows, which unpermute is and every gathered gradient ends with."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch

UNROLL = 16
"""Rows of a token that are read before the first is added."""


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    y, slot_to_row, weights, out, H, stride_ym, stride_yh, stride_wt, stride_wk, stride_ot, num_rows,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum_k (weights[t, k] *) y[slot_to_row[t, k]]``: fp32, in slot order, one rounding."""
    t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    p_y = y + o_h.to(tl.int64) * stride_yh
    acc = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, TOP_K, UNROLL):
        # All that tells where rows are, then all rows: two waits for memory, however many rows there are.
        rows = ()
        factors = ()
        for i in tl.static_range(UNROLL):
            here = first + i < TOP_K
            row = tl.load(slot_to_row + t * TOP_K + first + i, mask=here, other=-1).to(tl.int64)
            rows = rows + (row,)
            if WEIGHTED:
                factors = factors + (
                    tl.load(weights + t * stride_wt + (first + i) * stride_wk, mask=here, other=0.0),
                )
        values = ()
        for i in tl.static_range(UNROLL):
            live = (rows[i] >= 0) & (rows[i] < num_rows)
            p = p_y + tl.where(live, rows[i], 0) * stride_ym
            values = values + (tl.load(p, mask=m_h & live, other=0.0),)
        for i in tl.static_range(UNROLL):
            value = values[i].to(tl.float32)
            if WEIGHTED:
                # A dropped slot's weight may be NaN.
                live = (rows[i] >= 0) & (rows[i] < num_rows)
                value *= tl.where(live, factors[i].to(tl.float32), 0.0)
            acc += value
    tl.store(out + t * stride_ot + o_h, acc.to(out.dtype.element_ty), mask=m_h)


def combine(y: Tensor, slot_to_row: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Writes (T, H) from (rows, H), (T, K) and, if given, (T, K) weights of any float dtype."""
    if out.numel():
        slot_to_row = slot_to_row.contiguous()
        launch = prepare(out.device, *map(operand.maybe, (y, slot_to_row, weights, out)))
        launch(y, slot_to_row, weights, out)


@lru_cache(REMEMBERED)
def prepare(
    device: torch.device, y: Operand, slot_to_row: Operand, weights: Operand | None, out: Operand
) -> Launch:
    """What :func:`combine` launches with the tensors."""
    num_tokens, hidden = out.shape
    top_k = slot_to_row.shape[1]
    # 16 bytes of each row a thread, twice that of few rows: enough on their way to hide the wait.
    block = min((32 if top_k <= 4 else 16) // y.dtype.itemsize * 128, power_of_2(hidden))
    strides = (0, 0) if weights is None else weights.stride
    return Launch(
        device, _combine_kernel, (num_tokens, -(-hidden // block)),
        hidden, *y.stride, *strides, out.stride[0], y.shape[0],
        TOP_K=top_k, UNROLL=max(1, min(top_k, UNROLL)), WEIGHTED=weights is not None, BLOCK_H=block, num_warps=4,
    )  # fmt: skip


def power_of_2(least: int) -> int:
    """The smallest one that is no less; Triton's own function takes as long as a launch."""
    return 1 << (least - 1).bit_length() if least > 1 else 1
