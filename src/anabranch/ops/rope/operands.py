"""The shapes that the operands of rope may have, each brought to one form. All results are views."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.ops import checks

ROWS = 3
"""Temporal, height and width."""


class Sizes(NamedTuple):
    """What q says about the other operands."""

    batch: int
    tokens: int
    channels: int
    packed: bool
    head_axis: int

    def refuse(self, op: str, argument: str, forms: str, value: Tensor) -> ArgumentError:
        """The error of a value that has none of the shapes in ``forms``."""
        # Spelled out here alone: a number that becomes text is fixed in a compiled graph.
        batch = "" if self.packed else f"B = {self.batch}, "
        expected = f"shape {forms} with {batch}S = {self.tokens} of q"
        return ArgumentError(op, argument, expected=expected, got=f"shape {tuple(value.shape)}")


def check_head_axis(op: str, head_axis: object) -> None:
    """Demands 1 or 2."""
    if isinstance(head_axis, bool) or not isinstance(head_axis, int) or head_axis not in (1, 2):
        raise ArgumentError(op, "head_axis", expected="1 or 2", got=repr(head_axis))


def check_rotary_dim(op: str, rotary_dim: int | None, channels: int, channels_name: str) -> int:
    """How many channels are rotated: all for None, or else an even number of them."""
    given = channels if rotary_dim is None else rotary_dim
    checks.integer(op, "rotary_dim", given, minimum=2)
    if given > channels or given % 2:
        expected = f"an even number up to {channels_name} = {channels}"
        raise ArgumentError(op, "rotary_dim", expected=expected, got=given)
    return given


def check_vectors(op: str, q: Tensor, k: Tensor | None, head_axis: int) -> Sizes:
    """Demands q of rank 4 or packed, and a k that differs in its number of heads alone."""
    letters = "(B, H, S, D)" if head_axis == 1 else "(B, S, H, D)"
    _demand(op, "q", q, checks.FLOATS, f"{letters} or packed (S, H, D)", ranks=(3, 4))
    packed = q.dim() == 3
    if packed:
        letters, head_axis = "(S, H, D)", 1
    if k is not None:
        checks.tensor(op, "k", k, letters, checks.FLOATS)
        checks.same_dtype(op, "k", k, q, "q")
        sizes = list(q.shape)
        sizes[head_axis] = k.shape[head_axis]
        checks.shape(op, "k", k, *sizes, means=f"{letters} with q's sizes but for H")
    tokens = q.shape[0] if packed else q.shape[3 - head_axis]
    return Sizes(1 if packed else q.shape[0], tokens, q.shape[-1], packed, head_axis)


def check_tables(
    op: str, cos: Tensor, sin: Tensor, rotary_dim: int, sizes: Sizes, *, indexed: bool, rows: bool
) -> tuple[Tensor, Tensor, bool]:
    """cos and sin in RopeCall's form, and whether they hold three rows (they may, with ``rows``)."""
    forms = _table_forms(sizes, indexed, rows)
    _demand(op, "cos", cos, checks.FLOATS, forms, ranks=(2, 3, 4))
    _demand(op, "sin", sin, checks.FLOATS, forms, ranks=(2, 3, 4))
    checks.same_dtype(op, "sin", sin, cos, "cos")
    checks.shape(op, "sin", sin, *cos.shape, means="of cos")
    width = cos.shape[-1]
    # Not "in": the compiler finds no symbol equal to a number that way.
    if width != rotary_dim and width != rotary_dim // 2:
        expected = f"a last dimension W of rotary_dim = {rotary_dim}, or half of it"
        if rotary_dim == sizes.channels and width < rotary_dim:
            expected += " (to rotate a part of q's D channels, say rotary_dim)"
        raise ArgumentError(op, "cos", expected=expected, got=f"shape {tuple(cos.shape)}")
    view, has_rows = _table_view(cos, sizes, indexed, rows)
    if view is None:
        raise sizes.refuse(op, "cos", forms, cos)
    other, _ = _table_view(sin, sizes, indexed, rows)
    assert other is not None
    return view, other, has_rows


def _table_forms(sizes: Sizes, indexed: bool, rows: bool) -> str:
    if indexed:
        return "(P, W) beside positions"
    if rows:
        return "(3, S, W) or (S, W)" if sizes.packed else "(3, B or 1, S, W), (B or 1, S, W) or (S, W)"
    if sizes.packed:
        return "(S, W) or (1, S, W)"
    heads = "(B or 1, 1, S, W)" if sizes.head_axis == 1 else "(B or 1, S, 1, W)"
    return f"(B or 1, S, W), {heads} or (S, W)"


def _table_view(table: Tensor, sizes: Sizes, indexed: bool, rows: bool) -> tuple[Tensor | None, bool]:
    """The table in RopeCall's form, or None if it has no form that fits, and whether it has three rows."""
    if indexed:
        return (table if table.dim() == 2 else None), False
    if rows and table.dim() == (3 if sizes.packed else 4):
        view = table.unsqueeze(1) if sizes.packed else table
        return (view if view.shape[0] == ROWS and _fits(view[0], sizes) else None), True
    if table.dim() == 2:
        table = table.unsqueeze(0)
    elif table.dim() == 4 and not sizes.packed and table.shape[sizes.head_axis] == 1:
        table = table.squeeze(sizes.head_axis)
    return (table if _fits(table, sizes) else None), False


def check_positions(op: str, positions: Tensor, sizes: Sizes, *, rows: bool) -> tuple[Tensor, bool]:
    """positions in RopeCall's form, and whether they hold three rows (they may, with ``rows``)."""
    if sizes.packed:
        forms = "(3, S) or (S,)" if rows else "(S,)"
    else:
        forms = "(3, B or 1, S), (B or 1, S) or (S,)" if rows else "(B or 1, S) or (S,)"
    _demand(op, "positions", positions, checks.INTEGERS, forms, ranks=(1, 2, 3))
    has_rows = rows and positions.dim() == (2 if sizes.packed else 3)
    if has_rows:
        view = positions.unsqueeze(1) if sizes.packed else positions
        fits = view.shape[0] == ROWS and _fits(view[0].unsqueeze(-1), sizes)
    else:
        view = positions.unsqueeze(0) if positions.dim() == 1 else positions
        fits = not (sizes.packed and positions.dim() > 1) and _fits(view.unsqueeze(-1), sizes)
    if not fits:
        raise sizes.refuse(op, "positions", forms, positions)
    return view, has_rows


def _fits(value: Tensor, sizes: Sizes) -> bool:
    """Whether a value is (B or 1, S, anything)."""
    if value.dim() != 3:
        return False
    batch, tokens, _ = value.shape
    return tokens == sizes.tokens and (batch == sizes.batch or batch == 1)


def _demand(
    op: str, argument: str, value: object, dtypes: tuple[torch.dtype, ...], forms: str, ranks: tuple[int, ...]
) -> None:
    """checks.tensor for an argument of several ranks."""
    checks.dense(op, argument, value, forms, dtypes)
    assert isinstance(value, Tensor)
    if value.dim() not in ranks:
        raise ArgumentError(op, argument, expected=f"shape {forms}", got=f"shape {tuple(value.shape)}")
