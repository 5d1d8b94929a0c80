"""torch.library operators of grouped_gemm: schema, fake kernel and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anabranch.dispatch import choose
from anabranch.epilogues import Identity, from_spec
from anabranch.layout import ExpertLayout
from anabranch.ops import checks
from anabranch.ops.frozen import frozen
from anabranch.ops.grouped_gemm.call import OP, GroupedGemmCall
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig
from anabranch.ops.operator import define, direct
from anabranch.ops.overlap import no_overlap
from anabranch.ops.precision import without_autocast
from anabranch.ops.second_order import refuse_forward_mode, refuse_second_derivative
from anabranch.tuning import HEURISTIC
from anabranch.tuning.spec import from_text, to_text

_CALL = (
    "Tensor x, Tensor weight, Tensor counts, Tensor offsets, Tensor row_to_slot, Tensor slot_to_row, "
    "Tensor? bias, Tensor? scale, bool gather, bool scatter, str activation, bool transpose_weight, str? backend, "
    "str? config, str? d_x_config, str? d_weight_config"
)
_TENSORS = 8
"""How many of these are tensors; they come first."""
_ACTIVATION = 10
"""Where the epilogue's text is. Another class may be registered by its name."""
_IDENTITY = Identity().spec


def grouped_gemm(call: GroupedGemmCall) -> Tensor:
    """Runs a call through its operator."""
    refuse_forward_mode(OP, call.x, call.weight, call.bias, call.scale)
    args = _flatten(call)
    if call.out is not None:
        grouped_gemm_out(call.out, *args)
        return call.out
    keep_h = not isinstance(call.epilogue, Identity) and checks.needs_grad(
        call.x, call.weight, call.bias, call.scale
    )
    out, _ = run_forward(keep_h, *args)
    return out


