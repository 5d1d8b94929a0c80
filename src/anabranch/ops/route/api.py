"""The constructors of ExpertLayout, which call these."""

from __future__ import annotations

from torch import Tensor

from anabranch.layout import ExpertLayout
from anabranch.ops.frozen import frozen
from anabranch.ops.route import autograd, call


def layout_from_topk(expert_ids: Tensor, num_experts: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_topk`."""
    call.check_topk(expert_ids, num_experts)
    return _layout(*autograd.run_topk(expert_ids, num_experts))


def layout_from_counts(counts: Tensor, num_rows: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_counts`."""
    call.check_counts(counts, num_rows)
    return _layout(*autograd.run_counts(counts, num_rows))


def layout_from_sorted(counts: Tensor, row_to_slot: Tensor, top_k: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_sorted`."""
    call.check_sorted(counts, row_to_slot, top_k)
    return _layout(*autograd.run_sorted(counts, row_to_slot, top_k))


def layout_from_slot_to_row(slot_to_row: Tensor, num_rows: int) -> ExpertLayout:
    """See :meth:`ExpertLayout.from_slot_to_row`."""
    call.check_slot_to_row(slot_to_row, num_rows)
    rows, slots = autograd.run_maps(slot_to_row, num_rows)
    return ExpertLayout(None, None, rows, slots)


def _layout(counts: Tensor, offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor) -> ExpertLayout:
    return frozen(
        ExpertLayout, counts=counts, offsets=offsets, row_to_slot=row_to_slot, slot_to_row=slot_to_row
    )


class Unfilled:
    """Constructors of ExpertLayout that check their arguments as its own do, and then no more than allocate."""

    @staticmethod
    def from_counts(counts: Tensor, num_rows: int) -> ExpertLayout:
        """See :meth:`ExpertLayout.from_counts`."""
        call.check_counts(counts, num_rows)
        return ExpertLayout(*autograd.counts_fake(counts, num_rows))

    @staticmethod
    def from_sorted(counts: Tensor, row_to_slot: Tensor, top_k: int) -> ExpertLayout:
        """See :meth:`ExpertLayout.from_sorted`."""
        call.check_sorted(counts, row_to_slot, top_k)
        return ExpertLayout(*autograd.sorted_fake(counts, row_to_slot, top_k))
