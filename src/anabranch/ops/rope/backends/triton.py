"""rope and mrope in Triton: one launch over q and k, in tiles of heads x tokens that share a tile of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton.combine import power_of_2
from anabranch._backends.triton.prepared import launch
from anabranch.ops.rope.call import RopeCall
from anabranch.ops.rope.sections import columns

THREADS = 128
"""Of a program. Each moves 16 bytes at a time: of 16 tokens, where a head has 128 channels of 16 bits."""

HEADS = 8
"""Heads that a program rotates by one tile of the tables, which so cost that many times less."""

VECTORS = 16
"""Of 16 bytes that a thread has on their way before it writes the first."""

SMALL = 2**25
"""Elements of q and k below which programs of half as many heads keep the multiprocessors busier."""


@triton.jit
def _entries(
    p, m_s, stride_w, START: tl.constexpr, STOP: tl.constexpr, SECOND_START: tl.constexpr, SECOND_STOP: tl.constexpr,
    PAIRS: tl.constexpr, FULL: tl.constexpr, ADJACENT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Two fp32 (BLOCK_S, BLOCK_P) tiles of a table, for pairs' first and second channels; p points to its rows."""
    if FULL and ADJACENT:
        o_w = tl.arange(0, 2 * BLOCK_P)
        m_w = (o_w >= 2 * START) & (o_w < 2 * STOP)
        both = tl.load(p[:, None] + (o_w * stride_w)[None, :], mask=m_s[:, None] & m_w[None, :], other=0.0)
        first, second = tl.split(tl.reshape(both, [BLOCK_S, BLOCK_P, 2]))
    else:
        o_p = tl.arange(0, BLOCK_P)
        mask = m_s[:, None] & ((o_p >= START) & (o_p < STOP))[None, :]
        first = tl.load(p[:, None] + (o_p * stride_w)[None, :], mask=mask, other=0.0)
        second = first
        if FULL:
            mask = m_s[:, None] & ((o_p >= SECOND_START) & (o_p < SECOND_STOP))[None, :]
            second = tl.load(p[:, None] + ((o_p + PAIRS) * stride_w)[None, :], mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _row(
    cos, sin, positions, token, batch, m_s, entries, row, START: tl.constexpr, STOP: tl.constexpr,
    SECOND_START: tl.constexpr, SECOND_STOP: tl.constexpr,
    stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
    stride_pr, stride_pb, stride_ps,
    PAIRS: tl.constexpr, FULL: tl.constexpr, ADJACENT: tl.constexpr, INDEXED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """What one row of the tables says of BLOCK_S tokens, and which of them it holds for, (BLOCK_S, 1)."""
    at = token + tl.arange(0, BLOCK_S)
    live = m_s
    if INDEXED:
        at = tl.load(positions + (row * stride_pr + batch * stride_pb) + at * stride_ps, mask=m_s, other=0)
        live = m_s & (at >= 0) & (at < entries)
        at = tl.where(live, at, 0).to(tl.int64)
    p_c = cos + (row * stride_cr + batch * stride_cb) + at * stride_cs
    p_s = sin + (row * stride_sr + batch * stride_sb) + at * stride_ss
    cos_a, cos_b = _entries(
        p_c, live, stride_cw, START, STOP, SECOND_START, SECOND_STOP, PAIRS, FULL, ADJACENT, BLOCK_S, BLOCK_P
    )
    sin_a, sin_b = _entries(
        p_s, live, stride_sw, START, STOP, SECOND_START, SECOND_STOP, PAIRS, FULL, ADJACENT, BLOCK_S, BLOCK_P
    )
    return cos_a, cos_b, sin_a, sin_b, live[:, None]


@triton.jit
def _follows(o_p, START: tl.constexpr, STOP: tl.constexpr, STEP: tl.constexpr):
    """(1, BLOCK_P): which pairs are those from START to STOP, every STEP-th."""
    since = o_p - START
    return ((since >= 0) & (o_p < STOP) & (since % STEP == 0))[None, :]


@triton.jit
def _rotate(
    x, out, head, heads, token, batch, m_s, cos_a, cos_b, upper, lower, inside,
    stride_xb, stride_xh, stride_xs, stride_xd, stride_ob, stride_oh, stride_os, stride_od,
    D: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr, INDEXED: tl.constexpr, COPY_REST: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """HEADS heads of BLOCK_S tokens. Everything is read before anything is written: out may be x."""
    o_s = tl.arange(0, BLOCK_S)[:, None].to(OFFSET)
    o_p = tl.arange(0, BLOCK_P)[None, :].to(OFFSET)
    o_w = tl.arange(0, 2 * BLOCK_P)[None, :].to(OFFSET)
    p_x = x + (batch * stride_xb + head * stride_xh + token * stride_xs)
    p_o = out + (batch * stride_ob + head * stride_oh + token * stride_os)
    firsts = ()
    seconds = ()
    rest = ()
    for h in tl.static_range(HEADS):
        rows = m_s[:, None] & (head + h < heads)
        p = p_x + tl.cast(h, tl.int64) * stride_xh
        if ADJACENT:
            both = tl.load(p + (o_s * stride_xs + o_w * stride_xd), mask=rows & (o_w < 2 * PAIRS), other=0.0)
            firsts = firsts + (both,)
        else:
            mask = rows & (o_p < PAIRS)
            firsts = firsts + (tl.load(p + (o_s * stride_xs + o_p * stride_xd), mask=mask, other=0.0),)
            b = tl.load(p + (o_s * stride_xs + (o_p + PAIRS) * stride_xd), mask=mask, other=0.0)
            seconds = seconds + (b,)
        if COPY_REST:
            # In pieces that waste less than a power of 2 over all of them would.
            for d in tl.static_range(2 * PAIRS, D, 2 * BLOCK_P):
                mask = rows & (o_w + d < D)
                rest = rest + (tl.load(p + (o_s * stride_xs + (o_w + d) * stride_xd), mask=mask, other=0.0),)
    for h in tl.static_range(HEADS):
        rows = m_s[:, None] & (head + h < heads)
        p = p_o + tl.cast(h, tl.int64) * stride_oh
        if ADJACENT:
            a, b = tl.split(tl.reshape(firsts[h], [BLOCK_S, BLOCK_P, 2]))
        else:
            a, b = firsts[h], seconds[h]
        # Which product is rounded is spelled out, so that equal tables of any form give equal bits.
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        new_a = tl.fma(wide_a, cos_a, wide_b * upper).to(a.dtype)
        new_b = tl.fma(wide_b, cos_b, wide_a * lower).to(a.dtype)
        if INDEXED:
            new_a, new_b = tl.where(inside, new_a, a), tl.where(inside, new_b, b)
        if ADJACENT:
            both = tl.reshape(tl.join(new_a, new_b), [BLOCK_S, 2 * BLOCK_P])
            tl.store(p + (o_s * stride_os + o_w * stride_od), both, mask=rows & (o_w < 2 * PAIRS))
        else:
            mask = rows & (o_p < PAIRS)
            tl.store(p + (o_s * stride_os + o_p * stride_od), new_a, mask=mask)
            tl.store(p + (o_s * stride_os + (o_p + PAIRS) * stride_od), new_b, mask=mask)
        if COPY_REST:
            for i in tl.static_range(len(rest) // HEADS):
                d = 2 * PAIRS + i * 2 * BLOCK_P
                piece = rest[h * (len(rest) // HEADS) + i]
                tl.store(p + (o_s * stride_os + (o_w + d) * stride_od), piece, mask=rows & (o_w + d < D))


@triton.jit(do_not_specialize=["tokens", "blocks", "q_heads", "k_heads", "entries"])
def rope_kernel(
    q, k, q_out, k_out, cos, sin, positions, tokens, blocks, q_heads, k_heads, entries,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_qob, stride_qoh, stride_qos, stride_qod, stride_kob, stride_koh, stride_kos, stride_kod,
    stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
    stride_pr, stride_pb, stride_ps,
    D: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr, ADJACENT: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, SECTIONS: tl.constexpr, SECOND: tl.constexpr, TRANSPOSE: tl.constexpr, COPY_REST: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Strides end in what they step over: b batch, h head, s token, d channel, r row, w column of a table.

    SECTIONS holds start, stop and step of the pairs whose first channels follow each of ROWS rows, SECOND those of
    their second channels; a later row takes precedence.
    """
    # Groups of heads vary fastest, so that those with the same entries of the tables run together.
    q_groups = tl.cdiv(q_heads, HEADS)
    groups = q_groups + tl.cdiv(k_heads, HEADS)
    group = tl.program_id(0) % groups
    tile = tl.program_id(0) // groups
    batch = tl.cast(tile // blocks, tl.int64)
    token = tl.cast(tile % blocks, tl.int64) * BLOCK_S
    o_s = token + tl.arange(0, BLOCK_S)
    m_s = o_s < tokens
    o_p = tl.arange(0, BLOCK_P)

    cos_a, cos_b, sin_a, sin_b, inside = _row(
        cos, sin, positions, token, batch, m_s, entries, 0, SECTIONS[0], SECTIONS[1], SECOND[0], SECOND[1],
        stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
        stride_pr, stride_pb, stride_ps, PAIRS, FULL, ADJACENT, INDEXED, BLOCK_S, BLOCK_P,
    )  # fmt: skip
    for row in tl.static_range(1, ROWS):
        c_a, c_b, s_a, s_b, live = _row(
            cos, sin, positions, token, batch, m_s, entries, row,
            # Scattered columns come with whole sectors anyway: read as vectors, then choose.
            SECTIONS[3 * row] if SECTIONS[3 * row + 2] == 1 else 0, SECTIONS[3 * row + 1],
            SECOND[3 * row] if SECOND[3 * row + 2] == 1 else 0, SECOND[3 * row + 1],
            stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
            stride_pr, stride_pb, stride_ps, PAIRS, FULL, ADJACENT, INDEXED, BLOCK_S, BLOCK_P,
        )  # fmt: skip
        mine = _follows(o_p, SECTIONS[3 * row], SECTIONS[3 * row + 1], SECTIONS[3 * row + 2])
        other = _follows(o_p, SECOND[3 * row], SECOND[3 * row + 1], SECOND[3 * row + 2])
        cos_a, cos_b = tl.where(mine, c_a, cos_a), tl.where(other, c_b, cos_b)
        sin_a, sin_b = tl.where(mine, s_a, sin_a), tl.where(other, s_b, sin_b)
        inside = tl.where(mine, live, inside)
    if TRANSPOSE:
        upper, lower = sin_b, -sin_a
    else:
        upper, lower = -sin_a, sin_b

    if group < q_groups:
        _rotate(
            q, q_out, tl.cast(group, tl.int64) * HEADS, q_heads, token, batch, m_s, cos_a, cos_b, upper, lower, inside,
            stride_qb, stride_qh, stride_qs, stride_qd, stride_qob, stride_qoh, stride_qos, stride_qod,
            D, PAIRS, ADJACENT, INDEXED, COPY_REST, HEADS, BLOCK_S, BLOCK_P, OFFSET,
        )  # fmt: skip
    else:
        _rotate(
            k, k_out, tl.cast(group - q_groups, tl.int64) * HEADS, k_heads, token, batch, m_s,
            cos_a, cos_b, upper, lower, inside,
            stride_kb, stride_kh, stride_ks, stride_kd, stride_kob, stride_koh, stride_kos, stride_kod,
            D, PAIRS, ADJACENT, INDEXED, COPY_REST, HEADS, BLOCK_S, BLOCK_P, OFFSET,
        )  # fmt: skip


def supports(call: RopeCall) -> str | None:
    """fp16, bf16 and fp32; tables of any dtype."""
    return "it rotates in fp32, too coarse for float64" if call.dtype == torch.float64 else None


def rotate(call: RopeCall, q_out: Tensor, k_out: Tensor | None) -> None:
    """Writes the rotated q and k; q_out and k_out may be q and k themselves."""
    q, k, cos, sin, positions = call.q, call.k, call.cos, call.sin, call.positions
    pairs = call.pairs
    batches, q_heads, tokens, channels = _ordered(call, q.shape, 1)
    k_heads = 0 if k is None else k.shape[1 if k.dim() == 3 else call.head_axis]
    # Without a k its place is taken by q, of which no head is rotated there.
    k, k_out = (q, q_out) if k is None or k_out is None else (k, k_out)
    if batches * tokens * (q_heads + k_heads) == 0:
        return
    rest = 0 if call.inplace else channels - call.rotary_dim
    small = batches * tokens * (q_heads + k_heads) * channels < SMALL
    block_p, block_s, heads, num_warps = _tile(
        pairs, rest, tokens, max(q_heads, k_heads), q.element_size(), small
    )
    blocks = -(-tokens // block_s)
    strides = [_ordered(call, x.stride(), 0) for x in (q, k, q_out, k_out)]
    near = all((block_s - 1) * s + (channels - 1) * d <= on.INT32_MAX for _, _, s, d in strides)
    places = (0, 0, 0) if positions is None else _table_strides(positions, 1)
    sections = tuple(call.sections)
    launch(
        call.device, rope_kernel, (batches * blocks * (-(-q_heads // heads) - (-k_heads // heads)),),
        (q, k, q_out, k_out, cos, sin, positions), tokens, blocks, q_heads, k_heads, cos.shape[0],
        *strides[0], *strides[1], *strides[2], *strides[3],
        *_table_strides(cos, 2), *_table_strides(sin, 2), *places,
        D=channels, PAIRS=pairs, FULL=cos.shape[-1] != pairs, ADJACENT=call.pairing == "adjacent",
        INDEXED=positions is not None, ROWS=3 if call.sections else 1,
        SECTIONS=_sections(sections, call.order, pairs, False), SECOND=_sections(sections, call.order, pairs, True),
        TRANSPOSE=call.transpose, COPY_REST=rest > 0,
        HEADS=heads, BLOCK_S=block_s, BLOCK_P=block_p, OFFSET=tl.int32 if near else tl.int64, num_warps=num_warps,
    )  # fmt: skip


# What follows runs before every launch, of kernels that may take no longer: Triton's own helpers are too slow for it.


def _tile(
    pairs: int, rest: int, tokens: int, heads: int, size: int, small: bool
) -> tuple[int, int, int, int]:
    """Pairs, tokens and heads of a program, and its warps. ``rest`` channels of ``size`` bytes only move."""
    block_p = power_of_2(pairs)
    block_s = min(max(16 * THREADS // (block_p * size), 1), 64, power_of_2(tokens))
    vectors = block_s * block_p * size // 16
    warps = min(max(vectors // 32, 1), 8)
    # What a thread moves of one head: both halves of its pairs, and in pieces as wide the channels that stay.
    each = 2 * (1 - (-rest // (2 * block_p))) * max(vectors // (32 * warps), 1)
    return (
        block_p,
        block_s,
        max(min(HEADS // 2 if small else HEADS, VECTORS // each, power_of_2(heads)), 1),
        warps,
    )


def _ordered(call: RopeCall, values: Sequence[int], batch: int) -> Sequence[int]:
    """Sizes or strides of q, k or a result as those of (B, H, S, D); a packed one has the given batch's."""
    if len(values) == 3:
        return batch, values[1], values[0], values[2]
    return values if call.head_axis == 1 else (values[0], values[2], values[1], values[3])


def _table_strides(table: Tensor, last: int) -> Sequence[int]:
    """Strides along rows and batch, 0 where there is one for all, and along the ``last`` dimensions."""
    strides, leading = table.stride(), table.dim() - last
    if leading and table.shape[leading - 1] == 1:
        strides = (*strides[: leading - 1], 0, *strides[leading:])
    return (0,) * (2 - leading) + strides


@cache
def _sections(sections: Sequence[int], order: str, pairs: int, second: bool) -> tuple[int, ...]:
    """start, stop and step of the pairs whose first, or second, channels follow each row."""
    if not sections:
        return 0, pairs, 1
    bounds = (follow.indices(pairs) for _, follow in columns(sections, order, second=second))
    return tuple(number for bound in bounds for number in bound)
