"""Validation of rope and mrope: arguments in, a frozen call out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError, ArgumentTypeError
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
    """How many pairs, or channels, follow each of three rows; empty where there is one row for all."""
    order: str = "blocked"
    transpose: bool = False
    """Multiplies by the transposed matrices: the gradient."""
    backend: str | None = None
    inplace: bool = False
    out: tuple[Tensor, Tensor | None] | None = None
    """Where the results go; None makes them, and so it is with inplace."""
    out_is_input: bool = False
    """With inplace: it was asked for as an out that holds q and k, which errors then speak of."""

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
    out: tuple[Tensor, Tensor | None] | None = None,
    backend: str | None = None,
) -> RopeCall:
    """Checks the arguments of rope and freezes the call."""
    checks.choice(OP, "pairing", pairing, PAIRINGS)
    beside = cos if positions is None else positions
    sizes, rotary_dim = _check_common(OP, q, k, rotary_dim, head_axis, inplace, backend, beside)
    cos, sin, _ = check_tables(OP, cos, sin, rotary_dim, sizes, indexed=positions is not None, rows=False)
    if positions is not None:
        positions, _ = check_positions(OP, positions, sizes, rows=False)
    call = RopeCall(
        q, k, cos, sin, positions, pairing, rotary_dim, head_axis, backend=backend, inplace=inplace, out=out
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
    out: tuple[Tensor, Tensor | None] | None = None,
    backend: str | None = None,
) -> RopeCall:
    """Checks the arguments of mrope and freezes the call; one row for all pairs makes it a rope."""
    op = "mrope"
    checks.choice(op, "order", order, ORDERS)
    beside = cos if positions is None else positions
    sizes, rotary_dim = _check_common(op, q, k, rotary_dim, head_axis, inplace, backend, beside)
    checked = check_sections(op, sections, order, rotary_dim // 2)
    cos, sin, rows = check_tables(op, cos, sin, rotary_dim, sizes, indexed=positions is not None, rows=True)
    if positions is not None:
        positions, rows = check_positions(op, positions, sizes, rows=True)
    if order == "channels":
        _check_channels(op, cos, positions, rotary_dim)
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
        out=out,
    )
    return _check_together(op, call)


def _check_channels(op: str, cos: Tensor, positions: Tensor | None, rotary_dim: int) -> None:
    """Demands what sections of channels can be applied to."""
    if positions is not None:
        raise ArgumentError(op, "positions", expected='None with order="channels"', got="a tensor")
    if cos.shape[-1] != rotary_dim:
        expected = f'a last dimension W of rotary_dim = {rotary_dim} with order="channels"'
        raise ArgumentError(op, "cos", expected=expected, got=f"W = {cos.shape[-1]}")


def _check_common(
    op: str,
    q: Tensor,
    k: Tensor | None,
    rotary_dim: int | None,
    head_axis: int,
    inplace: bool,
    backend: str | None,
    beside: object,
) -> tuple[Sizes, int]:
    check_name(op, backend)
    checks.flag(op, inplace=inplace)
    check_head_axis(op, head_axis)
    sizes = check_vectors(op, q, k, head_axis, beside)
    return sizes, check_rotary_dim(op, rotary_dim, sizes.channels, "q's D")


def _check_together(op: str, call: RopeCall) -> RopeCall:
    checks.same_device(op, call.q, "q", k=call.k, cos=call.cos, sin=call.sin, positions=call.positions)
    for argument, table in (("cos", call.cos), ("sin", call.sin)):
        if checks.needs_grad(table):
            expected = "a table that needs no gradient (rope has none for it; detach it)"
            raise ArgumentError(op, argument, expected=expected, got="one that requires grad")
    if call.inplace:
        checks.no_gradient_through(op, "inplace", q=call.q, k=call.k)
    return call if call.out is None else _check_out(op, call, call.out)


def _check_out(op: str, call: RopeCall, out: object) -> RopeCall:
    """Demands results like q and k; those that are q and k make the call one in place."""
    expected = "a pair of tensors, its second None where k is"
    if not isinstance(out, (list, tuple)) or len(out) != 2 or (out[1] is None) != (call.k is None):
        raise ArgumentTypeError(op, "out", expected=expected, got=_form(out))
    if call.inplace:
        raise ArgumentError(op, "out", expected="None with inplace", got="a pair")
    for i, (name, value, like) in enumerate((("q", out[0], call.q), ("k", out[1], call.k))):
        if like is not None:
            argument = f"out[{i}]"
            checks.dense(op, argument, value, f"of {name}'s shape", checks.FLOATS)
            checks.same_dtype(op, argument, value, like, name)
            checks.shape(op, argument, value, *like.shape, means=f"of {name}")
            checks.same_device(op, like, name, **{argument: value})
    checks.no_gradient_through(op, "out", q=call.q, k=call.k, **{"out[0]": out[0], "out[1]": out[1]})
    if out[0] is call.q and out[1] is call.k:
        return replace(call, inplace=True, out=None, out_is_input=True)
    return replace(call, out=(out[0], out[1]))


def _form(out: object) -> str:
    if isinstance(out, (list, tuple)):
        return f"({', '.join(type(value).__name__ for value in out)})"
    return type(out).__name__


def check_memory(call: RopeCall) -> None:
    """Demands that what is written is apart from what is read. Reads addresses: not for traced code."""
    read = {"cos": call.cos, "sin": call.sin, "positions": call.positions}
    if call.out is None:
        no_overlap(call.op, "q", call.q, **read)
        if call.k is not None:
            no_overlap(call.op, "k", call.k, q=call.q, **read)
        return
    q_out, k_out = call.out
    # In its own place q may be overwritten: each pair is read before it is written.
    q, k = (None if _same_place(*pair) else pair[0] for pair in ((call.q, q_out), (call.k, k_out)))
    no_overlap(call.op, "out[0]", q_out, q=q, k=call.k, **read)
    if k_out is not None:
        no_overlap(call.op, "out[1]", k_out, **{"out[0]": q_out}, q=call.q, k=k, **read)


def _same_place(x: Tensor | None, out: Tensor | None) -> bool:
    return x is None or out is None or (x.data_ptr() == out.data_ptr() and x.stride() == out.stride())
