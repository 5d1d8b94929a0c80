"""torch.library operators of multi_gemm: schema, fake kernel and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from anabranch.dispatch import choose
from anabranch.ops.multi_gemm.call import OP, MultiGemmCall, check_memory
from anabranch.ops.operator import define
from anabranch.ops.precision import without_autocast
from anabranch.ops.second_order import refuse_forward_mode, refuse_vmap

_CALL = "Tensor[] xs, Tensor[] weights, bool transpose_x, bool transpose_weight, str? backend"


def multi_gemm(call: MultiGemmCall) -> list[Tensor]:
    """Runs a call through its operator."""
    refuse_forward_mode(call.op, *call.xs, *call.weights)
    refuse_vmap(call.op, *call.xs, *call.weights)
    args = (list(call.xs), list(call.weights), call.transpose_x, call.transpose_weight, call.backend)
    if call.out is None:
        return multi_gemm_forward(*args)
    multi_gemm_out(list(call.out), call.op, *args)
    return list(call.out)


def _allocate(call: MultiGemmCall) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for x, weight in call.products]


def _forward(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    backend: str | None,
) -> list[Tensor]:
    call = MultiGemmCall(OP, xs, weights, transpose_x, transpose_weight, backend=backend)
    kernels = choose(OP, call).module
    out = _allocate(call)
    with without_autocast(call.device):
        kernels.multi_gemm(call, out)
    return out


def _forward_fake(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    backend: str | None,
) -> list[Tensor]:
    return _allocate(MultiGemmCall(OP, xs, weights, transpose_x, transpose_weight, backend=backend))


def _out(
    out: Sequence[Tensor],
    op: str,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    backend: str | None,
) -> None:
    call = MultiGemmCall(op, xs, weights, transpose_x, transpose_weight, out, backend)
    kernels = choose(OP, call).module
    check_memory(call)
    with without_autocast(call.device):
        kernels.multi_gemm(call, out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, weights, ctx.transpose_x, ctx.transpose_weight, ctx.backend = inputs
    # The gradient of x reads the weight, and the other way round.
    need_x, need_weight = ctx.needs_input_grad[: len(xs)], ctx.needs_input_grad[len(xs) : 2 * len(xs)]
    kept_xs = (x if need else None for x, need in zip(xs, need_weight, strict=True))
    kept_weights = (weight if need else None for weight, need in zip(weights, need_x, strict=True))
    ctx.save_for_backward(*kept_xs, *kept_weights)


def _differentiate(ctx: Any, *grads: Tensor | None) -> list[Tensor | None]:
    """All gradients needed in one call of the operator, as products a b^T of views.

    With g the gradient of y = x w^T: that of x is g w and that of w is g^T x. Where a tensor is stored
    transposed, so is its gradient: (a b^T)^T = b a^T swaps the factors.
    """
    saved, experts = ctx.saved_tensors, len(grads)
    found: list[Tensor | None] = [None] * (2 * experts)  # those of xs, then those of weights
    places, products = [], []
    for i, g in enumerate(grads):
        x, weight = saved[i], saved[experts + i]
        if g is not None and ctx.needs_input_grad[i]:
            w_t = weight if ctx.transpose_weight else weight.mT
            products.append((w_t, g) if ctx.transpose_x else (g, w_t))
            places.append(i)
        if g is not None and ctx.needs_input_grad[experts + i]:
            x_t = x if ctx.transpose_x else x.mT
            products.append((x_t, g.mT) if ctx.transpose_weight else (g.mT, x_t))
            places.append(experts + i)
    if products:
        left, right = zip(*products, strict=True)
        results = multi_gemm_forward(list(left), list(right), False, False, ctx.backend)
        for i, result in zip(places, results, strict=True):
            found[i] = result
    return found


multi_gemm_forward = define(
    "multi_gemm",
    f"({_CALL}) -> Tensor[]",
    _forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
)
multi_gemm_out = define(
    "multi_gemm_out", f"(Tensor(a!)[] out, str op, {_CALL}) -> ()", _out, fake=lambda *args: None
)
