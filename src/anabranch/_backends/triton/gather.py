"""Rows in expert order from rows in token order, which permute is and which backward products read twice."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton.device import current
from anabranch.layout import ExpertLayout


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _gather_kernel(
    x, weights, slot_to_row, row_to_slot, out, num_tokens, num_rows, H, stride_xt, stride_xh, stride_wt, stride_wk,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program t < T reads token t once and writes its rows; the others write zeros to a row without a slot."""
    program = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    if program < num_tokens:
        t = program.to(tl.int64)
        value = tl.load(x + t * stride_xt + o_h.to(tl.int64) * stride_xh, mask=m_h, other=0.0)
        for k in tl.static_range(TOP_K):
            row = tl.load(slot_to_row + t * TOP_K + k).to(tl.int64)
            live = (row >= 0) & (row < num_rows)
            copy = value
            if WEIGHTED:
                weight = tl.load(weights + t * stride_wt + k * stride_wk, mask=live, other=0.0).to(tl.float32)
                copy = (value.to(tl.float32) * weight).to(value.dtype)
            tl.store(out + row * H + o_h, copy, mask=m_h & live)
    else:
        for start in range((program - num_tokens) * 128, num_rows, (tl.num_programs(0) - num_tokens) * 128):
            o_r = start + tl.arange(0, 128)
            if tl.min(tl.load(row_to_slot + o_r, mask=o_r < num_rows, other=0), 0) < 0:
                for r in range(start, tl.minimum(start + 128, num_rows)):
                    if tl.load(row_to_slot + r) < 0:
                        zeros = tl.zeros([BLOCK_H], out.dtype.element_ty)
                        tl.store(out + tl.cast(r, tl.int64) * H + o_h, zeros, mask=m_h)


def gather_rows(x: Tensor, layout: ExpertLayout, weights: Tensor | None = None) -> Tensor:
    """(R, H) from (T, H): row r is ``(weight *) x[slot(r) // K]``, fp32 product, one rounding; zeros without a slot."""
    num_tokens, hidden = x.shape
    out = x.new_empty(layout.num_rows, hidden)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(hidden))
    strides = (0, 0) if weights is None else weights.stride()
    sweepers = min(64, triton.cdiv(layout.num_rows, 64))
    with current(x.device):
        _gather_kernel[(num_tokens + sweepers, triton.cdiv(hidden, block))](
            x, weights, layout.slot_to_row, layout.row_to_slot, out, num_tokens, layout.num_rows, hidden,
            *x.stride(), *strides, TOP_K=layout.top_k, WEIGHTED=weights is not None, BLOCK_H=block, num_warps=4,
        )  # fmt: skip
    return out
