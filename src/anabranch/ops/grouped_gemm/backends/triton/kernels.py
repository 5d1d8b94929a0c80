"""The grouped GEMM kernels. Letters: M rows, N output columns, K the reduction; o_ offsets, m_ masks, p_ pointers.

Rows of an operand are found in one of three ways: ROW, the expert-sorted row itself; TOKEN, the token of its slot;
SLOT, the slot. A row without a slot (-1) reads row 0 and is written as zero.
"""

import triton
import triton.language as tl

from anabranch._backends.triton.holes import any_marked
from anabranch._backends.triton.ragged import load_ragged, store_ragged
from anabranch._backends.triton.schedule import tile_coordinates

ROW = tl.constexpr(0)
TOKEN = tl.constexpr(1)
SLOT = tl.constexpr(2)


@triton.jit
def load_slots(row_to_slot, rows, mask, num_slots):
    """The slots of rows, negative where there is none. One past the last, in a layout made by hand, is the last."""
    slots = tl.load(row_to_slot + rows, mask=mask, other=-1)
    slots = tl.where(slots >= num_slots, num_slots - 1, slots)  # as a minimum it takes more registers
    if slots.dtype == tl.int64:
        slots = tl.maximum(slots, -1).to(tl.int32)
    return slots


@triton.jit
def load_offset(offsets, expert, num_rows):
    """Where an expert's rows start, within the rows there are."""
    return tl.minimum(tl.maximum(tl.load(offsets + expert), 0), num_rows).to(tl.int32)


