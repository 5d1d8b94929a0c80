"""The grouped product: two warpgroups multiply half a tile each, a third loads; what follows is in the epilogue.

Letters: N output columns (pairs of them behind a gate), K the reduction. Rows of x are found in one of two ways:
loaded as they lie, in expert order, or GATHERED from token order through the row's slot.
"""

from anabranch._backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    store_wait,
    warpgroup_mma_wait,
)
from anabranch._backends.hopper.pipeline import (
    advance,
    columns,
    hand_back,
    locate,
    look_up,
    multiply,
    place,
    put,
    reach,
    ring,
    tile_buffers,
)
from anabranch.ops.grouped_gemm.backends.hopper.producers import gathering_producer, producer


@jit
def operand(
    b_bufs, stage, BN: gl.constexpr, BK: gl.constexpr, K_MAJOR: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A stage's (BK, BN) tile of the weight."""
    if K_MAJOR:
        return b_bufs.index(stage).reshape([BN, BK]).permute((1, 0))
    elif PARTS == 1:
        return b_bufs.index(stage).reshape([BK, BN])
    else:
        # Shared memory keeps a wide tile as blocks of 64 columns: the parts follow one another as the whole would.
        whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return reinterpret(b_bufs, [STAGES, BK, BN], whole).index(stage)


@jit
def add_bias(x, bias, expert, n, N, stride_be, HAS_BIAS: gl.constexpr):
    """The tile plus its columns of one expert's bias."""
    if HAS_BIAS:
        o_n = n + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
        value = gl.load(bias + expert * stride_be + o_n, mask=o_n < N, other=0.0).to(gl.float32)
        return x + value[None, :]
    else:
        return x


@jit
def pair(left, right):
    """(gate, up) of two neighbouring tiles whose columns alternate. No register moves."""
    gate0, up0 = left.reshape([left.shape[0], left.shape[1] // 2, 2]).split()
    gate1, up1 = right.reshape([left.shape[0], left.shape[1] // 2, 2]).split()
    return beside(gate0, gate1), beside(up0, up1)


@jit
def beside(left, right):
    """The two tiles as one."""
    return gl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@jit
def finish(
    acc, c: gl.constexpr, c_bufs, slot, out_desc, h_desc, up_desc, bias, stride_be, expert, row, end, n, N,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, KEEP_H: gl.constexpr,
    HAS_BIAS: gl.constexpr, EPI_N: gl.constexpr, NBUF: gl.constexpr,
):  # fmt: skip
    """Bias, pre-activation and epilogue of a (64, BN) accumulator, piece by piece.

    Pieces leave through NBUF buffers in turn; ``slot`` is the next one's, and is returned.
    """
    FIRST: gl.constexpr = c * NBUF
    big = 1 << 30
    r = big - end + row
    if GATED:
        F: gl.constexpr = acc.shape[1] // 2 // EPI_N
        parts = columns(acc, 2 * F)
        for i in gl.static_range(F):
            if INTERLEAVED:
                x0 = 2 * n + 2 * i * EPI_N
                x1 = x0 + EPI_N
                left = add_bias(parts[2 * i], bias, expert, x0, 2 * N, stride_be, HAS_BIAS)
                right = add_bias(parts[2 * i + 1], bias, expert, x1, 2 * N, stride_be, HAS_BIAS)
            else:
                x0 = n + i * EPI_N
                x1 = x0
                left = add_bias(parts[i], bias, expert, x0, N, stride_be, HAS_BIAS)
                right = add_bias(parts[F + i], bias + N, expert, x0, N, stride_be, HAS_BIAS)
            if KEEP_H:
                slot = put(left, c_bufs, FIRST, slot, h_desc, [big, end, r, x0], NBUF)
                slot = put(right, c_bufs, FIRST, slot, up_desc, [big, end, r, x1], NBUF)
            if INTERLEAVED:
                left, right = pair(left, right)
            slot = put(
                EPILOGUE(left, right, P), c_bufs, FIRST, slot, out_desc, [big, end, r, n + i * EPI_N], NBUF
            )
    else:
        S: gl.constexpr = acc.shape[1] // EPI_N
        parts = columns(acc, S)
        for i in gl.static_range(S):
            at = n + i * EPI_N
            z = add_bias(parts[i], bias, expert, at, N, stride_be, HAS_BIAS)
            if KEEP_H:
                slot = put(z, c_bufs, FIRST, slot, h_desc, [big, end, r, at], NBUF)
            slot = put(EPILOGUE(z, P), c_bufs, FIRST, slot, out_desc, [big, end, r, at], NBUF)
    return slot


@jit
def zero_rest(h, first, last, width):
    """Writes zeros to the rows that no slot has."""
    lay: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    o_n = gl.arange(0, 1024, layout=lay)
    zeros = gl.zeros([1024], h.dtype.element_ty, lay)
    for row in range(first + gl.program_id(0), last, gl.num_programs(0)):
        for n in range(0, width, 1024):
            gl.store(h + gl.cast(row, gl.int64) * width + n + o_n, zeros, mask=n + o_n < width)


@jit
def steps(
    acc, begin, end, c: gl.constexpr, a_bufs, b_bufs, full, empty, stage, phase, FENCED: gl.constexpr,
    K_MAJOR: gl.constexpr, PARTS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Products of the stages numbered from ``begin``, the first of which starts the accumulator."""
    for k in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        if FENCED:
            fence_async_shared()
        b = operand(b_bufs, stage, BN, BK, K_MAJOR, PARTS, STAGES)
        a = a_bufs.index(stage * 2 + c).reshape([64, BK])
        acc = multiply(acc, k > 0, a, b, empty, stage, STAGES)
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@jit
def consumer(
    c: gl.constexpr, a_bufs, b_bufs, c_bufs, full, empty, go, out_desc, h_desc, up_desc, h, bias, stride_be,
    tiles, size, num_rows, N, K,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, KEEP_H: gl.constexpr,
    HAS_BIAS: gl.constexpr, FENCED: gl.constexpr, K_MAJOR: gl.constexpr, PARTS: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, EPI_N: gl.constexpr, NBUF: gl.constexpr,
    GROUP_M: gl.constexpr, STEADY: gl.constexpr, SKEW: gl.constexpr,
):  # fmt: skip
    """Multiplies and finishes rows 64 * c to 64 * c + 63 of every tile that reaches them, STEADY multiplies in all."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    num_n = gl.cdiv(N, WIDTH)
    total = gl.load(tiles + 4 * size) * num_n
    num_k = gl.cdiv(K, BK)
    stage = 0
    phase = 0
    turn = 0
    slot = 0
    acc = gl.zeros([64, BN], gl.float32, LAYOUT)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    expert, row, end, tile_n = locate(first, total, num_n, tiles, size, GROUP_M)
    for tile in range(first, total, step):
        found = look_up(tile + step, total, num_n, tiles, size)
        if SKEW > 0 and c == 1:
            # The second half starts SKEW stages after the first, so that the two do not finish together.
            mbarrier.wait(go, turn)
        if row + 64 * c < reach(row, end, STEADY):
            begun = SKEW if SKEW > 0 and c == 0 else 1
            acc, stage, phase = steps(
                acc, 0, begun, c, a_bufs, b_bufs, full, empty, stage, phase,
                FENCED, K_MAJOR, PARTS, BN, BK, STAGES,
            )  # fmt: skip
            if SKEW > 0 and c == 0:
                mbarrier.arrive(go, count=1)
            acc, stage, phase = steps(
                acc, begun, num_k, c, a_bufs, b_bufs, full, empty, stage, phase,
                FENCED, K_MAJOR, PARTS, BN, BK, STAGES,
            )  # fmt: skip
            # Where the next tile is, is worked out while there is a product to wait for anyway.
            following = place(found, num_n, GROUP_M)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            hand_back(empty, stage, True, STAGES)
            if row + 64 * c < end:
                slot = finish(
                    acc, c, c_bufs, slot, out_desc, h_desc, up_desc, bias, stride_be, expert, row + 64 * c, end,
                    tile_n * WIDTH, N, EPILOGUE, P, GATED, INTERLEAVED, KEEP_H, HAS_BIAS, EPI_N, NBUF,
                )  # fmt: skip
        else:
            for _ in range(num_k):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
            following = place(found, num_n, GROUP_M)
        turn = turn ^ 1
        expert, row, end, tile_n = following
    if KEEP_H and c == 0:
        zero_rest(h, gl.load(tiles + 4 * size + 1), num_rows, 2 * N if GATED else N)
    store_wait(pendings=0)


@jit(do_not_specialize=["size", "num_rows", "num_slots"])
def product_kernel(
    x, w_desc, out_desc, h_desc, up_desc, h, bias, row_to_slot, tiles,
    stride_xm, stride_be, size, num_rows, num_slots, N, K, A_LAYOUT: gl.constexpr, TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, KEEP_H: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATHERED: gl.constexpr, K_MAJOR: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, EPI_N: gl.constexpr, NBUF: gl.constexpr,
    GROUP_M: gl.constexpr, STEADY: gl.constexpr, SKEW: gl.constexpr, LAG: gl.constexpr, WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``out[row] = epilogue(x[row] @ w[expert].T + bias[expert])``; x is a descriptor, or a pointer if GATHERED."""
    PARTS: gl.constexpr = 2 if GATED and not INTERLEAVED and not K_MAJOR else 1
    dtype: gl.constexpr = w_desc.dtype
    a_bufs = tile_buffers(dtype, A_LAYOUT, GATHERED, STAGES * 2, 64, BK)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES * PARTS] + w_desc.block_type.shape, w_desc.layout)
    c_bufs = gl.allocate_shared_memory(dtype, [2 * NBUF, 1, 1, 64, EPI_N], out_desc.layout)
    full, empty = ring(STAGES, (2 if LAG > 0 else 32 * WARPS + 1) if GATHERED else 1, 2)
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    fence_async_shared()
    barrier()
    # A descriptor costs the host time, so what is not stored has none.
    first_desc = h_desc if KEEP_H else out_desc
    second_desc = up_desc if KEEP_H and GATED and not INTERLEAVED else first_desc
    F: gl.constexpr = EPILOGUE  # a function is handed on as a constant alone
    if GATHERED:
        gl.warp_specialize(
            [
                (consumer, (
                    0, a_bufs, b_bufs, c_bufs, full, empty, go, out_desc, first_desc, second_desc, h, bias, stride_be,
                    tiles, size, num_rows, N, K, F, P, GATED, INTERLEAVED, KEEP_H, HAS_BIAS,
                    LAG == 0, K_MAJOR, PARTS, BN, BK, STAGES, EPI_N, NBUF, GROUP_M, STEADY, SKEW,
                )),
                (consumer, (
                    1, a_bufs, b_bufs, c_bufs, full, empty, go, out_desc, first_desc, second_desc, h, bias, stride_be,
                    tiles, size, num_rows, N, K, F, P, GATED, INTERLEAVED, KEEP_H, HAS_BIAS,
                    LAG == 0, K_MAJOR, PARTS, BN, BK, STAGES, EPI_N, NBUF, GROUP_M, STEADY, SKEW,
                )),
                (gathering_producer, (
                    a_bufs, b_bufs, full, empty, x, stride_xm, row_to_slot, w_desc, tiles, size, num_slots, N, K, TOP_K,
                    GATED, INTERLEAVED, K_MAJOR, PARTS, BN, BK, STAGES, GROUP_M, STEADY, WARPS, LAG, False,
                )),
            ],
            [4, WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (
                    0, a_bufs, b_bufs, c_bufs, full, empty, go, out_desc, first_desc, second_desc, h, bias, stride_be,
                    tiles, size, num_rows, N, K, F, P, GATED, INTERLEAVED, KEEP_H, HAS_BIAS,
                    False, K_MAJOR, PARTS, BN, BK, STAGES, EPI_N, NBUF, GROUP_M, STEADY, SKEW,
                )),
                (consumer, (
                    1, a_bufs, b_bufs, c_bufs, full, empty, go, out_desc, first_desc, second_desc, h, bias, stride_be,
                    tiles, size, num_rows, N, K, F, P, GATED, INTERLEAVED, KEEP_H, HAS_BIAS,
                    False, K_MAJOR, PARTS, BN, BK, STAGES, EPI_N, NBUF, GROUP_M, STEADY, SKEW,
                )),
                (producer, (
                    a_bufs, b_bufs, full, empty, x, w_desc, tiles, size, N, K,
                    GATED, INTERLEAVED, K_MAJOR, PARTS, BN, BK, STAGES, GROUP_M, STEADY,
                )),
            ],
            [4, WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
