"""What loads the operands of a product with a weight: one warp through the tensor memory accelerator, or four by hand.

Letters: N output columns (pairs of them behind a gate), K the reduction.
"""

from anabranch._backends.hopper.gluon import async_copy, copy, fence_async_shared, gl, jit, mbarrier, tma_load
from anabranch._backends.hopper.pipeline import advance, load_rows, locate, look_up, place, reach


@jit
def load_weight(
    w_desc, expert, n, k, N, bar, b_bufs, stage, K_MAJOR: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    """Starts loading a stage's tile: of a gate and its up-projection half each, if SPLIT."""
    if K_MAJOR and SPLIT:
        tma_load(w_desc, [expert, 0, n, k], bar, b_bufs.index(stage))
    elif K_MAJOR:
        tma_load(w_desc, [expert, n, k], bar, b_bufs.index(stage))
    else:
        for i in gl.static_range(PARTS):
            tma_load(w_desc, [expert, k, i * N + n], bar, b_bufs.index(stage * PARTS + i))


@jit
def producer(
    a_bufs, b_bufs, full, empty, x_desc, w_desc, tiles, size, N, K,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, K_MAJOR: gl.constexpr, PARTS: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STEADY: gl.constexpr,
):  # fmt: skip
    """Loads both operands' tiles through the tensor memory accelerator."""
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    SPLIT: gl.constexpr = GATED and not INTERLEAVED
    FIRST: gl.constexpr = BN if INTERLEAVED else WIDTH
    num_n = gl.cdiv(N, WIDTH)
    total = gl.load(tiles + 4 * size) * num_n
    stage = 0
    phase = 1
    step = gl.num_programs(0)
    expert, row, end, tile_n = locate(gl.program_id(0), total, num_n, tiles, size, GROUP_M)
    for tile in range(gl.program_id(0), total, step):
        found = look_up(tile + step, total, num_n, tiles, size)
        both = row + 64 < reach(row, end, STEADY)
        for k in range(0, K, BK):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            load_rows(x_desc, row, end, both, k, bar, a_bufs, stage, BN * BK * 2, BK)
            load_weight(w_desc, expert, tile_n * FIRST, k, N, bar, b_bufs, stage, K_MAJOR, PARTS, SPLIT)
            stage, phase = advance(stage, phase, STAGES)
        expert, row, end, tile_n = place(found, num_n, GROUP_M)


@jit
def slots_of(row_to_slot, row, end, num_slots, LAYOUT: gl.constexpr, LIVE: gl.constexpr):
    """The slots of 64 rows; slot 0 past the expert's end, where nothing is stored, and where there is none.

    If LIVE, -1 there.
    """
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    if LIVE:
        return gl.minimum(gl.load(row_to_slot + r, mask=r < end, other=-1), num_slots - 1)
    else:
        return inside(gl.load(row_to_slot + r, mask=r < end, other=0), num_slots)


@jit
def places(slots, stride_xm, TOP_K: gl.constexpr, LIVE: gl.constexpr):
    """Where in x the rows of slots begin; -1 of a row that is nobody's, if LIVE."""
    o_x = slots // TOP_K * stride_xm
    if LIVE:
        return gl.where(slots < 0, -1, o_x)
    else:
        return o_x


@jit
def gather_places(x, o_x, o_k, buffer, LIVE: gl.constexpr):
    """Starts copying the rows that :func:`places` gave; zeros where it gave -1."""
    if LIVE:
        gather_live(x, gl.maximum(o_x, 0), o_k, o_x >= 0, buffer)
    else:
        copy(buffer, x + sixteens(o_x, o_k))


@jit
def inside(slots, num_slots):
    """Slots that there are, whatever a layout made by hand holds."""
    return gl.minimum(gl.maximum(slots, 0), num_slots - 1)


@jit
def gather_live(x, o_x, o_k, live, buffer):
    """Starts copying rows that are somebody's, 16 bytes at a time; zeros for others."""
    copy(buffer, x + sixteens(o_x, o_k), mask=live[:, None])


@jit
def sixteens(o_x, o_k):
    """Offsets of rows and columns, eight columns after one another."""
    return gl.max_contiguous(gl.multiple_of(o_x[:, None] + o_k[None, :], [1, 8]), [1, 8])


@jit
def gathering_producer(
    a_bufs, b_bufs, full, empty, x, stride_xm, row_to_slot, w_desc, tiles, size, num_slots, N, K, TOP_K: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, K_MAJOR: gl.constexpr, PARTS: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STEADY: gl.constexpr,
    WARPS: gl.constexpr, LAG: gl.constexpr, LIVE: gl.constexpr,
):  # fmt: skip
    """Copies rows of x from token order, and loads the weight as the other producer does.

    Rows without a slot are some other token's, or zeros if LIVE. Offsets into x are int32, half the registers of
    pointers; K is a multiple of BK.
    """
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    SPLIT: gl.constexpr = GATED and not INTERLEAVED
    FIRST: gl.constexpr = BN if INTERLEAVED else WIDTH
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BK // 8), BK // 8], [WARPS, 1], [1, 0])
    num_n = gl.cdiv(N, WIDTH)
    total = gl.load(tiles + 4 * size) * num_n
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
    stage = 0
    phase = 1
    begun = 0
    step = gl.num_programs(0)
    first = gl.program_id(0)
    expert, row, end, tile_n = locate(first, total, num_n, tiles, size, GROUP_M)
    s0 = slots_of(row_to_slot, row, end, num_slots, LAYOUT, LIVE)
    s1 = slots_of(row_to_slot, row + 64, end, num_slots, LAYOUT, LIVE)
    found = look_up(first + step, total, num_n, tiles, size)
    for tile in range(first, total, step):
        this = expert
        n = tile_n * FIRST
        both = row + 64 < reach(row, end, STEADY)
        x0 = places(s0, stride_xm, TOP_K, LIVE)
        x1 = places(s1, stride_xm, TOP_K, LIVE)
        # The rows of the next tile, and where the one after it is: nothing here waits for memory.
        expert, row, end, tile_n = place(found, num_n, GROUP_M)
        s0 = slots_of(row_to_slot, row, end, num_slots, LAYOUT, LIVE)
        s1 = slots_of(row_to_slot, row + 64, end, num_slots, LAYOUT, LIVE)
        found = look_up(tile + 2 * step, total, num_n, tiles, size)
        for k in range(0, K, BK):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BN * BK * 2)
            load_weight(w_desc, this, n, k, N, bar, b_bufs, stage, K_MAJOR, PARTS, SPLIT)
            gather_places(x + k, x0, o_k, a_bufs.index(stage * 2), LIVE)
            if both:
                gather_places(x + k, x1, o_k, a_bufs.index(stage * 2 + 1), LIVE)
            if LAG == 0:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                async_copy.commit_group()
                async_copy.wait_group(LAG)
                fence_async_shared()
                before = stage - LAG
                before = before + (before < 0).to(gl.int32) * STAGES
                mbarrier.arrive(full.index(before), count=1, pred=begun >= LAG)
                begun += 1
            stage, phase = advance(stage, phase, STAGES)
    async_copy.wait_group(0)
    if LAG > 0:
        fence_async_shared()
        for i in gl.static_range(LAG):
            before = stage - LAG + i
            before = before + (before < 0).to(gl.int32) * STAGES
            mbarrier.arrive(full.index(before), count=1, pred=begun >= LAG - i)
