"""torch.library operators of moe_mlp: schema, fake kernel and gradient. One autograd node for the MLP.

The forward routes too, and returns the layout with its result, for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from anabranch.dispatch import choose
from anabranch.epilogues import from_spec
from anabranch.layout import ExpertLayout
from anabranch.ops.frozen import frozen
from anabranch.ops.moe_mlp.call import OP, MoeMlpCall
from anabranch.ops.operator import define, direct
from anabranch.ops.precision import without_autocast
from anabranch.ops.route import autograd as route
from anabranch.ops.second_order import refuse_forward_mode, refuse_second_derivative

_INPUTS = (
    "Tensor x, Tensor gate_up, Tensor down, Tensor expert_weights, Tensor? gate_up_bias, Tensor? down_bias"
)
_FLAGS = "str activation, bool transpose_weight, str gate_layout, str weight_on, str? backend"
_LAYOUT = "Tensor counts, Tensor offsets, Tensor row_to_slot, Tensor slot_to_row"
_INPUT_COUNT = 6
"""How many tensors can have a gradient; they come first."""
_TENSOR_COUNT = 10
"""How many there are with the layout's. The first flag follows: another class may be registered by that name."""


def moe_mlp(call: MoeMlpCall) -> Tensor:
    """Runs a call through its operator."""
    inputs = (
        call.x,
        call.gate_up,
        call.down,
        call.expert_weights,
        call.gate_up_bias,
        call.down_bias,
    )
    refuse_forward_mode(OP, *inputs)
    return run_forward(
        call.keeps_h,
        *inputs,
        call.expert_ids,
        call.epilogue.spec,
        call.transpose_weight,
        call.gate_layout,
        call.weight_on,
        call.backend,
    )[0]


def _restore(inputs: Sequence[Any], flags: Sequence[Any], **routing: Any) -> MoeMlpCall:
    x, gate_up, down, expert_weights, gate_up_bias, down_bias = inputs
    activation, transpose_weight, gate_layout, weight_on, backend = flags
    return frozen(
        MoeMlpCall,
        x=x,
        gate_up=gate_up,
        down=down,
        expert_weights=expert_weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        epilogue=from_spec(activation),
        transpose_weight=transpose_weight,
        gate_layout=gate_layout,
        weight_on=weight_on,
        backend=backend,
        **routing,
    )


def _allocate(
    keep_h: bool, x: Tensor, gate_up: Tensor, rows: int, transpose_weight: bool
) -> tuple[Tensor, Tensor]:
    h_shape = (rows, gate_up.shape[2 if transpose_weight else 1]) if keep_h else (0,)
    return x.new_empty(*x.shape), x.new_empty(*h_shape)


def _forward(keep_h: bool, *args: Any) -> tuple[Tensor, ...]:
    """The result, h if it is to be kept, and the fields of the layout."""
    *inputs, expert_ids = args[: _INPUT_COUNT + 1]
    call = _restore(inputs, args[_INPUT_COUNT + 1 :], expert_ids=expert_ids)
    kernels = choose(OP, call).module
    out, h = _allocate(keep_h, call.x, call.gate_up, expert_ids.numel(), call.transpose_weight)
    with without_autocast(call.device):
        fields = kernels.forward(call, out, h if keep_h else None, route.topk)
    return out, h, *fields


def _forward_fake(keep_h: bool, *args: Any) -> tuple[Tensor, ...]:
    x, gate_up, expert_ids, transpose_weight = args[0], args[1], args[_INPUT_COUNT], args[_INPUT_COUNT + 2]
    fields = route.topk_fake(expert_ids, gate_up.shape[0])
    return *_allocate(keep_h, x, gate_up, expert_ids.numel(), transpose_weight), *fields


def _backward(needs: list[bool], grad: Tensor, h: Tensor, *args: Any) -> list[Tensor]:
    """The needed ones among the gradients of the inputs, in their order. Of an h that was not kept it gets (0,)."""
    layout = ExpertLayout(*args[_INPUT_COUNT:_TENSOR_COUNT])
    call = _restore(args[:_INPUT_COUNT], args[_TENSOR_COUNT:], layout=layout)
    kernels = choose(OP, call).module
    with without_autocast(call.device):
        grads = kernels.backward(call, grad, h if h.dim() == 2 else None, needs)
    return [g for g in grads if g is not None]


def _backward_fake(needs: list[bool], grad: Tensor, h: Tensor, *args: Any) -> list[Tensor]:
    return [v.new_empty(v.shape) for v, need in zip(args[:_INPUT_COUNT], needs, strict=True) if need]


def _save(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    ctx.flags = args[_INPUT_COUNT + 2 :]
    # h is empty where the backward is to make it again: if asked for, and under torch.func.vmap, where nobody can
    # tell in the forward that a gradient will be needed.
    ctx.save_for_backward(*args[1 : _INPUT_COUNT + 1], *results[1:])


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> list[Tensor | None]:
    needs = list(ctx.needs_input_grad[:_INPUT_COUNT])
    grads: list[Tensor | None] = [None] * _INPUT_COUNT
    if grad is not None and any(needs):
        tensors = ctx.saved_tensors
        inputs, (h, *layout) = tensors[:_INPUT_COUNT], tensors[_INPUT_COUNT:]
        found = iter(run_backward(needs, grad, h, *inputs, *layout, *ctx.flags))
        grads = [next(found) if need else None for need in needs]
    return grads


moe_mlp_forward = define(
    "moe_mlp",
    f"(bool keep_h, {_INPUTS}, Tensor expert_ids, {_FLAGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
    by=lambda keep_h, *args: from_spec(args[_INPUT_COUNT + 1]),
)
moe_mlp_backward = define(
    "moe_mlp_backward",
    f"(bool[] needs, Tensor grad, Tensor h, {_INPUTS}, {_LAYOUT}, {_FLAGS}) -> Tensor[]",
    _backward,
    fake=_backward_fake,
    differentiate=refuse_second_derivative(OP),
    by=lambda needs, grad, h, *args: from_spec(args[_TENSOR_COUNT]),
)
run_forward, run_backward = direct(moe_mlp_forward), direct(moe_mlp_backward)
