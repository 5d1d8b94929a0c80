"""Parts of a persistent, warp-specialised kernel: the ring of stages, tiles of rows, and storing an accumulator."""

from anabranch._backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from anabranch._backends.triton.schedule import tile_of_expert


@jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and its phase."""
    stage += 1
    wrap = (stage == STAGES).to(gl.int32)
    return stage - wrap * STAGES, phase ^ wrap


@jit
def look_up(tile, total, num_n, tiles, size):
    """What :func:`place` needs to know of a tile, zeros past the last one. Does not wait for memory."""
    inside = tile < total
    tile = gl.where(inside, tile, 0)
    m = tile // num_n
    expert = gl.load(tiles + m, mask=inside, other=0)
    row = gl.load(tiles + size + m, mask=inside, other=0)
    end = gl.load(tiles + 2 * size + m, mask=inside, other=0)
    first = gl.load(tiles + 3 * size + m, mask=inside, other=0)
    return tile, m, expert, row, end, first


@jit
def place(found, num_n, GROUP_M: gl.constexpr):
    """(expert, first row, the expert's end, column tile) of a tile that was looked up; waits until it is."""
    tile, m, expert, row, end, first = found
    row, n = tile_of_expert(tile, m, row, end, first, num_n, 128, GROUP_M)
    return expert, row, end, n


@jit
def locate(tile, total, num_n, tiles, size, GROUP_M: gl.constexpr):
    """:func:`place` at once."""
    return place(look_up(tile, total, num_n, tiles, size), num_n, GROUP_M)


@jit
def multiply(acc, add, a, b, empty, stage, STAGES: gl.constexpr):
    """Starts ``acc (+)= a @ b`` and hands the stage before this one back, whose product is over."""
    acc = warpgroup_mma(a, b, acc, use_acc=add, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    hand_back(empty, stage, add, STAGES)
    return acc


@jit
def hand_back(empty, stage, really, STAGES: gl.constexpr):
    """Frees the stage before this one for the producer."""
    before = stage - 1
    before = before + (before < 0).to(gl.int32) * STAGES
    mbarrier.arrive(empty.index(before), count=1, pred=really)


@jit
def columns(x, PARTS: gl.constexpr):
    """The tile in PARTS tiles side by side."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        return columns(left, PARTS // 2) + columns(right, PARTS // 2)


@jit
def put(x, buffers, first: gl.constexpr, slot, descriptor, at, NBUF: gl.constexpr):
    """Rounds a tile and stores it through the next of NBUF buffers, once the store before from there has read it."""
    store_wait(pendings=NBUF - 1)
    barrier()
    buffer = buffers.index(first + slot)
    buffer.reshape([x.shape[0], x.shape[1]]).store(x.to(buffers.dtype))
    fence_async_shared()
    barrier()
    tma_store(descriptor, at, buffer)
    slot += 1
    return slot - (slot == NBUF).to(gl.int32) * NBUF


@jit
def reach(row, end, STEADY: gl.constexpr):
    """Where the rows that a tile multiplies end: those of its expert, or STEADY, so many as in any other."""
    if STEADY:
        return row + 128
    else:
        return end


@jit
def load_ragged(descriptor, row, end, column, bar, buffer, pred=True):
    """Starts loading a tile that ends at an expert's last row, zeros from there."""
    tma_load(descriptor, [1 << 30, end, (1 << 30) - end + row, column], bar, buffer, pred=pred)


@jit
def load_rows(descriptor, row, end, both, k, bar, a_bufs, stage, other: gl.constexpr, BK: gl.constexpr):
    """Starts loading the first half of a tile's rows, or both halves, zeros from the expert's end on.

    ``other`` is what else arrives at the stage's barrier, in bytes.
    """
    mbarrier.expect(bar, other + 128 * BK * 2, pred=both)
    mbarrier.expect(bar, other + 64 * BK * 2, pred=both == 0)
    load_ragged(descriptor, row, end, k, bar, a_bufs.index(stage * 2))
    load_ragged(descriptor, row + 64, end, k, bar, a_bufs.index(stage * 2 + 1), pred=both)


@jit
def tile_buffers(
    dtype: gl.constexpr, LAYOUT: gl.constexpr, GATHERED: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """So many tiles of an operand, which copies fill if GATHERED, or :func:`load_ragged`."""
    if GATHERED:
        return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], LAYOUT)
    else:
        return gl.allocate_shared_memory(dtype, [COUNT, 1, 1, ROWS, COLUMNS], LAYOUT)


@jit
def ring(STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Barriers of the stages: full ones, empty ones."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PRODUCERS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return full, empty
