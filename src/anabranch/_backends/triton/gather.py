"""Rows in expert order from rows in token order, which permute is and which backward products read twice."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.combine import power_of_2
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch
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
    out = x.new_empty(layout.num_rows, x.shape[1])
    if out.numel():
        tensors = x, weights, layout.slot_to_row.contiguous(), layout.row_to_slot.contiguous(), out
        _prepare(x.device, *map(operand.maybe, tensors))(*tensors)
    return out


@lru_cache(REMEMBERED)
def _prepare(
    device: torch.device,
    x: Operand,
    weights: Operand | None,
    slot_to_row: Operand,
    row_to_slot: Operand,
    out: Operand,
) -> Launch:
    num_tokens, hidden = x.shape
    num_rows = out.shape[0]
    block = min(1024, power_of_2(hidden))
    sweepers = min(64, triton.cdiv(num_rows, 64))
    return Launch(
        device, _gather_kernel, (num_tokens + sweepers, triton.cdiv(hidden, block)),
        num_tokens, num_rows, hidden, *x.stride, *((0, 0) if weights is None else weights.stride),
        TOP_K=slot_to_row.shape[1], WEIGHTED=weights is not None, BLOCK_H=block, num_warps=4,
    )  # fmt: skip
