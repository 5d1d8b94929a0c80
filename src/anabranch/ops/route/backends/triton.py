"""Routing in Triton: a stable sort by counting, whose order no race and no atomic decides.

Few slots are sorted in one launch, each by counting those before it. Many go in blocks: one launch counts
the ids of every block, another places every slot after those of lower experts, of earlier blocks and of
its own block. Where the counts are many, a launch between the two adds them up once for all blocks.
Nothing depends on the size of E but the number of steps of a loop.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.combine import power_of_2
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch, launch, recorder
from anabranch.ops.route.call import Fields, RouteCall

FEW_SLOTS = 8192
"""Up to here the slots are compared with each other: work grows by the square, but is one launch."""
FEW_COUNTS = 65536
"""Up to here every block adds up the counts of all blocks, which costs less than a launch."""
BLOCK = 512
"""Slots of a block."""
SCAN = 1024
"""Blocks that one step of the scan adds up."""


def supports(call: RouteCall) -> str | None:
    """Everything but so many slots that the number of one past the last block is no int32."""
    most = 2**31 - 2048
    return f"it numbers at most {most} rows" if call.indices.numel() > most else None


@triton.jit
def _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k):
    """int32 ids of slots; what is no expert, or past the last slot, has num_experts."""
    token = (o // top_k).to(tl.int64)
    choice = (o % top_k).to(tl.int64)
    e = tl.load(ids + token * stride_t + choice * stride_k, mask=o < num_slots, other=-1)
    # In the ids' own type: an int64 may be an expert only after it lost its upper half.
    return tl.where((e >= 0) & (e < num_experts), e, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "top_k", "num_experts", "stride_t", "stride_k"])
def _compare_kernel(
    ids, counts, offsets, row_to_slot, slot_to_row, num_slots, top_k, num_experts, stride_t, stride_k,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A slot's row is the number of slots of lower experts, or of the same one and before it."""
    start = tl.program_id(0) * BLOCK
    o = start + tl.arange(0, BLOCK)
    if start < num_slots:
        e = _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k)
        key = e * num_slots + o
        before = tl.zeros([BLOCK, CHUNK], tl.int32)
        live = tl.zeros([CHUNK], tl.int32)
        for j in range(0, num_slots, CHUNK):
            o_j = j + tl.arange(0, CHUNK)
            e_j = _load_ids(ids, o_j, num_slots, top_k, num_experts, stride_t, stride_k)
            before += ((e_j * num_slots + o_j)[None, :] < key[:, None]).to(tl.int32)
            live += (e_j < num_experts).to(tl.int32)
        row = tl.sum(before, 1)
        kept = e < num_experts
        tl.store(slot_to_row + o, tl.where(kept, row, -1), mask=o < num_slots)
        tl.store(row_to_slot + row, o, mask=kept)
        tl.store(row_to_slot + o, o * 0 - 1, mask=(o >= tl.sum(live)) & (o < num_slots))
    if start <= num_experts:
        # Two sums at once: half as wide, for as many registers.
        below = tl.zeros([BLOCK, CHUNK // 2], tl.int32)
        equal = tl.zeros([BLOCK, CHUNK // 2], tl.int32)
        for j in range(0, num_slots, CHUNK // 2):
            o_j = j + tl.arange(0, CHUNK // 2)
            e_j = _load_ids(ids, o_j, num_slots, top_k, num_experts, stride_t, stride_k)
            below += (e_j[None, :] < o[:, None]).to(tl.int32)
            equal += (e_j[None, :] == o[:, None]).to(tl.int32)
        tl.store(offsets + o, tl.sum(below, 1), mask=o <= num_experts)
        tl.store(counts + o, tl.sum(equal, 1), mask=o < num_experts)


@triton.jit(do_not_specialize=["num_slots", "top_k", "num_experts", "stride_t", "stride_k", "num_blocks"])
def _count_kernel(
    ids, block_counts, num_slots, top_k, num_experts, stride_t, stride_k, num_blocks,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """block_counts[e, b] = slots of block b with expert e."""
    b = tl.program_id(0)
    e = _load_ids(ids, b * BLOCK + tl.arange(0, BLOCK), num_slots, top_k, num_experts, stride_t, stride_k)
    for i in range(0, num_experts, EXPERTS):
        expert = i + tl.arange(0, EXPERTS)
        found = tl.sum((e[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(block_counts + expert.to(tl.int64) * num_blocks + b, found, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(block_counts, before, counts, num_blocks, BLOCKS: tl.constexpr):
    """Of one expert: before[e, b] = its slots in blocks before b, counts[e] = all of them."""
    expert = tl.program_id(0)
    row = expert.to(tl.int64) * num_blocks
    total = 0
    for i in range(0, num_blocks, BLOCKS):
        o = i + tl.arange(0, BLOCKS)
        found = tl.load(block_counts + row + o, mask=o < num_blocks, other=0)
        tl.store(before + row + o, total + tl.cumsum(found, 0) - found, mask=o < num_blocks)
        total += tl.sum(found, 0)
    tl.store(counts + expert, total)


@triton.jit(do_not_specialize=["num_slots", "top_k", "num_experts", "stride_t", "stride_k", "num_blocks"])
def _place_kernel(
    ids, table, counts, offsets, row_to_slot, slot_to_row, num_slots, top_k, num_experts, stride_t, stride_k,
    num_blocks, SCANNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Places the slots of block b. ``table`` is block_counts, or with SCANNED its sums over earlier blocks."""
    b = tl.program_id(0)
    o = b * BLOCK + tl.arange(0, BLOCK)
    e = _load_ids(ids, o, num_slots, top_k, num_experts, stride_t, stride_k)

    # Of the own block: equal ids in front. Later chunks have none.
    ahead = tl.zeros([BLOCK, CHUNK], tl.int32)
    for j in range(0, BLOCK, CHUNK):
        o_j = b * BLOCK + j + tl.arange(0, CHUNK)
        e_j = _load_ids(ids, o_j, num_slots, top_k, num_experts, stride_t, stride_k)
        ahead += ((e_j[None, :] == e[:, None]) & (o_j[None, :] < o[:, None])).to(tl.int32)
    row = tl.sum(ahead, 1)

    # Of lower experts, and of the own one in earlier blocks. The sums stay in registers: a sum stored here
    # and read back by another warp would be a race.
    total = 0
    for i in range(0, num_experts, EXPERTS):
        expert = i + tl.arange(0, EXPERTS)
        m_e = expert < num_experts
        p_e = table + expert.to(tl.int64) * num_blocks
        if SCANNED:
            found = tl.load(counts + expert, mask=m_e, other=0)
            earlier = tl.load(p_e + b, mask=m_e, other=0)
        else:
            found = tl.zeros([EXPERTS], tl.int32)
            earlier = tl.zeros([EXPERTS], tl.int32)
            for k in range(0, num_blocks, BLOCKS):
                o_b = k + tl.arange(0, BLOCKS)
                m_b = m_e[:, None] & (o_b < num_blocks)[None, :]
                part = tl.load(p_e[:, None] + o_b[None, :], mask=m_b, other=0)
                found += tl.sum(part, 1)
                earlier += tl.sum(tl.where((o_b < b)[None, :], part, 0), 1)
        start = total + tl.cumsum(found, 0) - found
        row += tl.sum(tl.where(e[:, None] == expert[None, :], (start + earlier)[None, :], 0), 1)
        if b == 0:
            tl.store(offsets + expert, start, mask=m_e)
            if not SCANNED:
                tl.store(counts + expert, found, mask=m_e)
        total += tl.sum(found, 0)
    if b == 0:
        tl.store(offsets + num_experts, total)
    kept = e < num_experts
    tl.store(slot_to_row + o, tl.where(kept, row, -1), mask=o < num_slots)
    tl.store(row_to_slot + row, o, mask=kept)
    tl.store(row_to_slot + o, o * 0 - 1, mask=(o >= total) & (o < num_slots))


@triton.jit(do_not_specialize=["num_experts", "stride_e", "num_rows"])
def _bounds_kernel(
    claimed, counts, offsets, row_to_slot, slot_to_row, num_experts, stride_e, num_rows,
    IDENTITY: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts and offsets within num_rows, whatever is claimed; slot_to_row is -1, or with IDENTITY both maps are
    the row itself up to the last offset."""
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
    inside = (o >= 0) & (o < num_rows)
    if IDENTITY:
        value = tl.where(o < total, o, -1)
        tl.store(row_to_slot + o, value, mask=inside)
        tl.store(slot_to_row + o, value, mask=inside)
    else:
        tl.store(slot_to_row + o, o * 0 - 1, mask=inside)


@triton.jit
def _load_index(index, o, length, width, stride_0, stride_1, limit, size, LIMITED: tl.constexpr):
    """int32 places of a (length / width, width) index in [0, size); -1 where there is none."""
    row = (o // width).to(tl.int64)
    column = (o % width).to(tl.int64)
    value = tl.load(index + row * stride_0 + column * stride_1, mask=o < length, other=-1)
    inside = (value >= 0) & (value < size)
    if LIMITED:
        inside = inside & (o < tl.load(limit))
    return tl.where(inside, value, -1).to(tl.int32)


@triton.jit(do_not_specialize=["length", "width", "stride_0", "stride_1", "size"])
def _claim_kernel(
    index, inverse, limit, length, width, stride_0, stride_1, size, LIMITED: tl.constexpr, BLOCK: tl.constexpr
):
    """inverse[index[i]] = i; of several the largest, in whatever order they come."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = _load_index(index, o, length, width, stride_0, stride_1, limit, size, LIMITED)
    tl.atomic_max(inverse + tl.maximum(place, 0), o, mask=place >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["length", "width", "stride_0", "stride_1", "size"])
def _keep_kernel(
    index, inverse, limit, kept, length, width, stride_0, stride_1, size,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """kept[i] = index[i] where inverse says i, else -1: only one may keep a place."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = _load_index(index, o, length, width, stride_0, stride_1, limit, size, LIMITED)
    owner = tl.load(inverse + tl.maximum(place, 0), mask=place >= 0, other=-1)
    tl.store(kept + o, tl.where(owner == o, place, -1), mask=o < length)


def _fields(like: Tensor, experts: int, rows: int, *slots: int) -> Fields:
    """Memory for counts, offsets, row_to_slot and slot_to_row."""
    counts = like.new_empty(experts, dtype=torch.int32)
    return counts, counts.new_empty(experts + 1), counts.new_empty(rows), counts.new_empty(*slots)


def topk(expert_ids: Tensor, num_experts: int) -> Fields:
    """(counts, offsets, row_to_slot, slot_to_row) of a stable sort by expert, then slot."""
    fields = _fields(expert_ids, num_experts, expert_ids.numel(), *expert_ids.shape)
    slots = expert_ids.numel()
    # Keys of the comparison are int32.
    if slots <= FEW_SLOTS and (num_experts + 1) * slots < 2**31:
        _prepare_compare(expert_ids.device, operand.of(expert_ids), num_experts)(expert_ids, *fields)
    else:
        _sort_blocks(expert_ids, *fields)
    return fields


@lru_cache(REMEMBERED)
def _prepare_compare(device: torch.device, ids: Operand, num_experts: int) -> Launch:
    slots, top_k = math.prod(ids.shape), max(ids.shape[1], 1)
    return Launch(
        device, _compare_kernel, (-(-max(slots, num_experts + 1) // 32),), slots, top_k, num_experts, *ids.stride,
        BLOCK=32, CHUNK=min(256, max(32, power_of_2(slots))), num_warps=8,
    )  # fmt: skip


def _sort_blocks(expert_ids: Tensor, counts: Tensor, offsets: Tensor, rows: Tensor, places: Tensor) -> None:
    slots, num_experts = rows.shape[0], counts.shape[0]
    sizes = (slots, max(expert_ids.shape[1], 1), num_experts, *expert_ids.stride())
    device, blocks = expert_ids.device, -(-slots // BLOCK)
    table = recorder.temporary(counts.new_empty(num_experts, blocks))
    launch(
        device, _count_kernel, (blocks,), (expert_ids, table), *sizes, blocks,
        BLOCK=BLOCK, EXPERTS=32, num_warps=8,
    )  # fmt: skip
    scanned = table.numel() > FEW_COUNTS
    if scanned:
        found, table = table, recorder.temporary(torch.empty_like(table))
        launch(device, _scan_kernel, (num_experts,), (found, table, counts), blocks, BLOCKS=SCAN, num_warps=4)
    launch(
        device, _place_kernel, (blocks,), (expert_ids, table, counts, offsets, rows, places), *sizes, blocks,
        SCANNED=scanned, BLOCK=BLOCK, CHUNK=16, EXPERTS=16, BLOCKS=256, num_warps=8,
    )  # fmt: skip


def _bounds(claimed: Tensor, num_rows: int, *, identity: bool) -> Fields:
    experts = claimed.shape[0]
    counts, offsets, rows, places = _fields(claimed, experts, num_rows, num_rows)
    launch(
        claimed.device, _bounds_kernel, (max(1, -(-num_rows // 1024)),), (claimed, counts, offsets, rows, places),
        experts, claimed.stride(0), num_rows, IDENTITY=identity, BLOCK=1024, EXPERTS=256, num_warps=4,
    )  # fmt: skip
    return counts, offsets, rows, places


def _invert(index: Tensor, kept: Tensor, inverse: Tensor, limit: Tensor | None) -> None:
    """Fills ``inverse``, which is all -1, and ``kept`` so that each undoes the other."""
    length, size = kept.numel(), inverse.numel()
    width = index.shape[1] if index.dim() == 2 else 1
    strides = index.stride() if index.dim() == 2 else (index.stride(0), 0)
    if length == 0:
        return
    grid, numbers = (-(-length // 1024),), (length, width, *strides, size)
    constants = dict(LIMITED=limit is not None, BLOCK=1024, num_warps=4)
    if size:
        launch(index.device, _claim_kernel, grid, (index, inverse, limit), *numbers, **constants)
    launch(index.device, _keep_kernel, grid, (index, inverse, limit, kept), *numbers, **constants)


def counts(counts: Tensor, num_rows: int) -> Fields:
    """The fields for rows in expert order already, with slot = row."""
    sizes, offsets, rows, places = _bounds(counts, num_rows, identity=True)
    return sizes, offsets, rows, places.view(num_rows, 1)


def sorted_rows(counts: Tensor, row_to_slot: Tensor, top_k: int) -> Fields:
    """The fields for a sort made elsewhere; slots out of range, or taken, are dropped."""
    sizes, offsets, rows, places = _bounds(counts, row_to_slot.shape[0], identity=False)
    _invert(row_to_slot, rows, places, offsets[-1:])
    return sizes, offsets, rows, places.view(-1, top_k)


def maps(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_to_slot, slot_to_row): both directions from one; rows out of range, or taken, are dropped."""
    rows = torch.full((num_rows,), -1, dtype=torch.int32, device=slot_to_row.device)
    places = rows.new_empty(*slot_to_row.shape)
    _invert(slot_to_row, places, rows, None)
    return rows, places
