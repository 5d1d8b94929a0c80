"""Routing in plain PyTorch: by stable sorts or, on a CPU where it is faster, by counting."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.route.call import RouteCall

Fields = tuple[Tensor, Tensor, Tensor, Tensor]

COUNTED_EXPERTS, COUNTED_SLOTS, MARKS = 64, 2**9, 2**18
"""On a CPU counting is faster than sorting for so many experts at most, so many slots at least, and at most so
many of one times the other."""


def supports(call: RouteCall) -> str | None:
    """Everything."""
    return None


def _bounds(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """counts and offsets that stay within num_rows, whatever counts claim."""
    ends = counts.clamp(min=0, max=num_rows).cumsum(0, dtype=torch.int64).clamp(max=num_rows)
    offsets = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return offsets.diff(), offsets


def _pair(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The index as int32 and its inverse, ``inverse[index[i]] = i``; -1 where there is no partner.

    Indices outside ``[0, size)`` have none, and of equal ones only the last has one, so the maps are inverse.
    """
    inside = (index >= 0) & (index < size)
    place = torch.where(inside, index, size).to(torch.int64)
    here = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    # The largest wins, whatever the order of writing: plain index assignment leaves open which one does.
    inverse = here.new_full((size + 1,), -1).scatter_reduce(0, place, here, "amax")
    paired = inside & (inverse[place] == here)
    return torch.where(paired, index, -1).to(torch.int32), inverse[:size].clone()


def topk(expert_ids: Tensor, num_experts: int) -> Fields:
    """(counts, offsets, row_to_slot, slot_to_row) of a stable sort by expert, then slot."""
    ids = expert_ids.reshape(-1)
    whole = _none_is_dropped(ids, num_experts)
    keys = ids if whole else torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = _count if _counts_faster(ids, num_experts) else _sort
    offsets, row_to_slot, slot_to_row = order(keys, num_experts)
    if not whole:
        rows = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
        row_to_slot = torch.where(rows < offsets[-1], row_to_slot, -1)
        slot_to_row = torch.where(slot_to_row < offsets[-1], slot_to_row, -1)
    return offsets.diff(), offsets, row_to_slot, slot_to_row.view(expert_ids.shape)


def _counts_faster(ids: Tensor, num_experts: int) -> bool:
    slots = ids.numel()
    enough = slots >= COUNTED_SLOTS and num_experts <= COUNTED_EXPERTS
    return ids.device.type == "cpu" and enough and num_experts * slots <= MARKS


def _sort(keys: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, row_to_slot, slot_to_row); those of key num_experts come last."""
    ordered, slots = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    rows = torch.arange(keys.numel(), dtype=torch.int32, device=keys.device)
    return offsets, slots.to(torch.int32), torch.empty_like(rows).index_copy_(0, slots, rows)


def _count(keys: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_sort` does, in a time that grows with experts times slots, but without a branch on what is there.

    Expert after expert, each slot is marked where its own expert is: so many marks as are before it is its row.
    """
    count = keys.numel()
    slots = torch.arange(count)
    mark = torch.add(slots, keys, alpha=count)
    narrow = torch.int16 if count < 2**15 else torch.int32
    before = torch.zeros((num_experts + 1) * count + 1, dtype=narrow)
    before[1:].index_fill_(0, mark, 1)
    before.cumsum_(0)
    rows = before.index_select(0, mark)
    row_to_slot = torch.empty(count, dtype=torch.int32).scatter_(0, rows.long(), slots.int())
    return before[: num_experts * count + 1 : count].int(), row_to_slot, rows.int()


def _none_is_dropped(ids: Tensor, num_experts: int) -> bool:
    """Whether that is known, as it is for the asking on the CPU."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return False
    lowest, highest = torch.aminmax(ids)
    return int(lowest) >= 0 and int(highest) < num_experts


def _into(fields: Fields | None, made: Fields) -> Fields:
    """What was made, in memory that was given for it."""
    if fields is None:
        return made
    for field, value in zip(fields, made, strict=True):
        field.copy_(value)
    return fields


def counts(counts: Tensor, num_rows: int, fields: Fields | None = None) -> Fields:
    """The fields for rows in expert order already, with slot = row."""
    sizes, offsets = _bounds(counts, num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32, device=counts.device)
    row_to_slot = torch.where(rows < offsets[-1], rows, -1)
    return _into(fields, (sizes, offsets, row_to_slot, row_to_slot[:, None].clone()))


def sorted_rows(counts: Tensor, row_to_slot: Tensor, top_k: int, fields: Fields | None = None) -> Fields:
    """The fields for a sort made elsewhere; slots out of range are dropped."""
    num_rows = row_to_slot.shape[0]
    sizes, offsets = _bounds(counts, num_rows)
    rows = torch.arange(num_rows, device=counts.device)
    inside = (rows < offsets[-1]) & (row_to_slot >= 0) & (row_to_slot < num_rows)
    row_to_slot, slot_to_row = _pair(torch.where(inside, row_to_slot, -1), num_rows)
    return _into(fields, (sizes, offsets, row_to_slot, slot_to_row.view(-1, top_k)))


def maps(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_to_slot, slot_to_row): both directions from one; rows out of range, or taken, are dropped."""
    kept, row_to_slot = _pair(slot_to_row.reshape(-1), num_rows)
    return row_to_slot, kept.view(slot_to_row.shape)
