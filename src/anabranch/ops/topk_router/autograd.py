"""torch.library operators of topk_router: schema, fake kernel and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anabranch.dispatch import choose
from anabranch.ops.operator import define
from anabranch.ops.precision import without_autocast
from anabranch.ops.second_order import refuse_forward_mode, refuse_second_derivative
from anabranch.ops.topk_router.call import OP, TopkRouterCall

_OPTIONS = (
    "SymInt k, str score, str order, bool renormalize, SymInt num_groups, SymInt top_groups, "
    "float scaling, str? backend"
)


def topk_router(call: TopkRouterCall) -> tuple[Tensor, Tensor]:
    """Runs a call through its operator."""
    refuse_forward_mode(OP, call.logits)
    return topk_router_forward(call.logits, call.bias, *_options(call))


def _options(call: TopkRouterCall) -> tuple[Any, ...]:
    return (
        call.k,
        call.score,
        call.order,
        call.renormalize,
        call.num_groups,
        call.top_groups,
        call.scaling,
        call.backend,
    )


def _forward(logits: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    call = TopkRouterCall(logits, bias, *options)
    with without_autocast(call.device):
        return choose(OP, call).module.forward(call)


def _forward_fake(logits: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    call = TopkRouterCall(logits, bias, *options)
    sizes = (logits.shape[0], call.k)
    return logits.new_empty(sizes, dtype=call.wide), logits.new_empty(sizes, dtype=torch.int64)


def _backward(grad: Tensor, logits: Tensor, ids: Tensor, *options: Any) -> Tensor:
    call = TopkRouterCall(logits, None, *options)
    with without_autocast(call.device):
        return choose(OP, call).module.backward(call, ids, grad)


def _backward_fake(grad: Tensor, logits: Tensor, ids: Tensor, *options: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # The ids are enough: the scores of the few chosen are cheap to take again from the logits.
    logits, _, *ctx.options = inputs
    ctx.save_for_backward(logits, output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None]:
    if grad is None or not ctx.needs_input_grad[0]:
        return (None,)
    return (topk_router_backward(grad, *ctx.saved_tensors, *ctx.options),)


topk_router_forward = define(
    "topk_router",
    f"(Tensor logits, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
)
topk_router_backward = define(
    "topk_router_backward",
    f"(Tensor grad, Tensor logits, Tensor ids, {_OPTIONS}) -> Tensor",
    _backward,
    fake=_backward_fake,
    differentiate=refuse_second_derivative(OP),
)
