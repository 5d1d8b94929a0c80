"""torch.library operators that build the fields of an ExpertLayout: no gradient, sizes known from shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.dispatch import choose
from anabranch.ops.route.call import RouteCall, fits

Fields = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("anabranch::route_topk", mutates_args=())
def route_topk(expert_ids: Tensor, num_experts: int) -> Fields:
    """(counts, offsets, row_to_slot, slot_to_row) of a stable sort by expert, then slot."""
    fits("ExpertLayout.from_topk", "expert_ids", expert_ids.numel())
    return choose("route", RouteCall(expert_ids), None).module.topk(expert_ids, num_experts)


@route_topk.register_fake
def _(expert_ids: Tensor, num_experts: int) -> Fields:
    return _fields(expert_ids, num_experts, expert_ids.numel(), expert_ids.shape)


@torch.library.custom_op("anabranch::route_counts", mutates_args=())
def route_counts(counts: Tensor, num_rows: int) -> Fields:
    """The fields for rows in expert order already, with slot = row."""
    fits("ExpertLayout.from_counts", "num_rows", num_rows)
    return choose("route", RouteCall(counts), None).module.counts(counts, num_rows)


@route_counts.register_fake
def _(counts: Tensor, num_rows: int) -> Fields:
    return _fields(counts, counts.shape[0], num_rows, (num_rows, 1))


@torch.library.custom_op("anabranch::route_sorted", mutates_args=())
def route_sorted(counts: Tensor, row_to_slot: Tensor, top_k: int) -> Fields:
    """The fields for a sort made elsewhere."""
    fits("ExpertLayout.from_sorted", "row_to_slot", row_to_slot.numel())
    return choose("route", RouteCall(counts), None).module.sorted_rows(counts, row_to_slot, top_k)


@route_sorted.register_fake
def _(counts: Tensor, row_to_slot: Tensor, top_k: int) -> Fields:
    rows = row_to_slot.shape[0]
    return _fields(counts, counts.shape[0], rows, (rows // top_k, top_k))


@torch.library.custom_op("anabranch::route_maps", mutates_args=())
def route_maps(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_to_slot, slot_to_row): both directions from one; rows out of range are dropped."""
    fits("ExpertLayout.from_slot_to_row", "num_rows", max(num_rows, slot_to_row.numel()))
    return choose("route", RouteCall(slot_to_row), None).module.maps(slot_to_row, num_rows)


@route_maps.register_fake
def _(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return _int32(slot_to_row, num_rows), _int32(slot_to_row, *slot_to_row.shape)


def _int32(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.int32)


def _fields(like: Tensor, experts: int, rows: int, slots: torch.Size | tuple[int, int]) -> Fields:
    return _int32(like, experts), _int32(like, experts + 1), _int32(like, rows), _int32(like, *slots)
