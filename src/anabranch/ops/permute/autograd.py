"""torch.library operators of permute and unpermute: schema, fake kernel and gradient.

Every gradient is made of these operators again, so gradients of any order come out right.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anabranch.dispatch import checks_values, choose
from anabranch.layout import ExpertLayout
from anabranch.ops.operator import define
from anabranch.ops.permute.call import OP, PermuteCall, UnpermuteBackwardCall, UnpermuteCall, check_maps
from anabranch.ops.precision import without_autocast
from anabranch.ops.second_order import refuse_forward_mode

Grads = tuple[Tensor | None, ...]
_MAPS = "Tensor row_to_slot, Tensor slot_to_row, str? backend"


def permute(call: PermuteCall) -> Tensor:
    """Runs a call through its operator."""
    refuse_forward_mode("permute", call.x)
    return permute_forward(call.x, call.layout.row_to_slot, call.layout.slot_to_row, call.backend)


def unpermute(call: UnpermuteCall) -> Tensor:
    """Runs a call through its operator."""
    refuse_forward_mode("unpermute", call.y, call.weights)
    layout = call.layout
    return unpermute_forward(call.y, call.weights, layout.row_to_slot, layout.slot_to_row, call.backend)


def _checked(op: str, row_to_slot: Tensor, slot_to_row: Tensor) -> ExpertLayout:
    layout = ExpertLayout(None, None, row_to_slot, slot_to_row)
    if checks_values():
        check_maps(op, layout)
    return layout


def _permute(x: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, backend: str | None) -> Tensor:
    call = PermuteCall(x, _checked("permute", row_to_slot, slot_to_row), backend)
    kernels = choose(OP, call).module
    out = _permute_fake(x, row_to_slot, slot_to_row, backend)
    with without_autocast(x.device):
        kernels.permute(call, out)
    return out


def _permute_fake(x: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, backend: str | None) -> Tensor:
    return x.new_empty(row_to_slot.shape[0], x.shape[1])


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *maps, ctx.backend = inputs
    ctx.save_for_backward(*maps)


def _differentiate_permute(ctx: Any, grad: Tensor | None) -> Grads:
    return (None if grad is None else unpermute_forward(grad, None, *ctx.saved_tensors, ctx.backend),)


def _unpermute(
    y: Tensor, weights: Tensor | None, row_to_slot: Tensor, slot_to_row: Tensor, backend: str | None
) -> Tensor:
    call = UnpermuteCall(y, _checked("unpermute", row_to_slot, slot_to_row), weights, backend)
    kernels = choose(OP, call).module
    out = _unpermute_fake(y, weights, row_to_slot, slot_to_row, backend)
    with without_autocast(y.device):
        kernels.unpermute(call, out)
    return out


def _unpermute_fake(
    y: Tensor, weights: Tensor | None, row_to_slot: Tensor, slot_to_row: Tensor, backend: str | None
) -> Tensor:
    return y.new_empty(slot_to_row.shape[0], y.shape[1])


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, *maps, ctx.backend = inputs
    # Only the gradient of weights reads y: whoever freezes them does not keep it.
    ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, weights, *maps)


def _differentiate_unpermute(ctx: Any, grad: Tensor | None) -> Grads:
    y, weights, *maps = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:2])
    if grad is None:
        return (None, None)
    if weights is None:
        return (permute_forward(grad, *maps, ctx.backend),)
    grads = iter(unpermute_backward(needs, grad, y, weights, *maps, ctx.backend))
    return tuple(next(grads) if need else None for need in needs)


def _allocate(needs: list[bool], grad: Tensor, weights: Tensor, rows: int) -> list[Tensor]:
    d_y = [grad.new_empty(rows, grad.shape[1])] if needs[0] else []
    return d_y + ([weights.new_empty(weights.shape)] if needs[1] else [])


def _unpermute_backward(
    needs: list[bool],
    grad: Tensor,
    y: Tensor | None,
    weights: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    backend: str | None,
) -> list[Tensor]:
    layout = _checked("unpermute", row_to_slot, slot_to_row)
    call = UnpermuteBackwardCall(needs, grad, y, layout, weights, backend)
    kernels = choose(OP, call).module
    grads = _allocate(needs, grad, weights, layout.num_rows)
    with without_autocast(grad.device):
        kernels.unpermute_backward(call, grads[0] if needs[0] else None, grads[-1] if needs[1] else None)
    return grads


def _unpermute_backward_fake(
    needs: list[bool],
    grad: Tensor,
    y: Tensor | None,
    weights: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    backend: str | None,
) -> list[Tensor]:
    return _allocate(needs, grad, weights, row_to_slot.shape[0])


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.needs, grad, y, weights, *maps, ctx.backend = inputs
    ctx.save_for_backward(grad, y, weights, *maps)


def _differentiate_backward(ctx: Any, *grads: Tensor | None) -> Grads:
    """The gradients through ``d_y = w g`` and ``d_w = <g, y>``, with u and v those of d_y and d_w.

    That of g is ``w u + v y`` summed over K; those of y and w are ``v g`` and ``<g, u>``, which is this
    operator again with u and v in place of y and w.
    """
    grad, y, weights, *maps = ctx.saved_tensors
    given = iter(grads)
    u, v = (next(given) if need else None for need in ctx.needs)
    need_grad, need_y, need_weights = ctx.needs_input_grad[:3]
    d_grad = d_y = d_weights = None
    if need_grad:
        if u is not None:
            d_grad = unpermute_forward(u, weights, *maps, ctx.backend)
        if v is not None:
            term = unpermute_forward(y, v, *maps, ctx.backend)
            d_grad = term if d_grad is None else d_grad + term
    needs = [need_y and v is not None, need_weights and u is not None]
    if any(needs):
        found = iter(unpermute_backward(needs, grad, u, weights if v is None else v, *maps, ctx.backend))
        d_y, d_weights = (next(found) if need else None for need in needs)
    return d_grad, d_y, d_weights


permute_forward = define(
    "permute",
    f"(Tensor x, {_MAPS}) -> Tensor",
    _permute,
    fake=_permute_fake,
    save=_save_permute,
    differentiate=_differentiate_permute,
)
unpermute_forward = define(
    "unpermute",
    f"(Tensor y, Tensor? weights, {_MAPS}) -> Tensor",
    _unpermute,
    fake=_unpermute_fake,
    save=_save_unpermute,
    differentiate=_differentiate_unpermute,
)
# The needed ones among the gradients of y and weights, in this order.
unpermute_backward = define(
    "unpermute_backward",
    f"(bool[] needs, Tensor grad, Tensor? y, Tensor weights, {_MAPS}) -> Tensor[]",
    _unpermute_backward,
    fake=_unpermute_backward_fake,
    save=_save_backward,
    differentiate=_differentiate_backward,
)