@triton.jit
def find_rows(rows, slots, top_k, HOW: tl.constexpr, OFFSET: tl.constexpr):
    """Where an operand keeps the given rows."""
    if HOW == ROW:
        return rows.to(OFFSET)
    elif HOW == TOKEN:
        return (tl.maximum(slots, 0) // top_k).to(OFFSET)
    else:
        return tl.maximum(slots, 0).to(OFFSET)


@triton.jit
def load_w(
    w, p_w, expert, n, k, N, K, stride_n, stride_k,
    TMA: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_K, BLOCK_N) tile of one expert's weight, zero outside it."""
    if TMA:
        if K_MAJOR:
            return tl.reshape(w.load([expert, n, k]), [BLOCK_N, BLOCK_K]).T
        else:
            return tl.reshape(w.load([expert, k, n]), [BLOCK_K, BLOCK_N])
    else:
        o_n = n + tl.arange(0, BLOCK_N)
        o_k = k + tl.arange(0, BLOCK_K)
        p = p_w + o_k[:, None].to(OFFSET) * stride_k + o_n[None, :].to(OFFSET) * stride_n
        if EVEN_K:
            return tl.load(p, mask=o_n[None, :] < N, other=0.0)
        else:
            return tl.load(p, mask=(o_n[None, :] < N) & (o_k[:, None] < K), other=0.0)


@triton.jit
def load_x(
    x, p_x, row, k, K, stride_k,
    TMA: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_M, BLOCK_K) tile of x, zero past K."""
    if TMA:
        return x.load([row, k])
    else:
        o_k = k + tl.arange(0, BLOCK_K)
        if EVEN_K:
            return tl.load(p_x + o_k[None, :].to(OFFSET) * stride_k)
        else:
            return tl.load(p_x + o_k[None, :].to(OFFSET) * stride_k, mask=o_k[None, :] < K, other=0.0)


@triton.jit
def zero_unused(
    out, slot_to_row, total, num_rows, num_slots, N, stride_m, stride_n,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Writes zeros where no row goes: past ``total`` in row order, at dropped slots in slot order."""
    o_n = tl.arange(0, BLOCK_N)
    zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
    if ROWS == ROW:
        first = total
        last = num_rows
    else:
        first = 0
        last = tl.where(total < num_slots, num_slots, 0)
    for start in range(first + tl.program_id(0) * BLOCK_M, last, tl.num_programs(0) * BLOCK_M):
        o_m = start + tl.arange(0, BLOCK_M)
        m_m = o_m < last
        if ROWS != ROW:
            m_m = m_m & (tl.load(slot_to_row + o_m, mask=m_m, other=0) < 0)
        for n in range(0, N, BLOCK_N):
            p = out + o_m[:, None].to(OFFSET) * stride_m + (n + o_n)[None, :].to(OFFSET) * stride_n
            tl.store(p, zeros, mask=m_m[:, None] & (n + o_n < N)[None, :])


@triton.jit
def add_bias(acc, p_b, n, N, stride_n, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The accumulator plus one expert's bias."""
    if HAS_BIAS:
        o_n = n + tl.arange(0, BLOCK_N)
        return acc + tl.load(p_b + o_n * stride_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    else:
        return acc


@triton.jit
def keep(
    t_h, p_h, z, live, row, end, n, N, stride_m,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the pre-activation, zeros in rows without a slot."""
    z = tl.where(live, z, 0.0)
    if TMA:
        store_ragged(t_h, z, row, end, n, BLOCK_M, BLOCK_N)
    else:
        o_m = row + tl.arange(0, BLOCK_M)
        o_n = n + tl.arange(0, BLOCK_N)
        p = p_h + o_m[:, None].to(OFFSET) * stride_m + o_n[None, :]
        tl.store(p, z.to(p_h.dtype.element_ty), mask=(o_m < end)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["size", "num_rows", "num_slots", "num_experts"])
def forward_kernel(
    x, w, out, h, bias, scale, t_out, t_h, t_up, offsets, row_to_slot, slot_to_row, tiles,
    size, num_rows, num_slots, num_experts, top_k, N, K,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_om, stride_on, stride_hm, stride_be, stride_bn,
    stride_st, stride_sk,
    EPILOGUE: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    X_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, KEEP_H: tl.constexpr,
    X_TMA: tl.constexpr, W_TMA: tl.constexpr, OUT_TMA: tl.constexpr, H_TMA: tl.constexpr,
    K_MAJOR: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, OFFSET: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """``out[row] = scale * epilogue(x[row] @ w[expert].T + bias[expert])`` for N output columns.

    Behind a gate BLOCK_N counts columns of the accumulator, gate and up together.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    num_m = tl.load(tiles + 4 * size)
    num_n = tl.cdiv(N, WIDTH)
    columns = 2 * N if GATED else N
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_coordinates(tile, num_m, num_n, GROUP_M)
        expert = tl.load(tiles + tile_m)
        row = tl.load(tiles + size + tile_m)
        end = load_offset(offsets, expert + 1, num_rows)
        n = tile_n * WIDTH
        o_m = row + tl.arange(0, BLOCK_M)
        m_m = o_m < end
        slots = load_slots(row_to_slot, o_m, m_m, num_slots)
        p_w = w
        if not W_TMA:
            p_w = w + expert.to(tl.int64) * stride_we
        p_x = x
        if not X_TMA:
            o_x = find_rows(tl.where(m_m, o_m, row), slots, top_k, X_ROWS, OFFSET)
            p_x = x + o_x[:, None] * stride_xm

        if GATED and not INTERLEAVED:
            acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            up = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            for k in range(0, K, BLOCK_K):
                a = load_x(x, p_x, row, k, K, stride_xk, X_TMA, BLOCK_K, EVEN_K, OFFSET)
                b = load_w(
                    w, p_w, expert, n, k, N, K, stride_wn, stride_wk,
                    W_TMA, K_MAJOR, WIDTH, BLOCK_K, EVEN_K, OFFSET,
                )  # fmt: skip
                c = load_w(
                    w, p_w, expert, N + n, k, 2 * N, K, stride_wn, stride_wk,
                    W_TMA, K_MAJOR, WIDTH, BLOCK_K, EVEN_K, OFFSET,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
                up = tl.dot(a, c, up, input_precision=PRECISION)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            first = n * 2 if GATED else n
            for k in range(0, K, BLOCK_K):
                a = load_x(x, p_x, row, k, K, stride_xk, X_TMA, BLOCK_K, EVEN_K, OFFSET)
                b = load_w(
                    w, p_w, expert, first, k, columns, K, stride_wn, stride_wk,
                    W_TMA, K_MAJOR, BLOCK_N, BLOCK_K, EVEN_K, OFFSET,
                )  # fmt: skip
                acc = tl.dot(a, b, acc, input_precision=PRECISION)

        o_n = n + tl.arange(0, WIDTH)
        m_n = o_n < N
        live = (slots >= 0)[:, None]
        p_b = bias
        if HAS_BIAS:
            p_b = bias + expert * stride_be
        if GATED and INTERLEAVED:
            acc = add_bias(acc, p_b, 2 * n, columns, stride_bn, HAS_BIAS, BLOCK_N)
            if KEEP_H:
                keep(t_h, h, acc, live, row, end, 2 * n, columns, stride_hm, H_TMA, BLOCK_M, BLOCK_N, OFFSET)
            gate, up = tl.split(tl.reshape(acc, [BLOCK_M, WIDTH, 2]))
            y = EPILOGUE(gate, up, P)
        elif GATED:
            acc = add_bias(acc, p_b, n, N, stride_bn, HAS_BIAS, WIDTH)
            up = add_bias(up, p_b + N * stride_bn if HAS_BIAS else p_b, n, N, stride_bn, HAS_BIAS, WIDTH)
            if KEEP_H:
                keep(t_h, h, acc, live, row, end, n, N, stride_hm, H_TMA, BLOCK_M, WIDTH, OFFSET)
                keep(t_up, h + N, up, live, row, end, n, N, stride_hm, H_TMA, BLOCK_M, WIDTH, OFFSET)
            y = EPILOGUE(acc, up, P)
        else:
            acc = add_bias(acc, p_b, n, N, stride_bn, HAS_BIAS, WIDTH)
            if KEEP_H:
                keep(t_h, h, acc, live, row, end, n, N, stride_hm, H_TMA, BLOCK_M, WIDTH, OFFSET)
            y = EPILOGUE(acc, P)

        if HAS_SCALE:
            p_s = scale + (slots // top_k).to(OFFSET) * stride_st + (slots % top_k) * stride_sk
            y *= tl.load(p_s, mask=slots >= 0, other=0.0).to(tl.float32)[:, None]
        y = tl.where(live, y, 0.0)
        if OUT_TMA:
            store_ragged(t_out, y, row, end, n, BLOCK_M, WIDTH)
        else:
            m_out = m_m[:, None] & m_n[None, :]
            if OUT_ROWS != ROW:
                m_out = m_out & live
            p_y = out + find_rows(o_m, slots, top_k, OUT_ROWS, OFFSET)[:, None] * stride_om
            tl.store(p_y + o_n[None, :].to(OFFSET) * stride_on, y.to(out.dtype.element_ty), mask=m_out)

    total = load_offset(offsets, num_experts, num_rows)
    zero_unused(
        out, slot_to_row, total, num_rows, num_slots, N, stride_om, stride_on, OUT_ROWS, 16, WIDTH, OFFSET
    )
    if KEEP_H:
        zero_unused(h, slot_to_row, total, num_rows, num_slots, columns, stride_hm, 1, ROW, 16, WIDTH, OFFSET)


@triton.jit(do_not_specialize=["num_experts", "num_rows", "num_slots"])
def weight_gradient_kernel(
    d_z, x, d_w, t_w, marks, offsets, row_to_slot, num_experts, num_rows, num_slots, top_k, N, K,
    stride_zm, stride_zn, stride_xm, stride_xk, stride_we, stride_wn, stride_wk,
    Z_ROWS: tl.constexpr, X_ROWS: tl.constexpr, Z_TMA: tl.constexpr, X_TMA: tl.constexpr,
    W_TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """``d_w[expert] = d_z[rows].T @ x[rows]``: (N, K) per expert, or marked one; zeros for one without rows."""
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    per_expert = num_n * num_k
    num_tiles = num_experts * per_expert
    if marks is not None:
        num_tiles = tl.where(any_marked(marks, num_experts), num_tiles, 0)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tile // per_expert
        tile_n, tile_k = tile_coordinates(tile - expert * per_expert, num_n, num_k, GROUP_M)
        start = load_offset(offsets, expert, num_rows)
        end = load_offset(offsets, expert + 1, num_rows)
        n = tile_n * BLOCK_N
        k = tile_k * BLOCK_K
        o_n = n + tl.arange(0, BLOCK_N)
        o_k = k + tl.arange(0, BLOCK_K)
        if marks is not None:
            marked = tl.load(marks + expert) > 0
            end = tl.where(marked, end, start)
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for r in range(start, end, BLOCK_R):
            o_r = r + tl.arange(0, BLOCK_R)
            m_r = o_r < end
            slots = o_r
            if not (Z_TMA and X_TMA):
                slots = load_slots(row_to_slot, o_r, m_r, num_slots)
                m_r = slots >= 0
            if Z_TMA:
                a = load_ragged(d_z, r, end, n, BLOCK_R, BLOCK_N)
            else:
                p = d_z + find_rows(o_r, slots, top_k, Z_ROWS, OFFSET)[:, None] * stride_zm
                p += o_n[None, :].to(OFFSET) * stride_zn
                a = tl.load(p, mask=m_r[:, None] & (o_n < N)[None, :], other=0.0)
            if X_TMA:
                b = load_ragged(x, r, end, k, BLOCK_R, BLOCK_K)
            else:
                p = x + find_rows(o_r, slots, top_k, X_ROWS, OFFSET)[:, None] * stride_xm
                p += o_k[None, :].to(OFFSET) * stride_xk
                b = tl.load(p, mask=m_r[:, None] & (o_k < K)[None, :], other=0.0)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        if W_TMA:
            t_w.store([expert, n, k], tl.reshape(acc.to(d_w.dtype.element_ty), [1, BLOCK_N, BLOCK_K]))
        else:
            p_w = d_w + expert.to(tl.int64) * stride_we
            p_w += o_n[:, None].to(OFFSET) * stride_wn + o_k[None, :].to(OFFSET) * stride_wk
            m_w = (o_n < N)[:, None] & (o_k < K)[None, :]
            if marks is not None:
                m_w = m_w & marked
            tl.store(p_w, acc.to(d_w.dtype.element_ty), mask=m_w)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def pre_activation_gradient_kernel(
    grad, h, scale, d_z, a_out, d_scale, offsets, row_to_slot, num_rows, num_experts, num_slots, top_k, N,
    stride_gm, stride_gn, stride_hm, stride_st, stride_sk, stride_zm, stride_am,
    EPILOGUE: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, GRAD_ROWS: tl.constexpr,
    HAS_H: tl.constexpr, HAS_SCALE: tl.constexpr, NEED_Z: tl.constexpr, NEED_A: tl.constexpr, NEED_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Row by row, N columns of grad: ``d_z = epilogue'(h) * scale * grad``, ``a_out = scale * epilogue(h)`` and
    ``d_scale = <grad, epilogue(h)>``. d_z may be h, and a_out grad: a tile is read before it is written.
    """
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = load_slots(row_to_slot, o_m, o_m < load_offset(offsets, num_experts, num_rows), num_slots)
    live = slots >= 0
    o_row = o_m[:, None].to(OFFSET)
    p_g = grad + find_rows(o_m, slots, top_k, GRAD_ROWS, OFFSET)[:, None] * stride_gm
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_SCALE:
        p_s = scale + (slots // top_k).to(OFFSET) * stride_st + (slots % top_k) * stride_sk
        factor = tl.load(p_s, mask=live, other=0.0).to(tl.float32)
    dot = tl.zeros([BLOCK_M], tl.float32)
    for n in range(0, N, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = (o_n < N)[None, :]
        m_load = live[:, None] & m_n
        m_store = (o_m < num_rows)[:, None] & m_n
        d = tl.load(p_g + o_n[None, :].to(OFFSET) * stride_gn, mask=m_load, other=0.0).to(tl.float32)
        scaled = d * factor[:, None]
        if NEED_Z or not HAS_H:
            p_z = d_z + o_row * stride_zm
        a = d
        if not HAS_H:
            tl.store(p_z + o_n[None, :], scaled.to(d_z.dtype.element_ty), mask=m_store)
        elif GATED and INTERLEAVED:
            o_2n = 2 * n + tl.arange(0, 2 * BLOCK_N)[None, :]
            both = tl.load(h + o_row * stride_hm + o_2n, mask=live[:, None] & (o_2n < 2 * N), other=0.0).to(
                tl.float32
            )
            gate, up = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
            d_gate, d_up, a = EPILOGUE(scaled, gate, up, P)
            if NEED_Z:
                both = tl.where(live[:, None], tl.reshape(tl.join(d_gate, d_up), [BLOCK_M, 2 * BLOCK_N]), 0.0)
                m_2n = (o_m < num_rows)[:, None] & (o_2n < 2 * N)
                tl.store(p_z + o_2n, both.to(d_z.dtype.element_ty), mask=m_2n)
        elif GATED:
            p_h = h + o_row * stride_hm + o_n[None, :]
            gate = tl.load(p_h, mask=m_load, other=0.0).to(tl.float32)
            up = tl.load(p_h + N, mask=m_load, other=0.0).to(tl.float32)
            d_gate, d_up, a = EPILOGUE(scaled, gate, up, P)
            if NEED_Z:
                tl.store(
                    p_z + o_n[None, :], tl.where(m_load, d_gate, 0.0).to(d_z.dtype.element_ty), mask=m_store
                )
                tl.store(
                    p_z + N + o_n[None, :], tl.where(m_load, d_up, 0.0).to(d_z.dtype.element_ty), mask=m_store
                )
        else:
            z = tl.load(h + o_row * stride_hm + o_n[None, :], mask=m_load, other=0.0).to(tl.float32)
            d_one, a = EPILOGUE(scaled, z, P)
            if NEED_Z:
                tl.store(
                    p_z + o_n[None, :], tl.where(m_load, d_one, 0.0).to(d_z.dtype.element_ty), mask=m_store
                )
        if NEED_A:
            weighted = tl.where(m_load, a * factor[:, None], 0.0)
            tl.store(
                a_out + o_row * stride_am + o_n[None, :], weighted.to(a_out.dtype.element_ty), mask=m_store
            )
        if NEED_SCALE:
            dot += tl.sum(tl.where(m_load, d * a, 0.0), 1)
    if NEED_SCALE:
        tl.store(d_scale + slots, dot.to(d_scale.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def bias_gradient_kernel(
    d_z, scale, d_bias, offsets, row_to_slot, num_rows, num_slots, top_k, N,
    stride_zm, stride_zn, stride_st, stride_sk, stride_be,
    Z_ROWS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """``d_bias[expert] = sum of (scale *) d_z over its rows``, in row order."""
    expert = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = load_offset(offsets, expert + 1, num_rows)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for r in range(load_offset(offsets, expert, num_rows), end, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        slots = load_slots(row_to_slot, o_r, o_r < end, num_slots)
        p = d_z + find_rows(o_r, slots, top_k, Z_ROWS, OFFSET)[:, None] * stride_zm
        p += o_n[None, :].to(OFFSET) * stride_zn
        value = tl.load(p, mask=(slots >= 0)[:, None] & (o_n < N)[None, :], other=0.0).to(tl.float32)
        if HAS_SCALE:
            p_s = scale + (slots // top_k).to(OFFSET) * stride_st + (slots % top_k) * stride_sk
            value *= tl.load(p_s, mask=slots >= 0, other=0.0).to(tl.float32)[:, None]
        acc += tl.sum(value, 0)
    tl.store(d_bias + expert * stride_be + o_n, acc.to(d_bias.dtype.element_ty), mask=o_n < N)
