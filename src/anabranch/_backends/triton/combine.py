"""The sum over a token's rows, which unpermute is and every gathered gradient ends with."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton.device import current


@triton.jit
def _combine_kernel(
    y, slot_to_row, weights, out, H, stride_ym, stride_yh, stride_wt, stride_wk, stride_ot, num_rows,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum_k (weights[t, k] *) y[slot_to_row[t, k]]``: fp32, in slot order, one rounding."""
    t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    acc = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_to_row + t * TOP_K + k).to(tl.int64)
        live = (row >= 0) & (row < num_rows)
        row = tl.where(live, row, 0)
        value = tl.load(y + row * stride_ym + o_h.to(tl.int64) * stride_yh, mask=m_h & live, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + t * stride_wt + k * stride_wk, mask=live, other=0.0).to(tl.float32)
        acc += value
    tl.store(out + t * stride_ot + o_h, acc.to(out.dtype.element_ty), mask=m_h)


def combine(y: Tensor, slot_to_row: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Writes (T, H) from (rows, H), (T, K) and, if given, (T, K) weights of any float dtype."""
    num_tokens, hidden = out.shape
    if out.numel() == 0:
        return
    block = min(1024, triton.next_power_of_2(hidden))
    strides = (0, 0) if weights is None else weights.stride()
    with current(out.device):
        _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
            y, slot_to_row, weights, out, hidden, *y.stride(), *strides, out.stride(0), y.shape[0],
            TOP_K=slot_to_row.shape[1], WEIGHTED=weights is not None, BLOCK_H=block, num_warps=4,
        )  # fmt: skip
