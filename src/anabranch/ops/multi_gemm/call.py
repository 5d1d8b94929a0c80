"""Validation of multi_gemm and dual_gemm: arguments in, a frozen call out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks
from anabranch.ops.overlap import no_overlap
from anabranch.ops.precision import cast_like_matmul

OP = "multi_gemm"
"""The folder, and so what dispatch knows both functions by."""
DUAL = "dual_gemm"


@dataclass(frozen=True, eq=False)
class MultiGemmCall:
    """A multi_gemm whose arguments fit together. The fields are the arguments, named as there.

    ``op`` is the function the user called: its name, and those of its arguments, stand in messages.
    """

    op: str
    xs: Sequence[Tensor]
    weights: Sequence[Tensor]
    transpose_x: bool
    transpose_weight: bool
    out: Sequence[Tensor] | None = None
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.xs[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.xs[0].dtype

    @property
    def products(self) -> list[tuple[Tensor, Tensor]]:
        """Per expert x as (m, k) and weight as (n, k), both views."""
        return [
            (x.mT if self.transpose_x else x, weight.mT if self.transpose_weight else weight)
            for x, weight in zip(self.xs, self.weights, strict=True)
        ]


def bind_multi_gemm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    transpose_x: bool = False,
    transpose_weight: bool = False,
    out: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> MultiGemmCall:
    """Checks the arguments of multi_gemm, casts as autocast asks, and freezes the call."""
    _check_sequence(OP, "xs", xs)
    if not len(xs):
        raise ArgumentError(OP, "xs", expected="at least one tensor", got="none")
    _check_sequence(OP, "weights", weights, len(xs))
    x_names, weight_names = argument_names(OP, len(xs))
    return _bind(
        OP,
        dict(zip(x_names, xs, strict=True)),
        dict(zip(weight_names, weights, strict=True)),
        transpose_x,
        transpose_weight,
        out,
        backend,
    )


def bind_dual_gemm(
    x0: Tensor,
    x1: Tensor,
    w0: Tensor,
    w1: Tensor,
    *,
    transpose_x: bool = False,
    transpose_weight: bool = False,
    out: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> MultiGemmCall:
    """Checks the arguments of dual_gemm, casts as autocast asks, and freezes the call."""
    xs, weights = {"x0": x0, "x1": x1}, {"w0": w0, "w1": w1}
    return _bind(DUAL, xs, weights, transpose_x, transpose_weight, out, backend)


def argument_names(op: str, experts: int) -> tuple[list[str], list[str]]:
    """How a function's messages name the x and the weight of each expert."""
    x, weight = ("x{}", "w{}") if op == DUAL else ("xs[{}]", "weights[{}]")
    return [x.format(i) for i in range(experts)], [weight.format(i) for i in range(experts)]


def _bind(
    op: str,
    named_xs: Mapping[str, Tensor],
    named_weights: Mapping[str, Tensor],
    transpose_x: bool,
    transpose_weight: bool,
    out: Sequence[Tensor] | None,
    backend: str | None,
) -> MultiGemmCall:
    check_name(op, backend)
    checks.flag(op, transpose_x=transpose_x, transpose_weight=transpose_weight)
    first = next(iter(named_xs))
    for name, x in named_xs.items():
        checks.tensor(op, name, x, "(k, m)" if transpose_x else "(m, k)", checks.FLOATS)
    for name, weight in named_weights.items():
        checks.tensor(op, name, weight, "(k, n)" if transpose_weight else "(n, k)", checks.FLOATS)
    cast = cast_like_matmul(*named_xs.values(), *named_weights.values())
    xs, weights = cast[: len(named_xs)], cast[len(named_xs) :]
    call = MultiGemmCall(op, xs, weights, transpose_x, transpose_weight, out, backend)
    for name, value in zip((*named_xs, *named_weights), cast, strict=True):
        checks.same_dtype(op, name, value, xs[0], first)
    checks.same_device(op, xs[0], first, **named_xs, **named_weights)
    for x_name, name, x, weight in zip(named_xs, named_weights, xs, weights, strict=True):
        k = x.shape[0 if transpose_x else 1]
        if transpose_weight:
            means, sizes = f"({x_name}'s k, n)", (k, weight.shape[1])
        else:
            means, sizes = f"(n, {x_name}'s k)", (weight.shape[0], k)
        checks.shape(op, name, weight, *sizes, means=means, fits=lambda: _fits_transposed(call))
    if out is not None:
        _check_out(call, out, first)
    return call


def _fits_transposed(call: MultiGemmCall) -> str:
    """The option with which all weights would fit, if they would."""
    fits = all(x.shape[1] == weight.shape[0] for x, weight in call.products)
    return f"transpose_weight={not call.transpose_weight}" if fits else ""


def _check_sequence(op: str, argument: str, value: object, length: int | None = None) -> None:
    """Demands a list or tuple; a tensor would pass for a sequence of its rows."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentTypeError(op, argument, expected="a list or tuple of tensors", got=type(value).__name__)
    if length is not None and len(value) != length:
        raise ArgumentError(op, argument, expected=f"{length} tensors, one per x", got=len(value))


def _check_out(call: MultiGemmCall, out: Sequence[Tensor], first: str) -> None:
    _check_sequence(call.op, "out", out, len(call.xs))
    for i, (value, (x, weight)) in enumerate(zip(out, call.products, strict=True)):
        checks.tensor(call.op, f"out[{i}]", value, "(m, n)", checks.FLOATS)
        checks.same_dtype(call.op, f"out[{i}]", value, x, first)
        checks.shape(call.op, f"out[{i}]", value, x.shape[0], weight.shape[0], means="of the result")
        checks.same_device(call.op, x, first, **{f"out[{i}]": value})
    values = {**_named_inputs(call), **{f"out[{i}]": value for i, value in enumerate(out)}}
    checks.no_gradient_through(call.op, "out", **values)


def _named_inputs(call: MultiGemmCall) -> dict[str, Tensor]:
    x_names, weight_names = argument_names(call.op, len(call.xs))
    return dict(zip((*x_names, *weight_names), (*call.xs, *call.weights), strict=True))


def check_memory(call: MultiGemmCall) -> None:
    """Demands that no output shares memory with an input or another. Reads addresses: not for traced code."""
    assert call.out is not None
    inputs = _named_inputs(call)
    for i, value in enumerate(call.out):
        others = {f"out[{j}]": other for j, other in enumerate(call.out[:i])}
        no_overlap(call.op, f"out[{i}]", value, **inputs, **others)
