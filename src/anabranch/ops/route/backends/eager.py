"""Routing in plain PyTorch: stable sorts, no host reading."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.route.call import RouteCall

Fields = tuple[Tensor, Tensor, Tensor, Tensor]


def supports(call: RouteCall) -> str | None:
    """Everything."""
    return None


def _bounds(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """counts and offsets that stay within num_rows, whatever counts claim."""
    ends = counts.clamp(min=0, max=num_rows).cumsum(0, dtype=torch.int64).clamp(max=num_rows)
    offsets = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return offsets.diff(), offsets


def _inverse(index: Tensor, size: int) -> Tensor:
    """``inverse[index[i]] = i`` for indices within [0, size), -1 elsewhere; the later of two equal ones."""
    inverse = index.new_full((size + 1,), -1, dtype=torch.int32)
    inside = (index >= 0) & (index < size)
    place = torch.where(inside, index, size).to(torch.int64)
    inverse[place] = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    return inverse[:size].clone()


def topk(expert_ids: Tensor, num_experts: int) -> Fields:
    """(counts, offsets, row_to_slot, slot_to_row) of a stable sort by expert, then slot."""
    ids = expert_ids.reshape(-1)
    keys = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(torch.int64)
    ordered, slots = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device)
    offsets = torch.searchsorted(ordered, bounds).to(torch.int32)
    row_to_slot = torch.where(ordered < num_experts, slots, -1).to(torch.int32)
    rows = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    slot_to_row = torch.empty_like(rows)
    slot_to_row[slots] = torch.where(ordered < num_experts, rows, -1)
    return offsets.diff(), offsets, row_to_slot, slot_to_row.view(expert_ids.shape)


def counts(counts: Tensor, num_rows: int) -> Fields:
    """The fields for rows in expert order already, with slot = row."""
    sizes, offsets = _bounds(counts, num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32, device=counts.device)
    row_to_slot = torch.where(rows < offsets[-1], rows, -1)
    return sizes, offsets, row_to_slot, row_to_slot[:, None].clone()


def sorted_rows(counts: Tensor, row_to_slot: Tensor, top_k: int) -> Fields:
    """The fields for a sort made elsewhere; slots out of range are dropped."""
    num_rows = row_to_slot.shape[0]
    sizes, offsets = _bounds(counts, num_rows)
    rows = torch.arange(num_rows, device=counts.device)
    inside = (rows < offsets[-1]) & (row_to_slot >= 0) & (row_to_slot < num_rows)
    row_to_slot = torch.where(inside, row_to_slot, -1).to(torch.int32)
    slot_to_row = _inverse(row_to_slot, num_rows).view(-1, top_k)
    return sizes, offsets, row_to_slot, slot_to_row


def maps(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_to_slot, slot_to_row): both directions from one; rows out of range are dropped."""
    inside = (slot_to_row >= 0) & (slot_to_row < num_rows)
    kept = torch.where(inside, slot_to_row, -1).to(torch.int32)
    return _inverse(kept.reshape(-1), num_rows), kept