def gradients(call: GroupedGemmCall, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The needed ones among the gradients of x, weight, bias and scale, without the forward."""
    args = _flatten(call)
    inputs = (call.x, call.weight, call.bias, call.scale)
    needs = [need and value is not None for need, value in zip(needs, inputs, strict=True)]
    h = call.x.new_empty(0)
    if not isinstance(call.epilogue, Identity):
        _, h = run_forward(True, *args)
    found = iter(run_backward(needs, grad, h, *args) if any(needs) else ())
    return [next(found) if need else None for need in needs]


def _flatten(call: GroupedGemmCall) -> tuple[Any, ...]:
    layout = call.layout
    return (
        call.x,
        call.weight,
        layout.counts,
        layout.offsets,
        layout.row_to_slot,
        layout.slot_to_row,
        call.bias,
        call.scale,
        call.gather,
        call.scatter,
        _IDENTITY if type(call.epilogue) is Identity else call.epilogue.spec,
        call.transpose_weight,
        call.backend,
        None if call.config is None else text_of(call.config),
        None if call.d_x_config is None else text_of(call.d_x_config),
        None if call.d_weight_config is None else text_of(call.d_weight_config),
    )


def text_of(config: GroupedGemmConfig | str | None) -> str | None:
    """A configuration as operators take it."""
    return to_text(config) if isinstance(config, GroupedGemmConfig) else config


@cache
def _config(text: str | None) -> GroupedGemmConfig | str | None:
    return text if text in (None, HEURISTIC) else from_text(GroupedGemmConfig, text)


def restore(*args: Any) -> GroupedGemmCall:
    """The call of which these are an operator's arguments."""
    x, weight, counts, offsets, row_to_slot, slot_to_row, bias, scale = args[:_TENSORS]
    gather, scatter, activation, transpose_weight, backend, *texts = args[_TENSORS:]
    layout = ExpertLayout(counts, offsets, row_to_slot, slot_to_row)
    config, d_x_config, d_weight_config = map(_config, texts)
    return frozen(
        GroupedGemmCall,
        x=x,
        weight=weight,
        layout=layout,
        gather=gather,
        scatter=scatter,
        bias=bias,
        scale=scale,
        epilogue=from_spec(activation),
        transpose_weight=transpose_weight,
        backend=backend,
        config=config,
        d_x_config=d_x_config,
        d_weight_config=d_weight_config,
    )


def _forward(keep_h: bool, *args: Any) -> tuple[Tensor, Tensor]:
    call = restore(*args)
    kernels = choose(OP, call).module
    out, h = _allocate(keep_h, call)
    with without_autocast(call.device):
        kernels.forward(call, out, h if keep_h else None)
    return out, h


def _allocate(keep_h: bool, call: GroupedGemmCall) -> tuple[Tensor, Tensor]:
    h_shape = (call.layout.num_rows, call.weight_nk.shape[1]) if keep_h else (0,)
    return call.x.new_empty(call.out_rows, call.out_columns), call.x.new_empty(h_shape)


def _out(out: Tensor, *args: Any) -> None:
    call = restore(*args)
    kernels = choose(OP, call).module
    no_overlap(OP, "out", out, x=call.x, weight=call.weight, bias=call.bias, scale=call.scale)
    with without_autocast(call.device):
        kernels.forward(call, out, None)


def _backward(needs: list[bool], grad: Tensor, h: Tensor, *args: Any) -> list[Tensor]:
    """The needed ones among the gradients of x, weight, bias and scale, in this order."""
    call = restore(*args)
    kernels = choose(OP, call).module
    with without_autocast(call.device):
        grads = kernels.backward(call, grad, h if h.dim() == 2 else None, needs)
    return [g for g in grads if g is not None]


def _backward_fake(needs: list[bool], grad: Tensor, h: Tensor, *args: Any) -> list[Tensor]:
    call = restore(*args)
    inputs = (call.x, call.weight, call.bias, call.scale)
    return [v.new_empty(v.shape) for v, need in zip(inputs, needs, strict=True) if need and v is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args = inputs[1:]
    ctx.save_for_backward(output[1], *args[:_TENSORS])
    ctx.flags = args[_TENSORS:]


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> list[Tensor | None]:
    grads: list[Tensor | None] = [None] * _TENSORS
    wanted = (0, 1, 6, 7)  # x, weight, bias, scale
    all_needs = ctx.needs_input_grad
    needs = [all_needs[i] for i in wanted]
    if grad is not None and any(needs):
        h, *tensors = ctx.saved_tensors
        if h.dim() != 2 and not isinstance(from_spec(ctx.flags[2]), Identity):
            # Under torch.func.vmap nobody could tell in the forward that a gradient would be needed.
            with torch.no_grad():
                _, h = run_forward(True, *tensors, *ctx.flags)
        found = iter(run_backward(needs, grad, h, *tensors, *ctx.flags))
        for i, need in zip(wanted, needs, strict=True):
            grads[i] = next(found) if need else None
    return grads


grouped_gemm_forward = define(
    "grouped_gemm",
    f"(bool keep_h, {_CALL}) -> (Tensor, Tensor)",
    _forward,
    fake=lambda keep_h, *args: _allocate(keep_h, restore(*args)),
    save=_save,
    differentiate=_differentiate,
    by=lambda keep_h, *args: type(from_spec(args[_ACTIVATION])),
)
grouped_gemm_out = define(
    "grouped_gemm_out", f"(Tensor(a!) out, {_CALL}) -> ()", _out, fake=lambda out, *args: None
)
grouped_gemm_backward = define(
    "grouped_gemm_backward",
    f"(bool[] needs, Tensor grad, Tensor h, {_CALL}) -> Tensor[]",
    _backward,
    fake=_backward_fake,
    differentiate=refuse_second_derivative(OP),
    by=lambda needs, grad, h, *args: type(from_spec(args[_ACTIVATION])),
)
run_forward, run_backward = direct(grouped_gemm_forward), direct(grouped_gemm_backward)
