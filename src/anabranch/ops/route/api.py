"""The constructors of ExpertLayout, which call these."""

from __future__ import annotations

from torch import Tensor

from anabranch.layout import ExpertLayout
from anabranch.ops.route import autograd, call


def layout_from_topk(expert_ids: Tensor, num_experts: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_topk`."""
    call.check_topk(expert_ids, num_experts)
    return ExpertLayout(*autograd.route_topk(expert_ids, num_experts))


def layout_from_counts(counts: Tensor, num_rows: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_counts`."""
    call.check_counts(counts, num_rows)
    return ExpertLayout(*autograd.route_counts(counts, num_rows))


def layout_from_sorted(counts: Tensor, row_to_slot: Tensor, top_k: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_sorted`."""
    call.check_sorted(counts, row_to_slot, top_k)
    return ExpertLayout(*autograd.route_sorted(counts, row_to_slot, top_k))


def layout_from_slot_to_row(slot_to_row: Tensor, num_rows: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_slot_to_row`."""
    call.check_slot_to_row(slot_to_row, num_rows)
    rows, slots = autograd.route_maps(slot_to_row, num_rows)
    return ExpertLayout(None, None, rows, slots)
