"""rope and mrope in Triton: one launch over q and k, in tiles of heads x tokens that share a tile of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

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

VECTOR = 8
"""Entries of a table, of 16 bits, in a load of 16 bytes."""

SMALL = 2**25
"""Elements of q and k below which programs of half as many heads keep the multiprocessors busier."""


@triton.jit
def _followed(o_p, FOLLOW: tl.constexpr, ROWS: tl.constexpr):
    """Which of the tables' rows each pair follows; FOLLOW holds start, stop and step of each row's."""
    row = tl.zeros_like(o_p)
    for r in tl.static_range(1, ROWS):
        since = o_p - FOLLOW[3 * r]
        mine = (since >= 0) & (o_p < FOLLOW[3 * r + 1]) & (since % FOLLOW[3 * r + 2] == 0)
        row = tl.where(mine, r, row)
    return row


@triton.jit
def _place(
    positions, token, batch, m_s, entries, row, stride_pr, stride_pb, stride_ps,
    INDEXED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(BLOCK_S, 1): where tokens' entries are in a row of the tables, and whether there is one."""
    place = token + tl.arange(0, BLOCK_S)
    live = m_s
    if INDEXED:
        p = positions + (row * stride_pr + batch * stride_pb) + place * stride_ps
        place = tl.load(p, mask=m_s, other=0)
        live = m_s & (place >= 0) & (place < entries)
        place = tl.where(live, place, 0).to(tl.int64)
    return place[:, None], live[:, None]


