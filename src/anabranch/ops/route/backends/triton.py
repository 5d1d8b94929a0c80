"""Routing in Triton: a stable sort by counting, whose order no race and no atomic decides.

Few slots are sorted in one launch, each by counting those before it. Many go in blocks: one launch counts
the ids of every block, another places every slot after those of lower experts, of earlier blocks and of
its own block. Where the counts are many, a launch between the two adds them up once for all blocks.
Nothing depends on the size of E but the number of steps of a loop, and how large a block is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch, launch
from anabranch.ops.route.call import Fields, RouteCall

FEW_SLOTS = 4096
"""Up to here the slots are compared with each other: work grows by the square, but is one launch."""
FEW_STEPS = 4
"""Up to here every block adds up the counts of all blocks, in so many steps, which costs less than a launch."""
STEP = (128, 32)
"""Blocks and experts of one such step."""
BLOCK = 128
"""Slots of a block, 32 for each warp."""
MANY_EXPERTS = 1024
"""Of more than these, blocks are four times as large: slower, but their counts take less memory."""
SCAN = 1024
"""Blocks that one step of the scan adds up."""
ONE_PROGRAM = 1024
"""Rows that one program alone inverts."""


def supports(call: RouteCall) -> str | None:
    """Everything but so many slots that the number of one past the last block is no int32."""
    most = 2**31 - 2048
    return f"it numbers at most {most} rows" if call.indices.numel() > most else None


@triton.jit
def _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k, CONTIGUOUS: tl.constexpr):
    """int32 ids of slots; what is no expert, or past the last slot, has num_experts."""
    if CONTIGUOUS:
        e = tl.load(ids + o, mask=o < num_slots, other=-1)
    else:
        p = ids + (o // top_k).to(tl.int64) * stride_t + (o % top_k).to(tl.int64) * stride_k
        e = tl.load(p, mask=o < num_slots, other=-1)
    # In the ids' own type: an int64 may be an expert only after it lost its upper half.
    return tl.where((e >= 0) & (e < num_experts), e, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "top_k", "num_experts", "stride_t", "stride_k"])
def _compare_kernel(
    ids, counts, offsets, row_to_slot, slot_to_row, num_slots, top_k, num_experts, stride_t, stride_k,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A slot's row, or an expert's first, is the number of slots with smaller keys: of expert, then slot."""
    slots = tl.cdiv(num_slots, BLOCK)
    here = tl.program_id(0)
    o = here * BLOCK + tl.arange(0, BLOCK)
    e = _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k, CONTIGUOUS)
    # After the programs of slots those of experts, and of one past the last. Two neighbours have one in common.
    expert = (here - slots) * (BLOCK - 1) + tl.arange(0, BLOCK)
    key = tl.where(here < slots, e * num_slots + o, tl.minimum(expert, num_experts) * num_slots)
    before = tl.zeros([BLOCK], tl.int32)
    for j in range(0, num_slots, CHUNK):
        o_j = j + tl.arange(0, CHUNK)
        e_j = _load_ids(ids, o_j, num_slots, top_k, num_experts, stride_t, stride_k, CONTIGUOUS)
        before += tl.sum(((e_j * num_slots + o_j)[:, None] < key[None, :]).to(tl.int32), 0)
    if here < slots:
        kept = e < num_experts
        tl.store(slot_to_row + o, tl.where(kept, before, -1), mask=o < num_slots)
        tl.store(row_to_slot + before, o, mask=kept)
    else:
        after = tl.gather(before, tl.minimum(tl.arange(0, BLOCK) + 1, BLOCK - 1), 0)
        mine = tl.arange(0, BLOCK) < BLOCK - 1
        tl.store(offsets + expert, before, mask=mine & (expert <= num_experts))
        tl.store(counts + expert, after - before, mask=mine & (expert < num_experts))
        if here == tl.num_programs(0) - 1:
            total = tl.max(before, 0)
            for j in range(0, num_slots, CHUNK):
                row = j + tl.arange(0, CHUNK)
                tl.store(row_to_slot + row, row * 0 - 1, mask=(row >= total) & (row < num_slots))


