"""The multi_gemm kernel. Letters: M rows, N output columns, K the reduction; o_ offsets, m_ masks, p_ pointers.

Up to SLOTS products share a launch. Programs stay and take every tile in turn, those of the first product
first, so that only the last of all leaves multiprocessors idle. Each product has a loop of its own in the
code, since how its operands are loaded is decided by their strides.
"""

import triton
import triton.language as tl

from anabranch._backends.triton.schedule import tile_coordinates
from anabranch.ops.multi_gemm import config

SLOTS = 4
"""Products of a launch. Their operands are arguments by name, because a tuple can hold no descriptor, and so
are their rows, because the members of a tuple are specialized: any number of rows runs the same kernel."""
COPIED = tl.constexpr(config.COPIED)
TMA = tl.constexpr(config.TMA)


@triton.jit
def _load_x(
    x, p_x, m, o_m, k, M, K, stride_k, HOW: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK_K: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_M, BLOCK_K) tile of x, zero outside it."""
    if HOW == TMA:
        if K_MAJOR:
            return x.load([m, k])
        else:
            return x.load([k, m]).T
    else:
        if HOW == COPIED and not K_MAJOR:
            # Known to the launcher; the compiler learns that no copy of 16 bytes is cut in two.
            M = M // 16 * 16
        o_k = k + tl.arange(0, BLOCK_K)
        p = p_x + o_k[None, :].to(OFFSET) * stride_k
        return tl.load(p, mask=(o_m < M)[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def _load_w(
    w, p_w, n, o_n, k, N, K, stride_k, HOW: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK_K: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_K, BLOCK_N) tile of w transposed, zero outside it."""
    if HOW == TMA:
        if K_MAJOR:
            return w.load([n, k]).T
        else:
            return w.load([k, n])
    else:
        o_k = k + tl.arange(0, BLOCK_K)
        p = p_w + o_k[:, None].to(OFFSET) * stride_k
        return tl.load(p, mask=(o_k < K)[:, None] & (o_n < N)[None, :], other=0.0)


@triton.jit
def _product(
    x, w, y, first, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, stride_ym, stride_yn,
    X_HOW: tl.constexpr, W_HOW: tl.constexpr, Y_TMA: tl.constexpr, X_K_MAJOR: tl.constexpr,
    W_K_MAJOR: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, OFFSET: tl.constexpr, FLATTEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``y = x @ w.T``, the tiles from ``first`` on that are this program's."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(first, num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_coordinates(tile, num_m, num_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        o_m = m + tl.arange(0, BLOCK_M)
        o_n = n + tl.arange(0, BLOCK_N)
        p_x = x
        if X_HOW != TMA:
            p_x = x + o_m[:, None].to(OFFSET) * stride_xm
        p_w = w
        if W_HOW != TMA:
            p_w = w + o_n[None, :].to(OFFSET) * stride_wn
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a = _load_x(x, p_x, m, o_m, k, M, K, stride_xk, X_HOW, X_K_MAJOR, BLOCK_K, OFFSET)
            b = _load_w(w, p_w, n, o_n, k, N, K, stride_wk, W_HOW, W_K_MAJOR, BLOCK_K, OFFSET)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if Y_TMA:
            y.store([m, n], acc.to(DTYPE))
        else:
            p_y = y + o_m[:, None].to(OFFSET) * stride_ym + o_n[None, :].to(OFFSET) * stride_yn
            tl.store(p_y, acc.to(DTYPE), mask=(o_m < M)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["m_0", "m_1", "m_2", "m_3"])
def multi_gemm_kernel(
    x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, y_0, y_1, y_2, y_3, m_0, m_1, m_2, m_3, sizes,
    COUNT: tl.constexpr, LOADS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, FLATTEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """COUNT products. Of each m is M, ``sizes`` has N, K and six strides, LOADS what _product wants to know."""
    rows = (m_0, m_1, m_2, m_3)
    xs = (x_0, x_1, x_2, x_3)
    ws = (w_0, w_1, w_2, w_3)
    ys = (y_0, y_1, y_2, y_3)
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    for i in tl.static_range(COUNT):
        M = rows[i]
        N = sizes[8 * i]
        _product(
            xs[i], ws[i], ys[i], first, M, N, sizes[8 * i + 1], sizes[8 * i + 2], sizes[8 * i + 3],
            sizes[8 * i + 4], sizes[8 * i + 5], sizes[8 * i + 6], sizes[8 * i + 7],
            LOADS[6 * i], LOADS[6 * i + 1], LOADS[6 * i + 2], LOADS[6 * i + 3], LOADS[6 * i + 4],
            PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, LOADS[6 * i + 5], FLATTEN, DTYPE,
        )  # fmt: skip
        # The next product's tiles go on with the program after the one that had the last.
        used = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        first = (first + programs - used % programs) % programs
