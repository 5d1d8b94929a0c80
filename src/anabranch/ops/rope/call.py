"""Validation of rope and mrope: arguments in, a frozen call out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError
from anabranch.ops import checks
from anabranch.ops.overlap import no_overlap
from anabranch.ops.rope.operands import (
    Sizes,
    check_head_axis,
    check_positions,
    check_rotary_dim,
    check_tables,
    check_vectors,
)
from anabranch.ops.rope.sections import ORDERS, check_sections

OP = "rope"
PAIRINGS = ("half", "adjacent")


@dataclass(frozen=True, eq=False)
class RopeCall:
    """A rope or mrope whose arguments fit together.

    B batch, S tokens, W table width (rotary_dim or half of it), P rows of a table that positions index.
    """

    q: Tensor
    """As given: (B, H, S, D), (B, S, H, D) with head_axis 2, or packed (S, H, D)."""
    k: Tensor | None
    """Like q, with its own H."""
    cos: Tensor
    """(B or 1, S, W); with sections (3, B or 1, S, W); with positions (P, W). A packed q has B = 1."""
    sin: Tensor
    """Like cos."""
    positions: Tensor | None
    """(B or 1, S); with sections (3, B or 1, S)."""
    pairing: str
    rotary_dim: int
    head_axis: int
    sections: Sequence[int] = ()
    """How many pairs follow each of three rows; empty where there is one row for all."""
    order: str = "blocked"
    transpose: bool = False
    """Multiplies by the transposed matrices: the gradient."""
    backend: str | None = None
    inplace: bool = False

    @property
    def op(self) -> str:
        """Which public function errors speak of."""
        return "mrope" if self.sections else OP

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def pairs(self) -> int:
        """How many pairs of channels are rotated."""
        return self.rotary_dim // 2

    def by_token(self, x: Tensor) -> Tensor:
        """q, k or a result as (B, S, H, D), a view."""
        if x.dim() == 3:
            return x.unsqueeze(0)
        return x.transpose(1, 2) if self.head_axis == 1 else x


def bind_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: str = "half",
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    head_axis: int = 1,
    inplace: bool = False,
    backend: str | None = None,
) -> RopeCall:
    """Checks the arguments of rope and freezes the call."""
    checks.choice(OP, "pairing", pairing, PAIRINGS)
    sizes, rotary_dim = _check_common(OP, q, k, rotary_dim, head_axis, inplace, backend)
    cos, sin, _ = check_tables(OP, cos, sin, rotary_dim, sizes, indexed=positions is not None, rows=False)
    if positions is not None:
        positions, _ = check_positions(OP, positions, sizes, rows=False)
    call = RopeCall(
        q, k, cos, sin, positions, pairing, rotary_dim, head_axis, backend=backend, inplace=inplace
    )
    return _check_together(OP, call)


def bind_mrope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    sections: Sequence[int],
    *,
    order: str = "blocked",
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    head_axis: int = 1,
    inplace: bool = False,
    backend: str | None = None,
) -> RopeCall:
    """Checks the arguments of mrope and freezes the call; one row for all pairs makes it a rope."""
    op = "mrope"
    checks.choice(op, "order", order, ORDERS)
    sizes, rotary_dim = _check_common(op, q, k, rotary_dim, head_axis, inplace, backend)
    checked = check_sections(op, sections, order, rotary_dim // 2)
    cos, sin, rows = check_tables(op, cos, sin, rotary_dim, sizes, indexed=positions is not None, rows=True)
    if positions is not None:
        positions, rows = check_positions(op, positions, sizes, rows=True)
    call = RopeCall(
        q,
        k,
        cos,
        sin,
        positions,
        "half",
        rotary_dim,
        head_axis,
        checked if rows else (),
        order,
        backend=backend,
        inplace=inplace,
    )
    return _check_together(op, call)


def _check_common(
    op: str,
    q: Tensor,
    k: Tensor | None,
    rotary_dim: int | None,
    head_axis: int,
    inplace: bool,
    backend: str | None,
) -> tuple[Sizes, int]:
    check_name(op, backend)
    checks.flag(op, inplace=inplace)
    check_head_axis(op, head_axis)
    sizes = check_vectors(op, q, k, head_axis)
    return sizes, check_rotary_dim(op, rotary_dim, sizes.channels, "q's D")


def _check_together(op: str, call: RopeCall) -> RopeCall:
    checks.same_device(op, call.q, "q", k=call.k, cos=call.cos, sin=call.sin, positions=call.positions)
    for argument, table in (("cos", call.cos), ("sin", call.sin)):
        if checks.needs_grad(table):
            expected = "a table that needs no gradient (rope has none for it; detach it)"
            raise ArgumentError(op, argument, expected=expected, got="one that requires grad")
    if call.inplace:
        checks.no_gradient_through(op, "inplace", call.q, call.k)
    return call


def check_memory(call: RopeCall) -> None:
    """Demands that q and k can be overwritten. Reads addresses: not for traced code."""
    read = {"cos": call.cos, "sin": call.sin, "positions": call.positions}
    no_overlap(call.op, "q", call.q, **read)
    if call.k is not None:
        no_overlap(call.op, "k", call.k, q=call.q, **read)
