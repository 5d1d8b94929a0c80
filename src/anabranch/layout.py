"""ExpertLayout: the one value that says which row belongs to which expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ExpertLayout"]


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Which rows of an expert-sorted matrix belong to which expert, and where each came from.

    T tokens, K experts per token, E experts; slot ``t * K + k`` is token t's k-th choice. A row is a slot's
    place in expert order: first by expert, then by slot (a stable sort). All fields live on one device, and
    nothing here reads their values on the host.

    Build one with :meth:`from_topk`, :meth:`from_counts`, :meth:`from_sorted` or :meth:`from_slot_to_row`.
    It is a pytree, so torch.compile and torch.export take it as an argument.

    Contract, kept by every operation: an id outside ``[0, E)`` is dropped (no row, output 0, gradient 0); the
    same expert twice for one token adds up; rows from ``offsets[E]`` on are written as zeros; counts that
    claim more rows than there are never cause an access out of bounds. A row has at most one slot and a slot
    at most one row: of several that claim one place in a map given to a constructor, the last keeps it.

    Attributes:
        counts: (E,) int32, rows of each expert; None in a layout of maps alone.
        offsets: (E + 1,) int32, exclusive prefix sum of counts; None in a layout of maps alone.
        row_to_slot: (R,) int32, slot of each row; -1 where it has none, as from ``offsets[E]`` on. R is T * K
            but for layouts of maps alone, where it is given.
        slot_to_row: (T, K) int32, row of each slot; -1 where the slot is dropped.
    """

    counts: Tensor | None
    offsets: Tensor | None
    row_to_slot: Tensor
    slot_to_row: Tensor

    @classmethod
    def from_topk(cls, expert_ids: Tensor, num_experts: int) -> ExpertLayout:
        """Sorts the slots of token-order ids by expert, stably.

        Args:
            expert_ids: (T, K) int64 or int32, any strides; ids outside ``[0, num_experts)`` are dropped.
            num_experts: E, at least 1.

        Raises:
            ArgumentError: a wrong rank or value, or more than 2**31 - 1 slots.
            ArgumentTypeError: a wrong type or dtype.
        """
        from anabranch.ops.route.api import layout_from_topk

        return layout_from_topk(expert_ids, num_experts)

    @classmethod
    def from_counts(cls, counts: Tensor, num_rows: int) -> ExpertLayout:
        """Rows that are in expert order already: K = 1, and slot = row.

        Args:
            counts: (E,) int64 or int32, rows of each expert; a negative one counts as 0.
            num_rows: how many rows there are, which sizes the maps; those that no expert counts hold -1.

        Raises:
            ArgumentError: a wrong rank or value, or more than 2**31 - 1 rows.
            ArgumentTypeError: a wrong type or dtype.
        """
        from anabranch.ops.route.api import layout_from_counts

        return layout_from_counts(counts, num_rows)

    @classmethod
    def from_sorted(cls, counts: Tensor, row_to_slot: Tensor, top_k: int) -> ExpertLayout:
        """A sort made elsewhere.

        Args:
            counts: (E,) int64 or int32, rows of each expert; a negative one counts as 0.
            row_to_slot: (T * top_k,) int64 or int32, the slot of each row, on counts's device; slots out of
                range are dropped.
            top_k: K, at least 1.

        Raises:
            ArgumentError: a wrong rank, shape, device or value, or more than 2**31 - 1 rows.
            ArgumentTypeError: a wrong type or dtype.
        """
        from anabranch.ops.route.api import layout_from_sorted

        return layout_from_sorted(counts, row_to_slot, top_k)

    @classmethod
    def from_slot_to_row(cls, slot_to_row: Tensor, num_rows: int) -> ExpertLayout:
        """Maps alone, which are enough for permute and unpermute: counts and offsets are None.

        Args:
            slot_to_row: (T, K) int64 or int32, the row of each slot; slots whose row is outside
                ``[0, num_rows)`` are dropped.
            num_rows: how many rows there are.

        Raises:
            ArgumentError: a wrong rank or value, or more than 2**31 - 1 rows or slots.
            ArgumentTypeError: a wrong type or dtype.
        """
        from anabranch.ops.route.api import layout_from_slot_to_row

        return layout_from_slot_to_row(slot_to_row, num_rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.slot_to_row.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.slot_to_row.shape[1]

    @property
    def num_rows(self) -> int:
        """R: rows of an expert-sorted matrix, those past ``offsets[E]`` included."""
        return self.row_to_slot.shape[0]

    @property
    def num_experts(self) -> int | None:
        """E, or None in a layout of maps alone."""
        return None if self.counts is None else self.counts.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the fields live."""
        return self.slot_to_row.device


torch.utils._pytree.register_dataclass(ExpertLayout)
