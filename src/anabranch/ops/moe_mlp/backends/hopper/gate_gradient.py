"""The gradient of the pre-activation: a product whose accumulator two more warps take on from shared memory.

The two multiplying warpgroups only round their half tile and leave it; while they multiply the next tile, the
finishing warps take the pre-activation beside it from a ring of its own, whose loads one more warp keeps on their
way, and write what the needed gradients ask for.
Letters: N columns of the activation, K the reduction (columns of the output).
"""

from anabranch._backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma_wait,
)
from anabranch._backends.hopper.pipeline import advance, columns, hand_back, locate, ring
from anabranch.ops.grouped_gemm.backends.hopper.producers import producer
from anabranch.ops.grouped_gemm.backends.hopper.product import steps


@jit
def consumer(
    c: gl.constexpr, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
    K_MAJOR: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    SKEW: gl.constexpr,
):  # fmt: skip
    """Multiplies rows 64 * c to 64 * c + 63 of every tile and leaves them for the finishing warps.

    The first half leads by SKEW stages, so that one half multiplies while the other is left.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    num_m = gl.load(tiles + 3 * size)
    num_n = gl.cdiv(N, BN)
    total = num_m * num_n
    num_k = gl.cdiv(K, BK)
    stage = 0
    phase = 0
    turn = 1
    passed = 0
    acc = gl.zeros([64, BN], gl.float32, LAYOUT)
    _, row, end, _ = locate(gl.program_id(0), total, num_m, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        if SKEW > 0 and c == 1:
            mbarrier.wait(go, passed)
        passed = passed ^ 1
        if row + 64 * c < end:
            if SKEW > 0 and c == 0:
                begun = gl.minimum(num_k, SKEW)
            else:
                begun = gl.minimum(num_k, 1)
            acc, stage, phase = steps(
                acc, 0, begun, c, a_bufs, b_bufs, full, empty, stage, phase, False, K_MAJOR, 1, BN, BK, STAGES
            )
            if SKEW > 0 and c == 0:
                mbarrier.arrive(go, count=1)
            following = locate(tile + gl.num_programs(0), total, num_m, num_n, tiles, size, GROUP_M)
            acc, stage, phase = steps(
                acc,
                begun,
                num_k,
                c,
                a_bufs,
                b_bufs,
                full,
                empty,
                stage,
                phase,
                False,
                K_MAJOR,
                1,
                BN,
                BK,
                STAGES,
            )
            acc = warpgroup_mma_wait(0, deps=(acc,))
            hand_back(empty, stage, num_k > 0, STAGES)
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
            following = locate(tile + gl.num_programs(0), total, num_m, num_n, tiles, size, GROUP_M)
        _, row, end, _ = following


@jit
def h_loader(
    h_desc, h_bufs, h_full, h_empty, tiles, size, N, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    BN: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr, PIECE_M: gl.constexpr,
):  # fmt: skip
    """Loads the pre-activation of PIECE_M rows at a time, in the order in which the finishing warps take it."""
    num_m = gl.load(tiles + 3 * size)
    num_n = gl.cdiv(N, BN)
    total = num_m * num_n
    slot = 0
    phase = 1
    _, row, end, tile_n = locate(gl.program_id(0), total, num_m, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = locate(tile + gl.num_programs(0), total, num_m, num_n, tiles, size, GROUP_M)
        n = tile_n * BN
        for i in range(128 // PIECE_M):
            begin = row + i * PIECE_M
            if begin < end:
                bar = h_full.index(slot)
                mbarrier.wait(h_empty.index(slot), phase)
                mbarrier.expect(bar, PARTS * PIECE_M * BN * 2)
                if INTERLEAVED:
                    tma_load(h_desc, [begin, 2 * n], bar, h_bufs.index(slot * PARTS))
                    tma_load(h_desc, [begin, 2 * n + BN], bar, h_bufs.index(slot * PARTS + 1))
                else:
                    tma_load(h_desc, [begin, n], bar, h_bufs.index(slot * PARTS))
                    if GATED:
                        tma_load(h_desc, [begin, N + n], bar, h_bufs.index(slot * PARTS + 1))
                slot, phase = advance(slot, phase, SLOTS)
        _, row, end, tile_n = following


@jit
def read_h(
    h_pieces, slot, j: gl.constexpr, COUNT: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    ACROSS: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The pre-activation beside COUNT pieces from piece j on: of each (gate, up), (both,) or (it,)."""
    if COUNT > 1:
        first = read_h(h_pieces, slot, j, COUNT // 2, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE)
        return first + read_h(
            h_pieces, slot, j + COUNT // 2, COUNT // 2, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE
        )
    elif INTERLEAVED:
        return ((h_pieces.index(slot * ACROSS + j).load(WIDE),),)
    elif GATED:
        at = slot * 2 * ACROSS + j
        return ((h_pieces.index(at).load(LAYOUT), h_pieces.index(at + ACROSS).load(LAYOUT)),)
    else:
        return ((h_pieces.index(slot * ACROSS + j).load(LAYOUT),),)


@jit
def load_slots(row_to_slot, r, end):
    """The slots of rows, -1 past the expert's end."""
    return gl.load(row_to_slot + r, mask=r < end, other=-1)


@jit
def load_factors(weights, slots, stride_wt, stride_wk, TOP_K: gl.constexpr, WEIGHTED: gl.constexpr):
    """The routing weights of slots, 0 where there is none."""
    if WEIGHTED:
        slot = gl.maximum(slots, 0)
        p = weights + (slot // TOP_K).to(gl.int64) * stride_wt + (slot % TOP_K) * stride_wk
        return gl.load(p, mask=slots >= 0, other=0.0).to(gl.float32)
    else:
        return gl.full([slots.shape[0]], 1.0, gl.float32, layout=slots.type.layout)


@jit
def finish(
    d, z, factor, row, end, n, N, d_h, a_out, stride_hm, at,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    NEED_H: gl.constexpr, NEED_A: gl.constexpr, WIDE: gl.constexpr, WHOLE_N: gl.constexpr,
):  # fmt: skip
    """Writes what is needed of a piece; returns what to add up along its rows."""
    LAYOUT: gl.constexpr = d.type.layout
    o_m, o_n, w_m, w_n = at
    store = ((row + o_m) < end)[:, None]
    if not WHOLE_N:
        store = store & (n + o_n < N)[None, :]
    o_row = (row + o_m).to(gl.int64)[:, None]
    p_h = d_h + o_row * stride_hm + (n + o_n)[None, :]
    scaled = d * factor[:, None]
    if GATED and INTERLEAVED:
        gate, up = z[0].to(gl.float32).reshape([d.shape[0], d.shape[1], 2]).split()
        gate = gl.convert_layout(gate, LAYOUT)
        up = gl.convert_layout(up, LAYOUT)
        d_gate, d_up, a = EPILOGUE(scaled, gate, up, P)
        if NEED_H:
            both = gl.join(d_gate, d_up).reshape([d.shape[0], 2 * d.shape[1]]).to(d_h.dtype.element_ty)
            store_both = ((row + w_m) < end)[:, None]
            if not WHOLE_N:
                store_both = store_both & (2 * n + w_n < 2 * N)[None, :]
            p_both = d_h + (row + w_m).to(gl.int64)[:, None] * stride_hm + (2 * n + w_n)[None, :]
            gl.store(p_both, gl.convert_layout(both, WIDE), mask=store_both)
    elif GATED:
        d_gate, d_up, a = EPILOGUE(scaled, z[0].to(gl.float32), z[1].to(gl.float32), P)
        if NEED_H:
            gl.store(p_h, d_gate.to(d_h.dtype.element_ty), mask=store)
            gl.store(p_h + N, d_up.to(d_h.dtype.element_ty), mask=store)
    else:
        d_z, a = EPILOGUE(scaled, z[0].to(gl.float32), P)
        if NEED_H:
            gl.store(p_h, d_z.to(d_h.dtype.element_ty), mask=store)
    if NEED_A:
        gl.store(
            a_out + o_row * N + (n + o_n)[None, :],
            (a * factor[:, None]).to(a_out.dtype.element_ty),
            mask=store,
        )
    if WHOLE_N:
        return d * a  # rows past the expert's end have no slot that their sum would go to
    else:
        return gl.where(store, d * a, 0.0)


@jit
def finisher(
    d_bufs, ready, free, h_bufs, h_full, h_empty, stride_hm, weights, stride_wt, stride_wk, row_to_slot, d_h,
    a_out, dots, num_slots, tiles, size, N,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, WEIGHTED: gl.constexpr,
    NEED_H: gl.constexpr, NEED_A: gl.constexpr, NEED_DOT: gl.constexpr, TOP_K: gl.constexpr, BN: gl.constexpr,
    GROUP_M: gl.constexpr, PIECE_M: gl.constexpr, WARPS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr,
    WHOLE_N: gl.constexpr,
):  # fmt: skip
    """From the activation's gradient in shared memory to what is needed, piece by piece, 16 bytes a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    ACROSS: gl.constexpr = BN // 64
    DOWN: gl.constexpr = 64 // PIECE_M
    num_m = gl.load(tiles + 3 * size)
    num_n = gl.cdiv(N, BN)
    total = num_m * num_n
    o_m = gl.arange(0, PIECE_M, layout=gl.SliceLayout(1, LAYOUT))
    at = (
        o_m,
        gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)),
        gl.arange(0, PIECE_M, layout=gl.SliceLayout(1, WIDE)),
        gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)),
    )
    # Blocks of 8 rows follow one another in shared memory: any number of them is a tile too.
    WHOLE: gl.constexpr = d_bufs.layout
    pieces = reinterpret(d_bufs, [2 * ACROSS * DOWN, PIECE_M, 64], WHOLE)
    # Read at once, rows make room for others soon; alternating columns take more registers to part.
    AT_ONCE: gl.constexpr = not INTERLEAVED
    H_WIDTH: gl.constexpr = 128 if INTERLEAVED else 64
    h_pieces = reinterpret(h_bufs, [SLOTS * PARTS * BN // H_WIDTH, PIECE_M, H_WIDTH], WHOLE)
    slot = 0
    phase = 0
    turns = 0
    _, row, end, tile_n = locate(gl.program_id(0), total, num_m, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = locate(tile + gl.num_programs(0), total, num_m, num_n, tiles, size, GROUP_M)
        first_n = tile_n * BN
        for c in range(2):
            first = row + 64 * c
            if first < end:
                stop = gl.minimum(end, first + 64)
                slots = load_slots(row_to_slot, first + o_m, end)
                slots_next = load_slots(row_to_slot, first + PIECE_M + o_m, end)
                factor = load_factors(weights, slots, stride_wt, stride_wk, TOP_K, WEIGHTED)
                mbarrier.wait(ready.index(c), (turns >> c) & 1)
                turns = turns ^ (1 << c)
                for i in range(gl.cdiv(stop - first, PIECE_M)):
                    begin = first + i * PIECE_M
                    # What the next rows need is on its way while these are worked on.
                    factor_next = load_factors(weights, slots_next, stride_wt, stride_wk, TOP_K, WEIGHTED)
                    slots_after = load_slots(row_to_slot, begin + 2 * PIECE_M + o_m, end)
                    mbarrier.wait(h_full.index(slot), phase)
                    if AT_ONCE:
                        z = read_h(h_pieces, slot, 0, ACROSS, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE)
                        mbarrier.arrive(h_empty.index(slot), count=1)
                    dot = gl.zeros([PIECE_M, 64], gl.float32, layout=LAYOUT)
                    for j in gl.static_range(ACROSS):
                        n = first_n + j * 64
                        d = pieces.index((c * ACROSS + j) * DOWN + i).load(LAYOUT).to(gl.float32)
                        if AT_ONCE:
                            piece = z[j]
                        else:
                            piece = read_h(h_pieces, slot, j, 1, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE)[0]
                        dot += finish(
                            d, piece, factor, begin, end, n, N, d_h, a_out, stride_hm, at,
                            EPILOGUE, P, GATED, INTERLEAVED, NEED_H, NEED_A, WIDE, WHOLE_N,
                        )  # fmt: skip
                    if not AT_ONCE:
                        mbarrier.arrive(h_empty.index(slot), count=1)
                    slot, phase = advance(slot, phase, SLOTS)
                    if NEED_DOT:
                        p = dots + tile_n.to(gl.int64) * num_slots + slots
                        gl.store(p, gl.sum(dot, axis=1), mask=slots >= 0)
                    slots = slots_next
                    slots_next = slots_after
                    factor = factor_next
                mbarrier.arrive(free.index(c), count=1)
        _, row, end, tile_n = following


@jit(do_not_specialize=["size", "num_slots"])
def gate_gradient_kernel(
    x_desc, w_desc, h_desc, weights, d_h, a_out, dots, row_to_slot, tiles,
    stride_hm, stride_wt, stride_wk, num_slots, size, N, K,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, WEIGHTED: gl.constexpr,
    NEED_H: gl.constexpr, NEED_A: gl.constexpr, NEED_DOT: gl.constexpr, TOP_K: gl.constexpr,
    K_MAJOR: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PIECE_M: gl.constexpr, FINISHERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    FINISHER_REGISTERS: gl.constexpr, SLOTS: gl.constexpr, SKEW: gl.constexpr, WHOLE_N: gl.constexpr,
):  # fmt: skip
    """With d = x[row] @ w[expert].T: ``d_h = epilogue'(h) * weight * d``, ``a_out = weight * epilogue(h)`` and, by
    tile of columns and slot, ``dots = <d, epilogue(h)>``. d_h may be h: a piece is read before it is written.
    """
    dtype: gl.constexpr = w_desc.dtype
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES * 2, 64, BK], x_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    d_bufs = gl.allocate_shared_memory(dtype, [2 * (BN // 64), 64, 64], whole)
    full, empty = ring(STAGES, 1, 2)
    ready, free = ring(2, 1, 1)
    PARTS: gl.constexpr = 2 if GATED else 1
    h_bufs = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, PIECE_M, BN], h_desc.layout)
    h_full, h_empty = ring(SLOTS, 1, 1)
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    fence_async_shared()
    barrier()
    F: gl.constexpr = EPILOGUE  # a function is handed on as a constant alone
    gl.warp_specialize(
        [
            (consumer, (
                0, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
                K_MAJOR, BN, BK, STAGES, GROUP_M, SKEW,
            )),
            (consumer, (
                1, a_bufs, b_bufs, d_bufs, full, empty, ready, free, go, tiles, size, N, K,
                K_MAJOR, BN, BK, STAGES, GROUP_M, SKEW,
            )),
            (finisher, (
                d_bufs, ready, free, h_bufs, h_full, h_empty, stride_hm, weights, stride_wt, stride_wk, row_to_slot,
                d_h, a_out, dots, num_slots, tiles, size, N, F, P, GATED, INTERLEAVED, WEIGHTED,
                NEED_H, NEED_A, NEED_DOT, TOP_K, BN, GROUP_M, PIECE_M, FINISHERS, SLOTS, PARTS, WHOLE_N,
            )),
            (h_loader, (
                h_desc, h_bufs, h_full, h_empty, tiles, size, N, GATED, INTERLEAVED, BN, GROUP_M, SLOTS, PARTS,
                PIECE_M,
            )),
            (producer, (
                a_bufs, b_bufs, full, empty, x_desc, w_desc, tiles, size, N, K,
                False, False, K_MAJOR, 1, BN, BK, STAGES, GROUP_M,
            )),
        ],
        [4, FINISHERS, 1, 1],
        [CONSUMER_REGISTERS, FINISHER_REGISTERS, 24, 24],
    )  # fmt: skip
