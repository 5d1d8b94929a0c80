"""permute and unpermute in Triton: a program reads its token's row once and serves all of the token's slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton.combine import combine, power_of_2
from anabranch._backends.triton.prepared import launch
from anabranch.layout import ExpertLayout
from anabranch.ops.permute.call import PermuteCall, UnpermuteBackwardCall, UnpermuteCall

ROWS = 64
"""Rows that one program looks through for those without a slot."""

TILE_BYTES = 16_384
"""Of a tile of slots x columns: each of 128 threads writes 8 vectors of 16 bytes."""


@triton.jit
def _pair(row_to_slot, slot_to_row, slots, m_slots, num_rows):
    """The row of each slot, and whether there is one. A row that names another slot back is not its row."""
    rows = tl.load(slot_to_row + slots, mask=m_slots, other=-1).to(tl.int64)
    live = (rows >= 0) & (rows < num_rows)
    return rows, live & (tl.load(row_to_slot + rows, mask=live, other=-1) == slots)


@triton.jit
def _zero_unused(
    out, row_to_slot, slot_to_row, first, num_rows, num_slots, column, columns, H, stride_om,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Zeroes those of ROWS rows that are no slot's, in some of their columns."""
    rows = first + tl.arange(0, ROWS)
    m_rows = rows < num_rows
    slots = tl.load(row_to_slot + rows, mask=m_rows, other=-1)
    live = (slots >= 0) & (slots < num_slots)
    unused = m_rows & ((live == 0) | (tl.load(slot_to_row + slots, mask=live, other=-1) != rows))
    if tl.sum(unused.to(tl.int32), 0) > 0:
        o_h = column + tl.arange(0, BLOCK_H)
        zeros = tl.zeros([ROWS, BLOCK_H], out.dtype.element_ty)
        for h in range(0, columns, BLOCK_H):
            mask = unused[:, None] & (h + o_h < H)[None, :]
            tl.store(out + rows[:, None] * stride_om + (h + o_h)[None, :], zeros, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def spread_kernel(
    x, y, weights, out, d_weights, row_to_slot, slot_to_row, num_tokens, num_rows, H,
    stride_xt, stride_xh, stride_ym, stride_yh, stride_wt, stride_wk, stride_om,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, WRITES: tl.constexpr, DOTS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[row(t, k)] = (weights[t, k] *) x[t]``, zero in other rows, and ``d_weights[t, k] = <x[t], y[row(t, k)]>``.

    Programs from num_tokens on look for rows without a slot. A dot takes all columns of a row; without dots the
    second axis of programs shares them.
    """
    pid = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_H
    columns = H if DOTS else BLOCK_H
    if pid < num_tokens:
        t = tl.cast(pid, tl.int64)
        o_h = column + tl.arange(0, BLOCK_H)
        for first in range(0, TOP_K, BLOCK_K):
            o_k = first + tl.arange(0, BLOCK_K)
            m_k = o_k < TOP_K
            rows, live = _pair(row_to_slot, slot_to_row, t * TOP_K + o_k, m_k, num_rows)
            rows = tl.where(live, rows, 0)
            if WEIGHTED:
                weight = tl.load(weights + t * stride_wt + o_k * stride_wk, mask=live, other=0.0).to(
                    tl.float32
                )
            if DOTS:
                dots = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
            for h in range(0, columns, BLOCK_H):
                m_h = h + o_h < H
                o_c = (h + o_h).to(tl.int64)
                value = tl.load(x + t * stride_xt + o_c * stride_xh, mask=m_h, other=0.0)[None, :]
                mask = live[:, None] & m_h[None, :]
                if DOTS:
                    p_y = y + rows[:, None] * stride_ym + (o_c * stride_yh)[None, :]
                    dots += value.to(tl.float32) * tl.load(p_y, mask=mask, other=0.0).to(tl.float32)
                if WRITES:
                    if WEIGHTED:
                        result = (value.to(tl.float32) * weight[:, None]).to(out.dtype.element_ty)
                    else:
                        result = tl.broadcast_to(value, [BLOCK_K, BLOCK_H])
                    tl.store(out + rows[:, None] * stride_om + o_c[None, :], result, mask=mask)
            if DOTS:
                # An infinite gradient times the zero read for no row is NaN.
                dot = tl.where(live, tl.sum(dots, 1), 0.0)
                tl.store(d_weights + t * TOP_K + o_k, dot.to(d_weights.dtype.element_ty), mask=m_k)
    else:
        if WRITES:
            zero_from = tl.cast(pid - num_tokens, tl.int64) * ROWS
            num_slots = tl.cast(num_tokens, tl.int64) * TOP_K
            _zero_unused(
                out, row_to_slot, slot_to_row, zero_from, num_rows, num_slots, column, columns, H, stride_om,
                ROWS, min(BLOCK_H, 128),
            )  # fmt: skip


def supports(call: PermuteCall | UnpermuteCall | UnpermuteBackwardCall) -> str | None:
    """fp16, bf16 and fp32."""
    return "it accumulates in fp32, too coarse for float64" if call.dtype == torch.float64 else None


def permute(call: PermuteCall, out: Tensor) -> None:
    """Writes (R, H): each row from its slot's token."""
    _spread(call.x, None, None, call.layout, out, None)


def unpermute(call: UnpermuteCall, out: Tensor) -> None:
    """Writes (T, H): the weighted sum over each token's slots, in slot order."""
    combine(call.y, call.layout.slot_to_row, call.weights, out)


def unpermute_backward(call: UnpermuteBackwardCall, d_y: Tensor | None, d_weights: Tensor | None) -> None:
    """Writes the gradients asked for, both from one reading of the output's."""
    y = call.y if d_weights is not None else None
    _spread(call.grad, y, call.weights if d_y is not None else None, call.layout, d_y, d_weights)


def _spread(
    x: Tensor,
    y: Tensor | None,
    weights: Tensor | None,
    layout: ExpertLayout,
    out: Tensor | None,
    d_weights: Tensor | None,
) -> None:
    """Launches the kernel for what is given."""
    hidden, top_k = x.shape[1], layout.top_k
    # Without slots all rows are zero, and without columns all dots are.
    tokens = layout.num_tokens if top_k else 0
    programs = tokens - (-layout.num_rows // ROWS if out is not None and hidden else 0)
    if programs == 0:
        return
    block_k = min(8, power_of_2(top_k))
    block_h = min(TILE_BYTES // (block_k * x.element_size()), max(16, power_of_2(hidden)))
    shares = 1 if d_weights is not None else -(-hidden // block_h)
    launch(
        x.device, spread_kernel, (programs, shares),
        (x, y, weights, out, d_weights, layout.row_to_slot.contiguous(), layout.slot_to_row.contiguous()),
        tokens, layout.num_rows, hidden, *x.stride(), *((0, 0) if y is None else y.stride()),
        *((0, 0) if weights is None else weights.stride()), 0 if out is None else out.stride(0),
        TOP_K=top_k, WEIGHTED=weights is not None, WRITES=out is not None, DOTS=d_weights is not None,
        BLOCK_K=block_k, BLOCK_H=block_h, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
