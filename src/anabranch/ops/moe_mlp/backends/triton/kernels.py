"""The kernels of moe_mlp's backward that no single grouped GEMM is. The grammar of names is grouped_gemm's."""

import triton
import triton.language as tl

from anabranch._backends.triton.ragged import halves, load_ragged, store_ragged
from anabranch._backends.triton.schedule import tile_coordinates
from anabranch.ops.grouped_gemm.backends.triton.kernels import TOKEN, find_rows, load_w, load_x


@triton.jit(do_not_specialize=["size", "num_rows"])
def activation_gradient_kernel(
    grad, w, h, weights, d_h, a_out, t_h, t_up, t_d_h, t_d_up, t_a, partial, offsets, row_to_slot, tiles, size, num_rows, top_k, N, K,
    stride_gm, stride_gk, stride_we, stride_wn, stride_wk, stride_hm, stride_st, stride_sk,
    EPILOGUE: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr,
    NEED_D_H: tl.constexpr, NEED_A: tl.constexpr, NEED_WEIGHTS: tl.constexpr,
    W_TMA: tl.constexpr, H_TMA: tl.constexpr, K_MAJOR: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, OFFSET: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """``d_a' = grad[token] @ w[expert].T`` in the accumulator; from it, h and the routing weight:

    ``d_h = epilogue'(h) * weight * d_a'``, ``a_out = weight * a`` and, per tile of N, ``partial = <d_a', a>``.
    """
    num_m = tl.load(tiles + 2 * size)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_coordinates(tile, num_m, num_n, GROUP_M)
        expert = tl.load(tiles + tile_m)
        row = tl.load(tiles + size + tile_m)
        end = tl.load(offsets + expert + 1)
        n = tile_n * BLOCK_N
        o_m = row + tl.arange(0, BLOCK_M)
        m_m = o_m < end
        slots = tl.load(row_to_slot + o_m, mask=m_m, other=-1)
        p_w = w
        if not W_TMA:
            p_w = w + expert.to(tl.int64) * stride_we
        p_g = grad + find_rows(o_m, slots, top_k, TOKEN, OFFSET)[:, None] * stride_gm
        d_a = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            g = load_x(grad, p_g, row, k, K, stride_gk, False, BLOCK_K, EVEN_K, OFFSET)
            b = load_w(w, p_w, expert, n, k, N, K, stride_wn, stride_wk, W_TMA, K_MAJOR, BLOCK_N, BLOCK_K, EVEN_K, OFFSET)
            d_a = tl.dot(g, b, d_a, input_precision=PRECISION)

        weight = tl.full([BLOCK_M], 1.0, tl.float32)
        if WEIGHTED:
            p_s = weights + (slots // top_k).to(OFFSET) * stride_st + (slots % top_k) * stride_sk
            weight = tl.load(p_s, mask=slots >= 0, other=0.0).to(tl.float32)
        dot = tl.zeros([BLOCK_M], tl.float32)
        # A quarter of the columns at a time: six tiles of fp32 are live in here, and registers are few.
        left, right = halves(d_a, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            part = left if half == 0 else right
            first, second = halves(part, BLOCK_M, BLOCK_N // 2)
            for quarter in tl.static_range(2):
                dot += finish(
                    first if quarter == 0 else second, n + (2 * half + quarter) * (BLOCK_N // 4), row, end, weight,
                    h, d_h, a_out, t_h, t_up, t_d_h, t_d_up, t_a, N, stride_hm,
                    EPILOGUE, P, GATED, INTERLEAVED, NEED_D_H, NEED_A, H_TMA, BLOCK_M, BLOCK_N // 4, OFFSET,
                )  # fmt: skip
        if NEED_WEIGHTS:
            tl.store(partial + tl.cast(tile_n, tl.int64) * num_rows + o_m, dot, mask=m_m)


@triton.jit
def finish(
    d_a, n, row, end, weight, h, d_h, a_out, t_h, t_up, t_d_h, t_d_up, t_a, N, stride_hm,
    EPILOGUE: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    NEED_D_H: tl.constexpr, NEED_A: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Writes d_h and the weighted a for some columns; returns ``<d_a, a>`` over them."""
    scaled = d_a * weight[:, None]
    if GATED and INTERLEAVED:
        both = get(t_h, h, row, end, 2 * n, 2 * N, stride_hm, TMA, BLOCK_M, 2 * BLOCK_N, OFFSET)
        gate, up = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
        d_gate, d_up, a = EPILOGUE(scaled, gate, up, P)
        if NEED_D_H:
            both = tl.reshape(tl.join(d_gate, d_up), [BLOCK_M, 2 * BLOCK_N])
            put(t_d_h, d_h, both, row, end, 2 * n, 2 * N, 2 * N, TMA, BLOCK_M, 2 * BLOCK_N, OFFSET)
    elif GATED:
        gate = get(t_h, h, row, end, n, N, stride_hm, TMA, BLOCK_M, BLOCK_N, OFFSET)
        up = get(t_up, h + N, row, end, n, N, stride_hm, TMA, BLOCK_M, BLOCK_N, OFFSET)
        d_gate, d_up, a = EPILOGUE(scaled, gate, up, P)
        if NEED_D_H:
            put(t_d_h, d_h, d_gate, row, end, n, N, 2 * N, TMA, BLOCK_M, BLOCK_N, OFFSET)
            put(t_d_up, d_h + N, d_up, row, end, n, N, 2 * N, TMA, BLOCK_M, BLOCK_N, OFFSET)
    else:
        z = get(t_h, h, row, end, n, N, stride_hm, TMA, BLOCK_M, BLOCK_N, OFFSET)
        d_z, a = EPILOGUE(scaled, z, P)
        if NEED_D_H:
            put(t_d_h, d_h, d_z, row, end, n, N, N, TMA, BLOCK_M, BLOCK_N, OFFSET)
    if NEED_A:
        put(t_a, a_out, a * weight[:, None], row, end, n, N, N, TMA, BLOCK_M, BLOCK_N, OFFSET)
    o_n = n + tl.arange(0, BLOCK_N)
    return tl.sum(tl.where((o_n < N)[None, :], d_a * a, 0.0), 1)


@triton.jit
def get(
    descriptor, pointer, row, end, n, N, stride_m,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A tile in fp32, zeros outside the expert's rows and N columns."""
    if TMA:
        return load_ragged(descriptor, row, end, n, BLOCK_M, BLOCK_N).to(tl.float32)
    else:
        o_m = row + tl.arange(0, BLOCK_M)
        o_n = n + tl.arange(0, BLOCK_N)
        p = pointer + o_m[:, None].to(OFFSET) * stride_m + o_n[None, :]
        return tl.load(p, mask=(o_m < end)[:, None] & (o_n < N)[None, :], other=0.0).to(tl.float32)


@triton.jit
def put(
    descriptor, pointer, value, row, end, n, N, stride_m,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Writes a tile inside the expert's rows and N columns."""
    if TMA:
        store_ragged(descriptor, value, row, end, n, BLOCK_M, BLOCK_N)
    else:
        o_m = row + tl.arange(0, BLOCK_M)
        o_n = n + tl.arange(0, BLOCK_N)
        p = pointer + o_m[:, None].to(OFFSET) * stride_m + o_n[None, :]
        tl.store(p, value.to(pointer.dtype.element_ty), mask=(o_m < end)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def routing_weight_gradient_kernel(
    partial, slot_to_row, offsets, grad, bias, d_weights, num_slots, num_rows, num_parts, top_k, H, num_experts,
    stride_gm, stride_gh, stride_be, stride_bh,
    HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``d_weights[slot] = sum of the row's partials (+ <grad[token], bias[expert]>)``, 0 for a dropped slot."""
    slots = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    rows = tl.load(slot_to_row + slots, mask=slots < num_slots, other=-1)
    live = rows >= 0
    acc = tl.zeros([BLOCK_S], tl.float32)
    p = partial + rows
    for _ in range(num_parts):
        acc += tl.load(p, mask=live, other=0.0)
        p += num_rows
    if HAS_BIAS:
        o_e = tl.arange(0, EXPERTS)
        stops = tl.load(offsets + 1 + o_e, mask=o_e < num_experts, other=2**31 - 1)
        expert = tl.sum((stops[None, :] <= rows[:, None]).to(tl.int32), 1)  # how many experts end before the row
        p_g = grad + (slots // top_k).to(tl.int64)[:, None] * stride_gm
        p_b = bias + expert.to(tl.int64)[:, None] * stride_be
        for h in range(0, H, BLOCK_H):
            o_h = (h + tl.arange(0, BLOCK_H))[None, :]
            mask = live[:, None] & (o_h < H)
            g = tl.load(p_g + o_h.to(tl.int64) * stride_gh, mask=mask, other=0.0).to(tl.float32)
            acc += tl.sum(g * tl.load(p_b + o_h * stride_bh, mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(d_weights + slots, acc.to(d_weights.dtype.element_ty), mask=slots < num_slots)


@triton.jit
def weighted_rows_kernel(
    x, weights, row_to_slot, out, top_k, H, stride_xm, stride_xh, stride_st, stride_sk, BLOCK_H: tl.constexpr
):
    """``out[row] = weight * x[token]`` in fp32, rounded; zeros for a row without a slot."""
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.load(row_to_slot + row)
    live = slot >= 0
    token = (tl.maximum(slot, 0) // top_k).to(tl.int64)
    weight = tl.load(weights + token * stride_st + (slot % top_k) * stride_sk, mask=live, other=0.0).to(tl.float32)
    value = tl.load(x + token * stride_xm + o_h.to(tl.int64) * stride_xh, mask=live & (o_h < H), other=0.0)
    tl.store(out + row * H + o_h, (value.to(tl.float32) * weight).to(out.dtype.element_ty), mask=o_h < H)


@triton.jit
def input_weight_gradient_kernel(
    d_rows, x, slot_to_row, d_weights, top_k, H, stride_xm, stride_xh, BLOCK_H: tl.constexpr
):
    """``d_weights[slot] = <d_rows[row], x[token]>``, 0 for a dropped slot."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slot_to_row + slot).to(tl.int64)
    live = row >= 0
    acc = tl.zeros([BLOCK_H], tl.float32)
    for h in range(0, H, BLOCK_H):
        o_h = h + tl.arange(0, BLOCK_H)
        mask = live & (o_h < H)
        d = tl.load(d_rows + row * H + o_h, mask=mask, other=0.0).to(tl.float32)
        acc += d * tl.load(x + (slot // top_k) * stride_xm + o_h.to(tl.int64) * stride_xh, mask=mask, other=0.0)
    tl.store(d_weights + slot, tl.sum(acc, 0).to(d_weights.dtype.element_ty))