@triton.jit
def _entries(
    cos, sin, positions, token, batch, m_s, entries, columns, row, STOP: tl.constexpr,
    stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
    stride_pr, stride_pb, stride_ps,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, ALIKE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """fp32 tiles of both tables for columns below STOP that follow a row each, and which of them have entries.

    ALIKE columns, or a multiple, are side by side and follow the same row, so that they are one load. If that is one,
    columns are read from every row, which takes the same sectors, and then chosen.
    """
    m_w = (columns < STOP)[None, :]
    mine = row[None, :]
    place, live = _place(
        positions, token, batch, m_s, entries, 0, stride_pr, stride_pb, stride_ps, INDEXED, BLOCK_S
    )
    p_c = cos + batch * stride_cb
    p_s = sin + batch * stride_sb
    if ALIKE > 1:
        if INDEXED:
            for r in tl.static_range(1, ROWS):
                other, inside = _place(
                    positions,
                    token,
                    batch,
                    m_s,
                    entries,
                    r,
                    stride_pr,
                    stride_pb,
                    stride_ps,
                    INDEXED,
                    BLOCK_S,
                )
                place, live = tl.where(mine == r, other, place), tl.where(mine == r, inside, live)
        wide = mine.to(tl.int64)
        at_c = place * stride_cs + (wide * stride_cr + columns[None, :] * stride_cw)
        at_s = place * stride_ss + (wide * stride_sr + columns[None, :] * stride_sw)
        at_c = tl.max_contiguous(tl.multiple_of(at_c, [1, ALIKE]), [1, ALIKE])
        at_s = tl.max_contiguous(tl.multiple_of(at_s, [1, ALIKE]), [1, ALIKE])
        c = tl.load(p_c + at_c, mask=live & m_w, other=0.0).to(tl.float32)
        s = tl.load(p_s + at_s, mask=live & m_w, other=0.0).to(tl.float32)
    else:
        o_c, o_s = (columns * stride_cw)[None, :], (columns * stride_sw)[None, :]
        c = tl.load(p_c + place * stride_cs + o_c, mask=live & m_w, other=0.0).to(tl.float32)
        s = tl.load(p_s + place * stride_ss + o_s, mask=live & m_w, other=0.0).to(tl.float32)
        for r in tl.static_range(1, ROWS):
            place, inside = _place(
                positions, token, batch, m_s, entries, r, stride_pr, stride_pb, stride_ps, INDEXED, BLOCK_S
            )
            p_c += stride_cr
            p_s += stride_sr
            c_r = tl.load(p_c + place * stride_cs + o_c, mask=inside & m_w, other=0.0).to(tl.float32)
            s_r = tl.load(p_s + place * stride_ss + o_s, mask=inside & m_w, other=0.0).to(tl.float32)
            c, s, live = (
                tl.where(mine == r, c_r, c),
                tl.where(mine == r, s_r, s),
                tl.where(mine == r, inside, live),
            )
    return c, s, live


@triton.jit
def _tables(
    cos, sin, positions, token, batch, m_s, entries,
    stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
    stride_pr, stride_pb, stride_ps,
    PAIRS: tl.constexpr, FULL: tl.constexpr, ADJACENT: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr,
    SECTIONS: tl.constexpr, SECOND: tl.constexpr, ALIKE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Cosines of BLOCK_S tokens for pairs' first and second channels, sines, and which pairs have them."""
    o_p = tl.arange(0, BLOCK_P)
    if FULL and ADJACENT:
        o_w = tl.arange(0, 2 * BLOCK_P)
        c, s, live = _entries(
            cos, sin, positions, token, batch, m_s, entries, o_w, _followed(o_w // 2, SECTIONS, ROWS), 2 * PAIRS,
            stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
            stride_pr, stride_pb, stride_ps, INDEXED, ROWS, ALIKE, BLOCK_S,
        )  # fmt: skip
        cos_a, cos_b = tl.split(tl.reshape(c, [BLOCK_S, BLOCK_P, 2]))
        sin_a, sin_b = tl.split(tl.reshape(s, [BLOCK_S, BLOCK_P, 2]))
        live = tl.broadcast_to(live, [BLOCK_S, 2 * BLOCK_P])
        inside, _ = tl.split(tl.reshape(live, [BLOCK_S, BLOCK_P, 2]))
    else:
        cos_a, sin_a, inside = _entries(
            cos, sin, positions, token, batch, m_s, entries, o_p, _followed(o_p, SECTIONS, ROWS), PAIRS,
            stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
            stride_pr, stride_pb, stride_ps, INDEXED, ROWS, ALIKE, BLOCK_S,
        )  # fmt: skip
        cos_b, sin_b = cos_a, sin_a
        if FULL:
            cos_b, sin_b, _ = _entries(
                cos, sin, positions, token, batch, m_s, entries, o_p + PAIRS, _followed(o_p, SECOND, ROWS), 2 * PAIRS,
                stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
                stride_pr, stride_pb, stride_ps, INDEXED, ROWS, ALIKE, BLOCK_S,
            )  # fmt: skip
    return cos_a, cos_b, sin_a, sin_b, inside


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
    ROWS: tl.constexpr, SECTIONS: tl.constexpr, SECOND: tl.constexpr, ALIKE: tl.constexpr,
    TRANSPOSE: tl.constexpr, COPY_REST: tl.constexpr,
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

    cos_a, cos_b, sin_a, sin_b, inside = _tables(
        cos, sin, positions, token, batch, m_s, entries,
        stride_cr, stride_cb, stride_cs, stride_cw, stride_sr, stride_sb, stride_ss, stride_sw,
        stride_pr, stride_pb, stride_ps,
        PAIRS, FULL, ADJACENT, INDEXED, ROWS, SECTIONS, SECOND, ALIKE, BLOCK_S, BLOCK_P,
    )  # fmt: skip
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
    cos_strides, sin_strides = _table_strides(cos, 2), _table_strides(sin, 2)
    launch(
        call.device, rope_kernel, (batches * blocks * (-(-q_heads // heads) - (-k_heads // heads)),),
        (q, k, q_out, k_out, cos, sin, positions), tokens, blocks, q_heads, k_heads, cos.shape[0],
        *strides[0], *strides[1], *strides[2], *strides[3],
        *cos_strides, *sin_strides, *places,
        D=channels, PAIRS=pairs, FULL=cos.shape[-1] != pairs, ADJACENT=call.pairing == "adjacent",
        INDEXED=positions is not None, ROWS=3 if call.sections else 1,
        SECTIONS=_sections(sections, call.order, pairs, False), SECOND=_sections(sections, call.order, pairs, True),
        ALIKE=_alike(sections, call.order, pairs, cos_strides, sin_strides),
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


def _alike(
    sections: Sequence[int], order: str, pairs: int, cos_strides: Sequence[int], sin_strides: Sequence[int]
) -> int:
    """How many entries of the tables, or a multiple, can always be loaded as one: side by side, in the same row."""
    (c_row, _, c_token, c_column), (s_row, _, s_token, s_column) = cos_strides, sin_strides
    if c_column != 1 or s_column != 1:
        return 1
    return gcd(_shortest(tuple(sections), order, pairs), c_row, c_token, s_row, s_token)


@cache
def _shortest(sections: Sequence[int], order: str, pairs: int) -> int:
    """The greatest power of two up to VECTOR that all stretches of columns that follow one row are multiples of."""
    bounds = [_sections(sections, order, pairs, second) for second in (False, True)]
    numbers = [number for bound in bounds for i, number in enumerate(bound) if i % 3 < 2]
    return (
        gcd(VECTOR, pairs, *numbers)
        if all(bound[i] == 1 for bound in bounds for i in range(2, len(bound), 3))
        else 1
    )
