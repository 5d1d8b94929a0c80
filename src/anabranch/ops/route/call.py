"""What the constructors of ExpertLayout demand of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.ops import checks

OP = "route"
Fields = tuple[Tensor, Tensor, Tensor, Tensor]
"""counts, offsets, row_to_slot and slot_to_row of a layout."""
MAX_ROWS = 2**31 - 1
"""Rows and slots are int32."""


def fits(op: str, argument: str, rows: int) -> None:
    """Demands no more rows than int32 counts. Not of a symbol, whose range it would narrow: operators ask again."""
    if not isinstance(rows, torch.SymInt) and rows > MAX_ROWS:
        raise ArgumentError(op, argument, expected=f"at most {MAX_ROWS} rows", got=rows)


def check_topk(expert_ids: Tensor, num_experts: int) -> None:
    """For from_topk."""
    op = "ExpertLayout.from_topk"
    checks.tensor(op, "expert_ids", expert_ids, "(T, K)", checks.INTEGERS)
    checks.integer(op, "num_experts", num_experts, minimum=1)
    if num_experts >= MAX_ROWS:
        raise ArgumentError(op, "num_experts", expected=f"fewer than {MAX_ROWS}", got=num_experts)
    fits(op, "expert_ids", expert_ids.numel())


def check_counts(counts: Tensor, num_rows: int) -> None:
    """For from_counts."""
    op = "ExpertLayout.from_counts"
    checks.tensor(op, "counts", counts, "(E,)", checks.INTEGERS)
    checks.integer(op, "num_rows", num_rows, minimum=0)
    fits(op, "num_rows", num_rows)


def check_sorted(counts: Tensor, row_to_slot: Tensor, top_k: int) -> None:
    """For from_sorted."""
    op = "ExpertLayout.from_sorted"
    facts = checks.facts(counts, row_to_slot)
    # True is no integer, but looks like one to what remembers.
    passed = checks.known(op, facts, top_k) if facts is not None and type(top_k) is int else None
    if passed:
        return
    checks.tensor(op, "counts", counts, "(E,)", checks.INTEGERS)
    checks.tensor(op, "row_to_slot", row_to_slot, "(T * K,)", checks.INTEGERS)
    checks.same_device(op, counts, "counts", row_to_slot=row_to_slot)
    checks.integer(op, "top_k", top_k, minimum=1)
    fits(op, "row_to_slot", row_to_slot.numel())
    if row_to_slot.numel() % top_k:
        expected = f"a multiple of top_k = {top_k} rows"
        raise ArgumentError(op, "row_to_slot", expected=expected, got=f"{row_to_slot.numel()} rows")
    if passed is not None:
        passed.append(True)


def check_slot_to_row(slot_to_row: Tensor, num_rows: int) -> None:
    """For from_slot_to_row."""
    op = "ExpertLayout.from_slot_to_row"
    checks.tensor(op, "slot_to_row", slot_to_row, "(T, K)", checks.INTEGERS)
    checks.integer(op, "num_rows", num_rows, minimum=0)
    fits(op, "num_rows", max(num_rows, slot_to_row.numel()))


Routing = Callable[[Tensor, int], Fields]
"""Makes the fields of a layout of expert ids and the number of experts, for operators that route among other things."""


class RouteCall(NamedTuple):
    """What dispatch asks of a call."""

    indices: Tensor
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def dtype(self) -> torch.dtype:
        return self.indices.dtype
