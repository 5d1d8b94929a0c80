"""torch.library operators of rope and mrope: schema, fake kernel and gradient.

A rotation is linear in q and k, so its gradient is the same operator with the matrices transposed, and so on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from anabranch.dispatch import checks_values, choose
from anabranch.errors import ArgumentError
from anabranch.ops.operator import define
from anabranch.ops.precision import without_autocast
from anabranch.ops.rope.call import OP, RopeCall, check_memory
from anabranch.ops.second_order import refuse_forward_mode

_REST = (
    "Tensor cos, Tensor sin, Tensor? positions, str pairing, SymInt rotary_dim, int head_axis, "
    "int[] sections, str order, bool transpose, str? backend"
)


def rope(call: RopeCall) -> tuple[Tensor, Tensor | None]:
    """Runs a call through its operator."""
    refuse_forward_mode(call.op, call.q, call.k, call.cos, call.sin)
    args = _flatten(call)
    if call.inplace:
        rope_inplace(*args)
        return call.q, call.k
    if call.out is not None:
        rope_out(*call.out, *args)
        return call.out
    q, k = rope_forward(*args)
    return q, None if call.k is None else k


def _flatten(call: RopeCall) -> tuple[Any, ...]:
    return (
        call.q,
        call.k,
        call.cos,
        call.sin,
        call.positions,
        call.pairing,
        call.rotary_dim,
        call.head_axis,
        call.sections,
        call.order,
        call.transpose,
        call.backend,
    )


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    call = RopeCall(*args)
    outs = _forward_fake(*args)
    _run(call, outs[0], None if call.k is None else outs[1])
    return outs


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = RopeCall(*args)
    k_shape = (0,) if call.k is None else call.k.shape
    return call.q.new_empty(call.q.shape), call.q.new_empty(k_shape)


def _inplace(*args: Any) -> None:
    call = replace(RopeCall(*args), inplace=True)
    check_memory(call)
    _run(call, call.q, call.k)


def _out(q_out: Tensor, k_out: Tensor | None, *args: Any) -> None:
    call = replace(RopeCall(*args), out=(q_out, k_out))
    check_memory(call)
    _run(call, q_out, k_out)


def _run(call: RopeCall, q_out: Tensor, k_out: Tensor | None) -> None:
    if call.positions is not None and checks_values():
        _check_positions(call, call.positions)
    with without_autocast(call.device):
        choose(OP, call).module.rotate(call, q_out, k_out)


def _check_positions(call: RopeCall, positions: Tensor) -> None:
    rows = call.cos.shape[0]
    wrong = positions[(positions < 0) | (positions >= rows)]
    if wrong.numel():
        expected = f"rows of cos, from 0 to {rows - 1}"
        raise ArgumentError(call.op, "positions", expected=expected, got=int(wrong[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, *ctx.flags = inputs
    ctx.save_for_backward(cos, sin, positions)


def _differentiate(ctx: Any, d_q: Tensor | None, d_k: Tensor | None) -> list[Tensor | None]:
    grads: list[Tensor | None] = [None, None]
    wanted = [i for i, d in enumerate((d_q, d_k)) if d is not None and ctx.needs_input_grad[i]]
    if wanted:
        given = [d for i, d in enumerate((d_q, d_k)) if i in wanted]
        *flags, transpose, backend = ctx.flags
        # One alone takes q's place: the operator does not care which it is.
        q, k = given if len(given) == 2 else (given[0], None)
        found = rope_forward(q, k, *ctx.saved_tensors, *flags, not transpose, backend)
        for i, grad in zip(wanted, found, strict=False):
            grads[i] = grad
    return grads


rope_forward = define(
    "rope",
    f"(Tensor q, Tensor? k, {_REST}) -> (Tensor, Tensor)",
    _forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
)
rope_inplace = define(
    "rope_inplace", f"(Tensor(a!) q, Tensor(b!)? k, {_REST}) -> ()", _inplace, fake=lambda *args: None
)
rope_out = define(
    "rope_out",
    f"(Tensor(a!) q_out, Tensor(b!)? k_out, Tensor q, Tensor? k, {_REST}) -> ()",
    _out,
    fake=lambda *args: None,
)
