"""torch.library operators of moe_mlp: schema, fake kernel and gradient. One autograd node for the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anabranch.dispatch import choose
from anabranch.epilogues import from_spec
from anabranch.layout import ExpertLayout
from anabranch.ops import checks
from anabranch.ops.moe_mlp.call import OP, MoeMlpCall
from anabranch.ops.operator import define
from anabranch.ops.precision import without_autocast
from anabranch.ops.second_order import refuse_forward_mode, refuse_second_derivative

_CALL = (
    "Tensor x, Tensor gate_up, Tensor down, Tensor expert_weights, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor counts, Tensor offsets, Tensor row_to_slot, Tensor slot_to_row, "
    "str activation, bool transpose_weight, str gate_layout, str weight_on, str? backend"
)
_INPUTS = 6
"""How many of these can have a gradient; they come first."""
_TENSORS = 10
"""How many of these are tensors."""


def moe_mlp(call: MoeMlpCall) -> Tensor:
    """Routes a call and runs it through its operator."""
    assert call.expert_ids is not None
    layout = ExpertLayout.from_topk(call.expert_ids, call.gate_up.shape[0])
    inputs = (
        call.x,
        call.gate_up,
        call.down,
        call.expert_weights,
        call.gate_up_bias,
        call.down_bias,
    )
    refuse_forward_mode(OP, *inputs)
    out, _ = moe_mlp_forward(
        checks.needs_grad(*inputs),
        *inputs,
        layout.counts,
        layout.offsets,
        layout.row_to_slot,
        layout.slot_to_row,
        call.epilogue.spec,
        call.transpose_weight,
        call.gate_layout,
        call.weight_on,
        call.backend,
    )
    return out


def _restore(*args: Any) -> MoeMlpCall:
    x, gate_up, down, expert_weights, gate_up_bias, down_bias = args[:_INPUTS]
    activation, transpose_weight, gate_layout, weight_on, backend = args[_TENSORS:]
    layout = ExpertLayout(*args[_INPUTS:_TENSORS])
    return MoeMlpCall(
        x, gate_up, down, expert_weights, gate_up_bias, down_bias, from_spec(activation), transpose_weight,
        gate_layout, weight_on, backend, layout=layout,
    )  # fmt: skip


def _allocate(keep_h: bool, call: MoeMlpCall) -> tuple[Tensor, Tensor]:
    assert call.layout is not None
    h_shape = (call.layout.num_rows, call.gate_up_nk.shape[1]) if keep_h else (0,)
    return call.x.new_empty(call.x.shape), call.x.new_empty(h_shape)


def _forward(keep_h: bool, *args: Any) -> tuple[Tensor, Tensor]:
    call = _restore(*args)
    kernels = choose(OP, call).module
    out, h = _allocate(keep_h, call)
    with without_autocast(call.device):
        kernels.forward(call, out, h if keep_h else None)
    return out, h


def _backward(needs: list[bool], grad: Tensor, h: Tensor, *args: Any) -> list[Tensor]:
    """The needed ones among the gradients of the inputs, in their order."""
    call = _restore(*args)
    kernels = choose(OP, call).module
    with without_autocast(call.device):
        grads = kernels.backward(call, grad, h, needs)
    return [g for g in grads if g is not None]


def _backward_fake(needs: list[bool], grad: Tensor, h: Tensor, *args: Any) -> list[Tensor]:
    return [v.new_empty(v.shape) for v, need in zip(args[:_INPUTS], needs, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args = inputs[1:]
    ctx.save_for_backward(output[1], *args[:_TENSORS])
    ctx.flags = args[_TENSORS:]


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> list[Tensor | None]:
    needs = list(ctx.needs_input_grad[:_INPUTS])
    grads: list[Tensor | None] = [None] * _INPUTS
    if grad is not None and any(needs):
        h, *tensors = ctx.saved_tensors
        if h.dim() != 2:
            # Under torch.func.vmap nobody could tell in the forward that a gradient would be needed.
            with torch.no_grad():
                _, h = moe_mlp_forward(True, *tensors, *ctx.flags)
        found = iter(moe_mlp_backward(needs, grad, h, *tensors, *ctx.flags))
        grads = [next(found) if need else None for need in needs]
    return grads


moe_mlp_forward = define(
    "moe_mlp",
    f"(bool keep_h, {_CALL}) -> (Tensor, Tensor)",
    _forward,
    fake=lambda keep_h, *args: _allocate(keep_h, _restore(*args)),
    save=_save,
    differentiate=_differentiate,
)
moe_mlp_backward = define(
    "moe_mlp_backward",
    f"(bool[] needs, Tensor grad, Tensor h, {_CALL}) -> Tensor[]",
    _backward,
    fake=_backward_fake,
    differentiate=refuse_second_derivative(OP),
)
