"""The gradient of a grouped product's weight: an expert's rows are the reduction, and may be of any number.

Letters: M rows of the gradient, N columns; each operand's rows lie in expert order, or are GATHERED (A_, B_) from
token order through the row's slot.
"""

from anabranch._backends.hopper.gluon import (
    async_copy,
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    warpgroup_mma_wait,
)
from anabranch._backends.hopper.pipeline import (
    advance,
    columns,
    hand_back,
    load_ragged,
    multiply,
    put,
    ring,
    tile_buffers,
)
from anabranch._backends.triton.schedule import tile_coordinates
from anabranch.ops.grouped_gemm.backends.hopper.producers import gather_live, inside


@jit
def place(tile, per_expert, num_m, num_n, offsets, num_experts, num_rows, GROUP_M: gl.constexpr):
    """(expert, row tile, column tile, the expert's first row, its end) of a tile; of the last expert past them all."""
    expert = gl.minimum(tile // per_expert, num_experts - 1)
    m, n = tile_coordinates(tile - expert * per_expert, num_m, num_n, GROUP_M)
    start = gl.minimum(gl.maximum(gl.load(offsets + expert), 0), num_rows)
    return expert, m, n, start, gl.minimum(gl.load(offsets + expert + 1), num_rows)


@jit
def consumer(
    c: gl.constexpr, a_bufs, b_bufs, c_bufs, full, empty, dw_desc, offsets, num_experts, num_rows, M, N,
    A_GATHERED: gl.constexpr, B_GATHERED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    EPI_N: gl.constexpr, NBUF: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores rows 64 * c to 64 * c + 63 of every tile; zeros for an expert without rows."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    num_m = gl.cdiv(M, 128)
    num_n = gl.cdiv(N, BN)
    per_expert = num_m * num_n
    stage = 0
    phase = 0
    slot = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    expert, m, n, start, end = place(first, per_expert, num_m, num_n, offsets, num_experts, num_rows, GROUP_M)
    for tile in range(first, num_experts * per_expert, step):
        rows = end - start
        acc = gl.zeros([64, BN], gl.float32, LAYOUT)
        following = place(tile + step, per_expert, num_m, num_n, offsets, num_experts, num_rows, GROUP_M)
        for r in range(0, rows, BK):
            mbarrier.wait(full.index(stage), phase)
            if A_GATHERED or B_GATHERED:
                fence_async_shared()
            a = a_bufs.index(stage * 2 + c).reshape([BK, 64]).permute((1, 0))
            b = b_bufs.index(stage).reshape([BK, BN])
            acc = multiply(acc, r > 0, a, b, empty, stage, STAGES)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        hand_back(empty, stage, rows > 0, STAGES)
        F: gl.constexpr = BN // EPI_N
        parts = columns(acc, F)
        for i in gl.static_range(F):
            at = [expert, m * 128 + c * 64, n * BN + i * EPI_N]
            slot = put(parts[i], c_bufs, c * NBUF, slot, dw_desc, at, NBUF)
        expert, m, n, start, end = following
    store_wait(pendings=0)


@jit
def producer(
    a_bufs, b_bufs, full, empty, a, b, stride_a, stride_b, row_to_slot, offsets, num_experts, num_rows, num_slots, M, N,
    TOP_K: gl.constexpr, A_GATHERED: gl.constexpr, B_GATHERED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Loads both operands' tiles, zeros past the expert's end; a gathered one repeats a token there instead.

    At most one is gathered, so that the other's zeros are what counts, as long as no token holds an infinity or NaN;
    therefore what is repeated is the expert's own first token.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BYTES: gl.constexpr = (0 if A_GATHERED else 128 * BK * 2) + (0 if B_GATHERED else BN * BK * 2)
    num_m = gl.cdiv(M, 128)
    num_n = gl.cdiv(N, BN)
    per_expert = num_m * num_n
    o_r = gl.arange(0, BK, layout=gl.SliceLayout(1, LAYOUT))
    stage = 0
    phase = 1
    first = gl.program_id(0)
    step = gl.num_programs(0)
    _, m, n, start, end = place(first, per_expert, num_m, num_n, offsets, num_experts, num_rows, GROUP_M)
    for tile in range(first, num_experts * per_expert, step):
        following = place(tile + step, per_expert, num_m, num_n, offsets, num_experts, num_rows, GROUP_M)
        if A_GATHERED or B_GATHERED:
            slots = gl.load(
                row_to_slot + gl.where(start + o_r < end, start + o_r, start), mask=start < end, other=0
            )
        # Not range(start, end, BK): what a loop hands on for no more than bounds of another inside it, Triton 3.6
        # takes for unused and keeps at its first value, and then every tile would begin at the first one's expert.
        for k in range(0, end - start, BK):
            r = start + k
            bar = full.index(stage)
            if A_GATHERED or B_GATHERED:
                live = slots >= 0
                token = inside(slots, num_slots) // TOP_K
                ahead = r + BK + o_r
                slots = gl.load(row_to_slot + gl.where(ahead < end, ahead, start))
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            if A_GATHERED:
                columns_a = m * 128 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
                for c in gl.static_range(2):
                    gather_live(a + c * 64, token * stride_a, columns_a, live, a_bufs.index(stage * 2 + c))
            else:
                for c in gl.static_range(2):
                    load_ragged(a, r, end, m * 128 + c * 64, bar, a_bufs.index(stage * 2 + c))
            if B_GATHERED:
                columns_b = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
                gather_live(b, token * stride_b, columns_b, live, b_bufs.index(stage))
            else:
                load_ragged(b, r, end, n * BN, bar, b_bufs.index(stage))
            if A_GATHERED or B_GATHERED:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = advance(stage, phase, STAGES)
        _, m, n, start, end = following
    if A_GATHERED or B_GATHERED:
        async_copy.wait_group(0)


@jit(do_not_specialize=["num_experts", "num_rows", "num_slots"])
def weight_gradient_kernel(
    a, b, dw_desc, row_to_slot, offsets, stride_a, stride_b, num_experts, num_rows, num_slots, M, N,
    A_LAYOUT: gl.constexpr, B_LAYOUT: gl.constexpr, TOP_K: gl.constexpr, A_GATHERED: gl.constexpr,
    B_GATHERED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, EPI_N: gl.constexpr,
    NBUF: gl.constexpr, GROUP_M: gl.constexpr, WARPS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``dw[expert] = a[rows].T @ b[rows]``; a and b are descriptors, or pointers if gathered."""
    dtype: gl.constexpr = dw_desc.dtype
    a_bufs = tile_buffers(dtype, A_LAYOUT, A_GATHERED, STAGES * 2, BK, 64)
    b_bufs = tile_buffers(dtype, B_LAYOUT, B_GATHERED, STAGES, BK, BN)
    c_bufs = gl.allocate_shared_memory(dtype, [2 * NBUF, 1, 64, EPI_N], dw_desc.layout)
    full, empty = ring(STAGES, 32 * WARPS + 1 if A_GATHERED or B_GATHERED else 1, 2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (consumer, (
                0, a_bufs, b_bufs, c_bufs, full, empty, dw_desc, offsets, num_experts, num_rows, M, N,
                A_GATHERED, B_GATHERED, BN, BK, STAGES, EPI_N, NBUF, GROUP_M,
            )),
            (consumer, (
                1, a_bufs, b_bufs, c_bufs, full, empty, dw_desc, offsets, num_experts, num_rows, M, N,
                A_GATHERED, B_GATHERED, BN, BK, STAGES, EPI_N, NBUF, GROUP_M,
            )),
            (producer, (
                a_bufs, b_bufs, full, empty, a, b, stride_a, stride_b, row_to_slot, offsets, num_experts, num_rows,
                num_slots, M, N, TOP_K, A_GATHERED, B_GATHERED, BN, BK, STAGES, GROUP_M, WARPS,
            )),
        ],
        [4, WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