@triton.jit(do_not_specialize=["num_slots", "top_k", "num_experts", "stride_t", "stride_k"])
def _count_kernel(
    ids, block_counts, num_slots, top_k, num_experts, stride_t, stride_k,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """block_counts[b, e] = slots of block b with expert e."""
    b = tl.program_id(0)
    o = b * BLOCK + tl.arange(0, BLOCK)
    e = _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k, CONTIGUOUS)
    p = block_counts + b.to(tl.int64) * num_experts
    for i in range(0, num_experts, EXPERTS):
        expert = i + tl.arange(0, EXPERTS)
        inside = (e >= i) & (e < i + EXPERTS) & (e < num_experts)
        tl.store(p + expert, tl.histogram(e - i, EXPERTS, inside), mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_experts", "num_blocks"])
def _scan_kernel(
    block_counts, before, counts, num_experts, num_blocks, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Of some experts: before[b, e] = slots in blocks before b, counts[e] = all of them."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    m_e = expert < num_experts
    total = tl.zeros([EXPERTS], tl.int32)
    for i in range(0, num_blocks, BLOCKS):
        o = i + tl.arange(0, BLOCKS)
        p = o.to(tl.int64)[:, None] * num_experts + expert[None, :]
        inside = m_e[None, :] & (o < num_blocks)[:, None]
        found = tl.load(block_counts + p, mask=inside, other=0)
        tl.store(before + p, total[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        total += tl.sum(found, 0)
    tl.store(counts + expert, total, mask=m_e)


@triton.jit
def _population(x):
    """How many bits of an int32 are set. The compiler knows the pattern."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit(do_not_specialize=["num_slots", "top_k", "num_experts", "stride_t", "stride_k", "num_blocks"])
def _place_kernel(
    ids, table, counts, offsets, row_to_slot, slot_to_row, num_slots, top_k, num_experts, stride_t, stride_k,
    num_blocks, SCANNED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Places the slots of block b. ``table`` is block_counts, or with SCANNED its sums over earlier blocks."""
    b = tl.program_id(0)
    o = b * BLOCK + tl.arange(0, BLOCK)
    e = _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k, CONTIGUOUS)
    kept = e < num_experts
    p = table + b.to(tl.int64) * num_experts
    row = tl.zeros([BLOCK], tl.int32)
    if SCANNED:
        row = tl.load(p + e, mask=kept, other=0)

    # Of lower experts, and of the own one in earlier blocks. The sums stay in registers: a sum stored here
    # and read back by another warp would be a race.
    total = 0
    for i in range(0, num_experts, EXPERTS):
        expert = i + tl.arange(0, EXPERTS)
        m_e = expert < num_experts
        if SCANNED:
            found = tl.load(counts + expert, mask=m_e, other=0)
            first = total + tl.cumsum(found, 0) - found
            start = first
        else:
            found = tl.zeros([EXPERTS], tl.int32)
            earlier = tl.zeros([EXPERTS], tl.int32)
            for k in range(0, num_blocks, BLOCKS):
                o_b = k + tl.arange(0, BLOCKS)
                m_b = (o_b < num_blocks)[:, None] & m_e[None, :]
                part = tl.load(table + o_b[:, None] * num_experts + expert[None, :], mask=m_b, other=0)
                found += tl.sum(part, 0)
                earlier += tl.sum(tl.where((o_b < b)[:, None], part, 0), 0)
            first = total + tl.cumsum(found, 0) - found
            start = first + earlier
        here = kept & (e >= i) & (e < i + EXPERTS)
        row += tl.where(here, tl.gather(start, tl.where(here, e - i, 0), 0), 0)
        if b == 0:
            tl.store(offsets + expert, first, mask=m_e)
            if not SCANNED:
                tl.store(counts + expert, found, mask=m_e)
        total += tl.sum(found, 0)
    if b == 0:
        tl.store(offsets + num_experts, total)

    # Of the own block: equal ids in front. A bit for each slot, 32 to a word, is left where all bits of its id agree.
    word = tl.arange(0, BLOCK // 32)[:, None]
    own = tl.arange(0, BLOCK)[None, :]
    ahead = tl.where(word < own // 32, -1, tl.where(word == own // 32, (1 << (own % 32)) - 1, 0))
    by_word = tl.reshape(e, [BLOCK // 32, 32])
    # As wide as the words before its bits are taken: one exchange between threads instead of one for each bit.
    own_e = e[None, :] + word * 0
    for bit in tl.static_range(BITS):
        ones = tl.sum(((by_word >> bit) & 1) << tl.arange(0, 32)[None, :], 1, keep_dims=True)
        ahead &= ~(ones ^ ((own_e << (31 - bit)) >> 31))
    row += tl.sum(_population(ahead), 0)
    tl.store(slot_to_row + o, tl.where(kept, row, -1), mask=o < num_slots)
    tl.store(row_to_slot + row, o, mask=kept)
    tl.store(row_to_slot + o, o * 0 - 1, mask=(o >= total) & (o < num_slots))


@triton.jit
def _open(index, kept, inverse, o, limit, length, width, stride_0, stride_1, size):
    """kept[o] = index[o], of a (length / width, width) index, where o < limit and it is in [0, size), else -1.

    inverse[o] = -1.
    """
    row = (o // width).to(tl.int64)
    column = (o % width).to(tl.int64)
    inside = (o >= 0) & (o < tl.minimum(limit, length))
    value = tl.load(index + row * stride_0 + column * stride_1, mask=inside, other=-1)
    value = tl.where((value >= 0) & (value < size), value, -1).to(tl.int32)
    tl.store(inverse + o, o * 0 - 1, mask=(o >= 0) & (o < size))
    tl.store(kept + o, value, mask=(o >= 0) & (o < length))
    return value


@triton.jit
def _claim(kept, inverse, o, place):
    """inverse[place] = o, of several the largest; kept[o] = -1 of the others, in whatever order they come.

    All but the largest are told once: by who was there, or by who came.
    """
    taken = place >= 0
    other = tl.atomic_max(inverse + tl.maximum(place, 0), o, mask=taken, sem="relaxed")
    tl.store(kept + tl.minimum(other, o), o * 0 - 1, mask=taken & (other >= 0))


@triton.jit(do_not_specialize=["num_experts", "stride_e", "num_rows", "stride_0"])
def _bounds_kernel(
    claimed, index, counts, offsets, row_to_slot, slot_to_row, num_experts, stride_e, num_rows, stride_0,
    IDENTITY: tl.constexpr, ALONE: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts and offsets within num_rows, whatever is claimed.

    With IDENTITY both maps are the row itself up to the last offset. Else they are opened, and claimed if one
    program is ALONE.
    """
    total = tl.program_id(0).to(tl.int64) * 0
    for i in range(0, num_experts, EXPERTS):
        expert = i + tl.arange(0, EXPERTS)
        m_e = expert < num_experts
        found = tl.load(claimed + expert.to(tl.int64) * stride_e, mask=m_e, other=0).to(tl.int64)
        found = tl.minimum(tl.maximum(found, 0), num_rows)
        stop = total + tl.cumsum(found, 0)
        start = tl.minimum(stop - found, num_rows).to(tl.int32)
        if tl.program_id(0) == 0:
            tl.store(offsets + expert, start, mask=m_e)
            tl.store(counts + expert, tl.minimum(stop, num_rows).to(tl.int32) - start, mask=m_e)
        total += tl.sum(found, 0)
    total = tl.minimum(total, num_rows).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(offsets + num_experts, total)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if IDENTITY:
        inside = (o >= 0) & (o < num_rows)
        value = tl.where(o < total, o, -1)
        tl.store(row_to_slot + o, value, mask=inside)
        tl.store(slot_to_row + o, value, mask=inside)
    else:
        place = _open(index, row_to_slot, slot_to_row, o, total, num_rows, 1, stride_0, 0, num_rows)
        if ALONE:
            tl.debug_barrier()
            _claim(row_to_slot, slot_to_row, o, place)


@triton.jit(do_not_specialize=["length", "width", "stride_0", "stride_1", "size"])
def _open_kernel(index, kept, inverse, length, width, stride_0, stride_1, size, BLOCK: tl.constexpr):
    """Maps of which none is claimed yet."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _open(index, kept, inverse, o, length, length, width, stride_0, stride_1, size)


@triton.jit(do_not_specialize=["length"])
def _claim_kernel(kept, inverse, length, BLOCK: tl.constexpr):
    """Claims what kept says: who lost a place before it is read here has claimed it before."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _claim(kept, inverse, o, tl.load(kept + o, mask=(o >= 0) & (o < length), other=-1))


def _fields(like: Tensor, experts: int, rows: int, *slots: int) -> Fields:
    """Memory for counts, offsets, row_to_slot and slot_to_row."""
    counts = like.new_empty(experts, dtype=torch.int32)
    return counts, counts.new_empty(experts + 1), counts.new_empty(rows), counts.new_empty(*slots)


def topk(expert_ids: Tensor, num_experts: int) -> Fields:
    """(counts, offsets, row_to_slot, slot_to_row) of a stable sort by expert, then slot."""
    fields = _fields(expert_ids, num_experts, expert_ids.numel(), *expert_ids.shape)
    slots = expert_ids.numel()
    # Keys of the comparison are int32, those of slots past the last too.
    if slots <= FEW_SLOTS and (num_experts + 1) * slots + 1024 < 2**31:
        _prepare_compare(expert_ids.device, operand.of(expert_ids), num_experts)(expert_ids, *fields)
    else:
        _sort_blocks(expert_ids, *fields)
    return fields


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether slots lie side by side: then no program divides by K."""
    return (shape[1] <= 1 or stride[1] == 1) and (shape[0] <= 1 or stride[0] == shape[1])


@lru_cache(REMEMBERED)
def _prepare_compare(device: torch.device, ids: Operand, num_experts: int) -> Launch:
    slots, top_k = math.prod(ids.shape), max(ids.shape[1], 1)
    chunk = next(chunk for chunk in (64, 256, 1024) if chunk >= min(slots, 1024))
    return Launch(
        device, _compare_kernel, (-(-slots // 32) + -(-(num_experts + 1) // 31),), slots, top_k, num_experts,
        *ids.stride, CONTIGUOUS=_contiguous(ids.shape, ids.stride), BLOCK=32, CHUNK=chunk, num_warps=8,
    )  # fmt: skip


def _sort_blocks(expert_ids: Tensor, counts: Tensor, offsets: Tensor, rows: Tensor, places: Tensor) -> None:
    slots, num_experts = rows.shape[0], counts.shape[0]
    sizes = (slots, max(expert_ids.shape[1], 1), num_experts, *expert_ids.stride())
    contiguous = _contiguous(expert_ids.shape, expert_ids.stride())
    block = BLOCK if num_experts <= MANY_EXPERTS else 4 * BLOCK
    device, blocks = expert_ids.device, -(-slots // block)
    table = counts.new_empty(blocks, num_experts)
    launch(
        device, _count_kernel, (blocks,), (expert_ids, table), *sizes,
        CONTIGUOUS=contiguous, BLOCK=block, EXPERTS=256, num_warps=max(block // 128, 1),
    )  # fmt: skip
    scanned = -(-blocks // STEP[0]) * -(-num_experts // STEP[1]) > FEW_STEPS
    if scanned:
        found, table = table, torch.empty_like(table)
        launch(
            device, _scan_kernel, (-(-num_experts // 2),), (found, table, counts), num_experts, blocks,
            BLOCKS=SCAN, EXPERTS=2, num_warps=4,
        )  # fmt: skip
    launch(
        device, _place_kernel, (blocks,), (expert_ids, table, counts, offsets, rows, places), *sizes, blocks,
        SCANNED=scanned, CONTIGUOUS=contiguous, BLOCK=block,
        BITS=next(bits for bits in (8, 16, 31) if num_experts < 2**bits),
        BLOCKS=STEP[0], EXPERTS=256 if scanned else STEP[1], num_warps=block // 32,
    )  # fmt: skip


def _bounds(
    claimed: Tensor, index: Tensor | None, num_rows: int, top_k: int, fields: Fields | None
) -> Fields:
    experts, identity, alone = claimed.shape[0], index is None, num_rows <= ONE_PROGRAM
    if fields is None:
        fields = _fields(claimed, experts, num_rows, num_rows // top_k, top_k)
    counts, offsets, rows, places = fields
    launch(
        claimed.device, _bounds_kernel, (max(1, -(-num_rows // 1024)),),
        (claimed, index, counts, offsets, rows, places),
        experts, claimed.stride(0), num_rows, 0 if index is None else index.stride(0),
        IDENTITY=identity, ALONE=alone and not identity, BLOCK=1024, EXPERTS=256, num_warps=4,
    )  # fmt: skip
    if not identity and not alone:
        _claim_all(rows, places)
    return fields


def _claim_all(kept: Tensor, inverse: Tensor) -> None:
    grid = (-(-kept.numel() // 1024),)
    launch(kept.device, _claim_kernel, grid, (kept, inverse), kept.numel(), BLOCK=1024, num_warps=4)


def counts(counts: Tensor, num_rows: int, fields: Fields | None = None) -> Fields:
    """The fields for rows in expert order already, with slot = row."""
    return _bounds(counts, None, num_rows, 1, fields)


def sorted_rows(counts: Tensor, row_to_slot: Tensor, top_k: int, fields: Fields | None = None) -> Fields:
    """The fields for a sort made elsewhere; slots out of range, or taken, are dropped."""
    return _bounds(counts, row_to_slot, row_to_slot.shape[0], top_k, fields)


def maps(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_to_slot, slot_to_row): both directions from one; rows out of range, or taken, are dropped."""
    length, device = slot_to_row.numel(), slot_to_row.device
    rows = torch.empty(num_rows, dtype=torch.int32, device=device)
    places = rows.new_empty(*slot_to_row.shape)
    if length or num_rows:
        sizes = (length, max(slot_to_row.shape[1], 1), *slot_to_row.stride(), num_rows)
        grid = (-(-max(length, num_rows) // 1024),)
        launch(device, _open_kernel, grid, (slot_to_row, places, rows), *sizes, BLOCK=1024, num_warps=4)
    if length and num_rows:
        _claim_all(places, rows)
    return rows, places
