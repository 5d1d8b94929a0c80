"""torch.library operators that build the fields of an ExpertLayout: no gradient, sizes known from shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.dispatch import choose
from anabranch.ops.operator import define, direct
from anabranch.ops.route.call import OP, Fields, RouteCall, check_topk, fits

_FIELDS = "(Tensor, Tensor, Tensor, Tensor)"


def topk(expert_ids: Tensor, num_experts: int) -> Fields:
    """The kernel of route_topk, for operators that route among other things."""
    check_topk(expert_ids, num_experts)
    return choose(OP, RouteCall(expert_ids)).module.topk(expert_ids, num_experts)


def topk_fake(expert_ids: Tensor, num_experts: int) -> Fields:
    """Allocates what :func:`topk` does."""
    return _fields(expert_ids, num_experts, expert_ids.numel(), expert_ids.shape)


def counts_of(counts: Tensor, num_rows: int, fields: Fields | None = None) -> Fields:
    """The kernel of route_counts, which may be given contiguous memory for what it returns."""
    fits("ExpertLayout.from_counts", "num_rows", num_rows)
    return choose(OP, RouteCall(counts)).module.counts(counts, num_rows, fields)


def counts_fake(counts: Tensor, num_rows: int) -> Fields:
    """Allocates what :func:`counts_of` does."""
    return _fields(counts, counts.shape[0], num_rows, (num_rows, 1))


def sorted_rows(counts: Tensor, row_to_slot: Tensor, top_k: int, fields: Fields | None = None) -> Fields:
    """The kernel of route_sorted, which may be given contiguous memory for what it returns."""
    fits("ExpertLayout.from_sorted", "row_to_slot", row_to_slot.numel())
    return choose(OP, RouteCall(counts)).module.sorted_rows(counts, row_to_slot, top_k, fields)


def sorted_fake(counts: Tensor, row_to_slot: Tensor, top_k: int) -> Fields:
    """Allocates what :func:`sorted_rows` does."""
    rows = row_to_slot.shape[0]
    return _fields(counts, counts.shape[0], rows, (rows // top_k, top_k))


def _maps(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    fits("ExpertLayout.from_slot_to_row", "num_rows", max(num_rows, slot_to_row.numel()))
    return choose(OP, RouteCall(slot_to_row)).module.maps(slot_to_row, num_rows)


def _maps_fake(slot_to_row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return _int32(slot_to_row, num_rows), _int32(slot_to_row, *slot_to_row.shape)


def _int32(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.int32)


def _fields(like: Tensor, experts: int, rows: int, slots: torch.Size | tuple[int, int]) -> Fields:
    counts = _int32(like, experts)
    return counts, counts.new_empty(experts + 1), counts.new_empty(rows), counts.new_empty(slots)


# (counts, offsets, row_to_slot, slot_to_row) of a stable sort by expert, then slot; of rows in expert order
# already, with slot = row; and of a sort made elsewhere.
route_topk = define(
    "route_topk", f"(Tensor expert_ids, SymInt num_experts) -> {_FIELDS}", topk, fake=topk_fake
)
route_counts = define(
    "route_counts", f"(Tensor counts, SymInt num_rows) -> {_FIELDS}", counts_of, fake=counts_fake
)
route_sorted = define(
    "route_sorted",
    f"(Tensor counts, Tensor row_to_slot, SymInt top_k) -> {_FIELDS}",
    sorted_rows,
    fake=sorted_fake,
)
# (row_to_slot, slot_to_row): both directions from one; rows out of range are dropped.
route_maps = define(
    "route_maps", "(Tensor slot_to_row, SymInt num_rows) -> (Tensor, Tensor)", _maps, fake=_maps_fake
)
run_topk, run_counts, run_sorted, run_maps = map(direct, (route_topk, route_counts, route_sorted, route_maps))
