"""torch.library operators of multi_gemm: schema, fake kernel and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.dispatch import choose, without_autocast
from anabranch.ops.multi_gemm.call import OP, MultiGemmCall, check_memory
from anabranch.ops.second_order import refuse_forward_mode

_CALL = "Tensor[] xs, Tensor[] weights, bool transpose_x, bool transpose_weight, str? backend"
Grads = list[Tensor | None]


def multi_gemm(call: MultiGemmCall) -> list[Tensor]:
    """Runs a call through its operator."""
    refuse_forward_mode(call.op, *call.xs, *call.weights)
    args = (list(call.xs), list(call.weights), call.transpose_x, call.transpose_weight, call.backend)
    if call.out is None:
        return multi_gemm_forward(*args)
    multi_gemm_out(list(call.out), call.op, *args)
    return list(call.out)


def _allocate(call: MultiGemmCall) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for x, weight in call.products]


@torch.library.custom_op("anabranch::multi_gemm", mutates_args=(), schema=f"({_CALL}) -> Tensor[]")
def multi_gemm_forward(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    backend: str | None,
) -> list[Tensor]:
    """One (m_i, n_i) per expert."""
    call = MultiGemmCall(OP, xs, weights, transpose_x, transpose_weight, backend=backend)
    kernels = choose(OP, call, backend).module
    out = _allocate(call)
    with without_autocast(call.device):
        kernels.multi_gemm(call, out)
    return out


@multi_gemm_forward.register_fake
def _(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    backend: str | None,
) -> list[Tensor]:
    return _allocate(MultiGemmCall(OP, xs, weights, transpose_x, transpose_weight, backend=backend))


@torch.library.custom_op(
    "anabranch::multi_gemm_out",
    mutates_args=("out",),
    schema=f"(Tensor(a!)[] out, str op, {_CALL}) -> ()",
)
def multi_gemm_out(
    out: Sequence[Tensor],
    op: str,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    backend: str | None,
) -> None:
    """As multi_gemm, written to ``out``."""
    call = MultiGemmCall(op, xs, weights, transpose_x, transpose_weight, out, backend)
    kernels = choose(OP, call, backend).module
    check_memory(call)
    with without_autocast(call.device):
        kernels.multi_gemm(call, out)


multi_gemm_out.register_fake(lambda *args: None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    xs, weights, ctx.transpose_x, ctx.transpose_weight, ctx.backend = inputs
    # Here the needs lie flat, those of xs first. The gradient of x reads the weight, and the other way round.
    need_x, need_weight = ctx.needs_input_grad[: len(xs)], ctx.needs_input_grad[len(xs) : 2 * len(xs)]
    kept_xs = (x if need else None for x, need in zip(xs, need_weight, strict=True))
    kept_weights = (weight if need else None for weight, need in zip(weights, need_x, strict=True))
    ctx.save_for_backward(*kept_xs, *kept_weights)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Grads, Grads, None, None, None]:
    """All gradients needed in one call of the operator, as products a b^T of views.

    With g the gradient of y = x w^T: that of x is g w and that of w is g^T x. Where a tensor is stored
    transposed, so is its gradient: (a b^T)^T = b a^T swaps the factors.
    """
    saved, experts = ctx.saved_tensors, len(grads)
    found: tuple[Grads, Grads] = ([None] * experts, [None] * experts)
    places, products = [], []
    for i, g in enumerate(grads):
        x, weight = saved[i], saved[experts + i]
        if g is not None and ctx.needs_input_grad[0][i]:
            w_t = weight if ctx.transpose_weight else weight.mT
            products.append((w_t, g) if ctx.transpose_x else (g, w_t))
            places.append((0, i))
        if g is not None and ctx.needs_input_grad[1][i]:
            x_t = x if ctx.transpose_x else x.mT
            products.append((x_t, g.mT) if ctx.transpose_weight else (g.mT, x_t))
            places.append((1, i))
    if products:
        left, right = zip(*products, strict=True)
        results = multi_gemm_forward(list(left), list(right), False, False, ctx.backend)
        for (which, i), result in zip(places, results, strict=True):
            found[which][i] = result
    return *found, None, None, None


multi_gemm_forward.register_autograd(_differentiate, setup_context=_save)
