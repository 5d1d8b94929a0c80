"""The shapes that the operands of rope may have, each brought to one form. All results are views."""

from __future__ import annotations

from collections.abc import Callable
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
    heads: int

    def refuse(
        self, op: str, argument: str, forms: str, value: Tensor, fits: Callable[[Sizes], bool]
    ) -> ArgumentError:
        """The error of a value that has none of the shapes in ``forms``; ``fits`` asks about other sizes of q."""
        # Spelled out here alone: a number that becomes text is fixed in a compiled graph.
        batch = "" if self.packed else f"B = {self.batch}, "
        expected = f"shape {forms} with {batch}S = {self.tokens} of q"
        got = f"shape {tuple(value.shape)}"
        other = self._replace(tokens=self.heads, heads=self.tokens, head_axis=3 - self.head_axis)
        if not self.packed and fits(other):
            got = f"{got}, which fits head_axis={other.head_axis}"
        return ArgumentError(op, argument, expected=expected, got=got)


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


def check_vectors(op: str, q: Tensor, k: Tensor | None, head_axis: int, beside: object) -> Sizes:
    """Demands q of rank 4 or packed, and a k that differs in its number of heads alone.

    ``beside`` is what has q's S too, unchecked: of a wrong k it says whether the other head_axis was meant.
    """
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
        means = f"{letters} with q's sizes but for H"
        checks.shape(op, "k", k, *sizes, means=means, fits=lambda: _other_axis(q, k, head_axis, beside))
    if packed:
        return Sizes(1, q.shape[0], q.shape[-1], packed, head_axis, q.shape[1])
    return Sizes(q.shape[0], q.shape[3 - head_axis], q.shape[-1], packed, head_axis, q.shape[head_axis])


def _other_axis(q: Tensor, k: Tensor, head_axis: int, beside: object) -> str:
    """The head_axis that q, k and what is beside them fit, if it is the other one."""
    other = 3 - head_axis
    if q.dim() != 4 or not isinstance(beside, Tensor):
        return ""
    same = all(q.shape[axis] == k.shape[axis] for axis in (0, head_axis, 3))
    # S is the last size of positions, and of a table the last before W, but for an axis of heads.
    sizes = beside.shape[:-1] if beside.is_floating_point() else beside.shape
    tokens = [size for size in sizes if size != 1][-1:]
    means = same and tokens == [q.shape[head_axis]] and tokens != [q.shape[other]]
    return f"head_axis={other}" if means else ""


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
        raise sizes.refuse(
            op, "cos", forms, cos, lambda other: _table_view(cos, other, indexed, rows)[0] is not None
        )
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
    view = _positions_view(positions, sizes, has_rows)
    if view is None:
        raise sizes.refuse(
            op,
            "positions",
            forms,
            positions,
            lambda other: _positions_view(positions, other, has_rows) is not None,
        )
    return view, has_rows


def _positions_view(positions: Tensor, sizes: Sizes, has_rows: bool) -> Tensor | None:
    """positions in RopeCall's form, or None if they have no form that fits."""
    if has_rows:
        view = positions.unsqueeze(1) if sizes.packed else positions
        return view if view.shape[0] == ROWS and _fits(view[0].unsqueeze(-1), sizes) else None
    view = positions.unsqueeze(0) if positions.dim() == 1 else positions
    fits = not (sizes.packed and positions.dim() > 1) and _fits(view.unsqueeze(-1), sizes)
    return view if fits else None


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
