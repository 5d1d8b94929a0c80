"""What follows the product in the gate's gradient: the pre-activation beside it, and what the gradients ask for.

The pre-activation comes by a ring that a warp of its own keeps filled, or by pointers. The first is sooner there; the
second leaves shared memory to the product, and is for whole tiles of columns that do not alternate.
Letters: N columns of the activation.
"""

from anabranch._backends.hopper.gluon import gl, jit, mbarrier, reinterpret, tma_load
from anabranch._backends.hopper.pipeline import advance, locate, look_up, place


@jit
def h_loader(
    h_desc, h_bufs, h_full, h_empty, tiles, size, N, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    BN: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PIECE_M: gl.constexpr,
):  # fmt: skip
    """Loads the pre-activation of PIECE_M rows at a time, in the order in which the finishing warps take it."""
    num_n = gl.cdiv(N, BN)
    total = gl.load(tiles + 4 * size) * num_n
    stage = 0
    phase = 1
    _, row, end, tile_n = locate(gl.program_id(0), total, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        found = look_up(tile + gl.num_programs(0), total, num_n, tiles, size)
        n = tile_n * BN
        for i in range(128 // PIECE_M):
            begin = row + i * PIECE_M
            if begin < end:
                bar = h_full.index(stage)
                mbarrier.wait(h_empty.index(stage), phase)
                mbarrier.expect(bar, PARTS * PIECE_M * BN * 2)
                if INTERLEAVED:
                    tma_load(h_desc, [begin, 2 * n], bar, h_bufs.index(stage * PARTS))
                    tma_load(h_desc, [begin, 2 * n + BN], bar, h_bufs.index(stage * PARTS + 1))
                else:
                    tma_load(h_desc, [begin, n], bar, h_bufs.index(stage * PARTS))
                    if GATED:
                        tma_load(h_desc, [begin, N + n], bar, h_bufs.index(stage * PARTS + 1))
                stage, phase = advance(stage, phase, STAGES)
        _, row, end, tile_n = place(found, num_n, GROUP_M)


@jit
def read_h(
    h_pieces, stage, j: gl.constexpr, COUNT: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    ACROSS: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The pre-activation beside COUNT pieces from piece j on: of each (gate, up), (both,) or (it,)."""
    if COUNT > 1:
        first = read_h(h_pieces, stage, j, COUNT // 2, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE)
        return first + read_h(
            h_pieces, stage, j + COUNT // 2, COUNT // 2, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE
        )
    elif INTERLEAVED:
        return ((h_pieces.index(stage * ACROSS + j).load(WIDE),),)
    elif GATED:
        at = stage * 2 * ACROSS + j
        return ((h_pieces.index(at).load(LAYOUT), h_pieces.index(at + ACROSS).load(LAYOUT)),)
    else:
        return ((h_pieces.index(stage * ACROSS + j).load(LAYOUT),),)


@jit
def load_h(h, row, end, n, N, stride_hm, at, GATED: gl.constexpr):
    """What :func:`read_h` gives of one piece, by pointers; anything past the expert's end."""
    o_m, o_n, _, _ = at
    live = ((row + o_m) < end)[:, None]
    p = h + (row + o_m).to(gl.int64)[:, None] * stride_hm + (n + o_n)[None, :]
    if GATED:
        return gl.load(p, mask=live), gl.load(p + N, mask=live)
    else:
        return (gl.load(p, mask=live),)


@jit
def load_pieces(h, row, end, n, N, stride_hm, at, GATED: gl.constexpr, COUNT: gl.constexpr):
    """What :func:`load_h` gives of COUNT pieces side by side."""
    if COUNT == 1:
        return (load_h(h, row, end, n, N, stride_hm, at, GATED),)
    else:
        HALF: gl.constexpr = COUNT // 2
        left = load_pieces(h, row, end, n, N, stride_hm, at, GATED, HALF)
        n += HALF * 64
        return left + load_pieces(h, row, end, n, N, stride_hm, at, GATED, HALF)


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
    d_bufs, ready, free, h, h_bufs, h_full, h_empty, stride_hm, weights, stride_wt, stride_wk, row_to_slot, d_h,
    a_out, dots, num_slots, tiles, size, N,
    EPILOGUE: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, WEIGHTED: gl.constexpr,
    NEED_H: gl.constexpr, NEED_A: gl.constexpr, NEED_DOT: gl.constexpr, TOP_K: gl.constexpr, BN: gl.constexpr,
    GROUP_M: gl.constexpr, PIECE_M: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    WHOLE_N: gl.constexpr,
):  # fmt: skip
    """From the activation's gradient in shared memory to what is needed, piece by piece, 16 bytes a thread.

    With a ring of STAGES ``h_bufs`` holds the pre-activation; with none ``h`` is a pointer to it.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    ACROSS: gl.constexpr = BN // 64
    DOWN: gl.constexpr = 64 // PIECE_M
    num_n = gl.cdiv(N, BN)
    total = gl.load(tiles + 4 * size) * num_n
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
    RING: gl.constexpr = STAGES > 0
    gl.static_assert(RING or (WHOLE_N and not INTERLEAVED))
    if RING:
        H_WIDTH: gl.constexpr = 128 if INTERLEAVED else 64
        h_pieces = reinterpret(h_bufs, [STAGES * PARTS * BN // H_WIDTH, PIECE_M, H_WIDTH], WHOLE)
    stage = 0
    phase = 0
    turns = 0
    _, row, end, tile_n = locate(gl.program_id(0), total, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        found = look_up(tile + gl.num_programs(0), total, num_n, tiles, size)
        first_n = tile_n * BN
        for c in range(2):
            first = row + 64 * c
            if first < end:
                stop = gl.minimum(end, first + 64)
                if not RING:
                    z = load_pieces(h, first, stop, first_n, N, stride_hm, at, GATED, ACROSS)
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
                    if RING:
                        mbarrier.wait(h_full.index(stage), phase)
                        # Read at once, rows make room for others soon; alternating columns take registers to part.
                        if not INTERLEAVED:
                            z = read_h(h_pieces, stage, 0, ACROSS, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE)
                            mbarrier.arrive(h_empty.index(stage), count=1)
                    else:
                        z_next = ()
                    dot = gl.zeros([PIECE_M, 64], gl.float32, layout=LAYOUT)
                    for j in gl.static_range(ACROSS):
                        n = first_n + j * 64
                        d = pieces.index((c * ACROSS + j) * DOWN + i).load(LAYOUT).to(gl.float32)
                        if INTERLEAVED:
                            piece = read_h(h_pieces, stage, j, 1, GATED, INTERLEAVED, ACROSS, LAYOUT, WIDE)[0]
                        else:
                            piece = z[j]
                        dot += finish(
                            d, piece, factor, begin, end, n, N, d_h, a_out, stride_hm, at,
                            EPILOGUE, P, GATED, INTERLEAVED, NEED_H, NEED_A, WIDE, WHOLE_N,
                        )  # fmt: skip
                        if not RING:
                            below = load_h(h, begin + PIECE_M, stop, n, N, stride_hm, at, GATED)
                            z_next = z_next + (below,)
                    if RING:
                        if INTERLEAVED:
                            mbarrier.arrive(h_empty.index(stage), count=1)
                        stage, phase = advance(stage, phase, STAGES)
                    else:
                        z = z_next
                    if NEED_DOT:
                        p = dots + tile_n.to(gl.int64) * num_slots + slots
                        gl.store(p, gl.sum(dot, axis=1), mask=slots >= 0)
                    slots = slots_next
                    slots_next = slots_after
                    factor = factor_next
                mbarrier.arrive(free.index(c), count=1)
        _, row, end, tile_n = place(found, num_n, GROUP_M)
