"""The gradient of the pre-activation: a product whose accumulator two more warps take on from shared memory.

The two multiplying warpgroups only round their half tile and leave it; while they multiply the next tile, the
finishing warps take the pre-activation beside it, and write what the needed gradients ask for.
Rows of the output's gradient lie in expert order, or are GATHERED from token order through the row's slot.
Letters: N columns of the activation, K the reduction (columns of the output).
"""

from anabranch._backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warpgroup_mma_wait,
)
from anabranch._backends.hopper.pipeline import (
    advance,
    columns,
    hand_back,
    locate,
    look_up,
    place,
    reach,
    ring,
    tile_buffers,
)
from anabranch.ops.grouped_gemm.backends.hopper.producers import gathering_producer, producer
from anabranch.ops.grouped_gemm.backends.hopper.product import steps
from anabranch.ops.moe_mlp.backends.hopper.finishing import finisher, h_loader


@jit
def consumer(
    c: gl.constexpr, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
    K_MAJOR: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STEADY: gl.constexpr, SKEW: gl.constexpr, FENCED: gl.constexpr,
):  # fmt: skip
    """Multiplies rows 64 * c to 64 * c + 63 of every tile and leaves them for the finishing warps.

    The first half leads by SKEW stages, so that one half multiplies while the other is left.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    num_n = gl.cdiv(N, BN)
    total = gl.load(tiles + 4 * size) * num_n
    num_k = gl.cdiv(K, BK)
    stage = 0
    phase = 0
    turn = 1
    passed = 0
    acc = gl.zeros([64, BN], gl.float32, LAYOUT)
    _, row, end, _ = locate(gl.program_id(0), total, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        found = look_up(tile + gl.num_programs(0), total, num_n, tiles, size)
        if SKEW > 0 and c == 1:
            mbarrier.wait(go, passed)
        passed = passed ^ 1
        if row + 64 * c < reach(row, end, STEADY):
            if SKEW > 0 and c == 0:
                begun = gl.minimum(num_k, SKEW)
            else:
                begun = gl.minimum(num_k, 1)
            acc, stage, phase = steps(
                acc, 0, begun, c, a_bufs, b_bufs, full, empty, stage, phase, FENCED, K_MAJOR, 1, BN, BK, STAGES
            )  # fmt: skip
            if SKEW > 0 and c == 0:
                mbarrier.arrive(go, count=1)
            acc, stage, phase = steps(
                acc, begun, num_k, c, a_bufs, b_bufs, full, empty, stage, phase, FENCED, K_MAJOR, 1, BN, BK, STAGES
            )  # fmt: skip
            following = place(found, num_n, GROUP_M)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            hand_back(empty, stage, num_k > 0, STAGES)
            if row + 64 * c < end:
                mbarrier.wait(free.index(c), turn)
                ACROSS: gl.constexpr = BN // 64
                parts = columns(acc, ACROSS)
                for i in gl.static_range(ACROSS):
                    d_bufs.index(c * ACROSS + i).store(parts[i].to(d_bufs.dtype))
                mbarrier.arrive(ready.index(c), count=1)
                turn = turn ^ 1
        else:
            for _ in range(num_k):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
            following = place(found, num_n, GROUP_M)
        _, row, end, _ = following


@jit
def loader(
    a_bufs, b_bufs, full, empty, x, stride_xm, row_to_slot, w_desc, tiles, size, num_slots, N, K, TOP_K: gl.constexpr,
    GATHERED: gl.constexpr, K_MAJOR: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, STEADY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Loads both operands' tiles; a gathered row without a slot is zeros."""
    if GATHERED:
        gathering_producer(
            a_bufs, b_bufs, full, empty, x, stride_xm, row_to_slot, w_desc, tiles, size, num_slots, N, K, TOP_K,
            False, False, K_MAJOR, 1, BN, BK, STAGES, GROUP_M, STEADY, WARPS, 0, True,
        )  # fmt: skip
    else:
        producer(
            a_bufs, b_bufs, full, empty, x, w_desc, tiles, size, N, K,
            False, False, K_MAJOR, 1, BN, BK, STAGES, GROUP_M, STEADY,
        )  # fmt: skip


@jit(do_not_specialize=["size", "num_slots"])
def gate_gradient_kernel(
    x, w_desc, h, weights, d_h, a_out, dots, row_to_slot, tiles,
    stride_xm, stride_hm, stride_wt, stride_wk, num_slots, size, N, K, A_LAYOUT: gl.constexpr,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, WEIGHTED: gl.constexpr,
    NEED_H: gl.constexpr, NEED_A: gl.constexpr, NEED_DOT: gl.constexpr, TOP_K: gl.constexpr,
    GATHERED: gl.constexpr, K_MAJOR: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STEADY: gl.constexpr,
    SKEW: gl.constexpr, WARPS: gl.constexpr, PIECE_M: gl.constexpr, H_STAGES: gl.constexpr, FINISHERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, FINISHER_REGISTERS: gl.constexpr, WHOLE_N: gl.constexpr,
):  # fmt: skip
    """With d = x[row] @ w[expert].T: ``d_h = epilogue'(h) * weight * d``, ``a_out = weight * epilogue(h)`` and, by
    tile of columns and slot, ``dots = <d, epilogue(h)>``. d_h may be h: a piece is read before it is written.

    x is a descriptor, or a pointer if GATHERED; h is a descriptor, or a pointer if H_STAGES is 0.
    """
    dtype: gl.constexpr = w_desc.dtype
    a_bufs = tile_buffers(dtype, A_LAYOUT, GATHERED, STAGES * 2, 64, BK)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    d_bufs = gl.allocate_shared_memory(dtype, [2 * (BN // 64), 64, 64], whole)
    full, empty = ring(STAGES, 32 * WARPS + 1 if GATHERED else 1, 2)
    ready, free = ring(2, 1, 1)
    PARTS: gl.constexpr = 2 if GATED else 1
    RING: gl.constexpr = H_STAGES > 0
    if RING:
        h_bufs = gl.allocate_shared_memory(dtype, [H_STAGES * PARTS, PIECE_M, BN], h.layout)
        h_full, h_empty = ring(H_STAGES, 1, 1)
    else:
        h_bufs, h_full, h_empty = d_bufs, ready, free
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    fence_async_shared()
    barrier()
    # A function is handed on as a constant alone, and no tuple that is kept may hold one: both lists are written out.
    F: gl.constexpr = EPILOGUE
    if RING:
        gl.warp_specialize(
            [
                (consumer, (
                    0, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
                    K_MAJOR, BN, BK, STAGES, GROUP_M, STEADY, SKEW, GATHERED,
                )),
                (consumer, (
                    1, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
                    K_MAJOR, BN, BK, STAGES, GROUP_M, STEADY, SKEW, GATHERED,
                )),
                (finisher, (
                    d_bufs, ready, free, weights, h_bufs, h_full, h_empty, stride_hm, weights, stride_wt, stride_wk,
                    row_to_slot, d_h, a_out, dots, num_slots, tiles, size, N, F, P, GATED, INTERLEAVED, WEIGHTED,
                    NEED_H, NEED_A, NEED_DOT, TOP_K, BN, GROUP_M, PIECE_M, FINISHERS, H_STAGES, PARTS, WHOLE_N,
                )),
                (h_loader, (
                    h, h_bufs, h_full, h_empty, tiles, size, N, GATED, INTERLEAVED, BN, GROUP_M, H_STAGES, PARTS,
                    PIECE_M,
                )),
                (loader, (
                    a_bufs, b_bufs, full, empty, x, stride_xm, row_to_slot, w_desc, tiles, size, num_slots, N, K,
                    TOP_K, GATHERED, K_MAJOR, BN, BK, STAGES, GROUP_M, STEADY, WARPS,
                )),
            ],
            [4, FINISHERS, 1, WARPS],
            [CONSUMER_REGISTERS, FINISHER_REGISTERS, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (
                    0, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
                    K_MAJOR, BN, BK, STAGES, GROUP_M, STEADY, SKEW, GATHERED,
                )),
                (consumer, (
                    1, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
                    K_MAJOR, BN, BK, STAGES, GROUP_M, STEADY, SKEW, GATHERED,
                )),
                (finisher, (
                    d_bufs, ready, free, h, h_bufs, h_full, h_empty, stride_hm, weights, stride_wt, stride_wk,
                    row_to_slot, d_h, a_out, dots, num_slots, tiles, size, N, F, P, GATED, INTERLEAVED, WEIGHTED,
                    NEED_H, NEED_A, NEED_DOT, TOP_K, BN, GROUP_M, PIECE_M, FINISHERS, H_STAGES, PARTS, WHOLE_N,
                )),
                (loader, (
                    a_bufs, b_bufs, full, empty, x, stride_xm, row_to_slot, w_desc, tiles, size, num_slots, N, K,
                    TOP_K, GATHERED, K_MAJOR, BN, BK, STAGES, GROUP_M, STEADY, WARPS,
                )),
            ],
            [4, FINISHERS, WARPS],
            [CONSUMER_REGISTERS, FINISHER_REGISTERS, 24],
        )  # fmt: skip
