"""moe_mlp on Hopper, in Gluon: warp-specialised products with all that surrounds them in their epilogues.

What it refuses, plain Triton serves. Both share the passes that are bound by memory: gather, combine, biases. The
products are grouped_gemm's; the gate's gradient is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch._backends.hopper import serves
from anabranch.ops.grouped_gemm.backends.hopper import BY_COPIES, FROM_A_COPY
from anabranch.ops.moe_mlp.call import MoeMlpCall
from anabranch.ops.route.call import Fields, Routing


def supports(call: MoeMlpCall) -> str | None:
    """fp16 and bf16, epilogues that have device code, and operands that tiles can be loaded of."""
    rows, experts = call.expert_weights.numel(), call.down.shape[0]
    reason = serves.refusal(call.backend, call.dtype, rows, experts)
    if reason is not None:
        return reason
    from anabranch._backends.triton import device, operand
    from anabranch.ops.moe_mlp.backends.hopper import launch

    gate_up, down = operand.of(call.gate_up_nk), operand.of(call.down_nk)
    return launch.refusal(device.capability(call.device), call.epilogue, call.x.shape[1], gate_up, down)


def loads(call: MoeMlpCall) -> dict[str, str]:
    """How the two products of the forward load and store each operand."""
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    gathered = call.weight_on == "output" and launch.gatherable(call.x)
    found = dict.fromkeys(("x", "gate_up", "a", "down"), "TMA")
    found["x"] = BY_COPIES if gathered else FROM_A_COPY
    if call.keeps_h:
        found["h"] = "TMA"
    return found


def padding(call: MoeMlpCall) -> float | None:
    """Share of padding in the rows that the forward computes untuned. Waits for the device."""
    from anabranch._backends.triton.explained import expert_rows
    from anabranch._backends.triton.explained import padding as share
    from anabranch.ops.grouped_gemm.backends.hopper import config as tiles
    from anabranch.ops.moe_mlp.backends.triton import routed

    layout = routed(call)
    assert layout.offsets is not None
    experts, n, _ = call.gate_up_nk.shape
    config = tiles.heuristic(n, layout.num_rows // experts)
    return share([(expert_rows(layout.offsets, layout.num_rows), tiles.filled(config))])


def forward(call: MoeMlpCall, out: Tensor, h: Tensor | None, routing: Routing) -> Fields:
    """Routes, and writes the output, and the pre-activation if ``h`` is given. Returns the fields of the layout."""
    from anabranch._backends.triton.combine import combine
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    assert call.expert_ids is not None
    fields = routing(call.expert_ids, call.down.shape[0])
    call = call.routed(fields)
    layout = call.layout
    assert layout is not None
    rows = launch.rows_of(layout)
    x, gathered = _inputs(call)
    a = call.x.new_empty(layout.num_rows, call.down_nk.shape[2])
    launch.gemm(
        x,
        call.gate_up_nk,
        rows,
        a,
        h=h,
        bias=call.gate_up_bias,
        epilogue=call.epilogue,
        interleaved=call.gate_layout == "interleaved",
        gathered=gathered,
    )
    y = call.x.new_empty(layout.num_rows, call.x.shape[1])
    launch.gemm(a, call.down_nk, rows, y, bias=call.down_bias)
    combine(y, layout.slot_to_row, call.expert_weights if call.weight_on == "output" else None, out)
    return fields


def _inputs(call: MoeMlpCall, width: int = 1) -> tuple[Tensor, bool]:
    """x as a kernel reads it, and whether the kernel gathers it, in tiles of so many columns."""
    from anabranch._backends.triton.gather import gather_rows
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    assert call.layout is not None
    if call.weight_on == "output":
        return launch.inputs(call.x, call.layout, width)
    return gather_rows(call.x, call.layout, call.expert_weights), False


def backward(
    call: MoeMlpCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate_up, down, expert_weights and the biases; None for those not needed.

    Without h the up-projection is computed again, to the bits that the forward would have kept.
    """
    from anabranch._backends.triton.combine import combine
    from anabranch._backends.triton.fill import converted, zero
    from anabranch._backends.triton.gather import gather_rows
    from anabranch.ops.grouped_gemm.backends.hopper import launch
    from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW
    from anabranch.ops.grouped_gemm.backends.triton.launch import bias_gradient
    from anabranch.ops.moe_mlp.backends.hopper.launch import pre_activation_gradient
    from anabranch.ops.moe_mlp.backends.triton import row_dot

    layout = call.layout
    assert layout is not None
    on_output = call.weight_on == "output"
    scale = call.expert_weights if on_output else None
    need_x, need_gate_up, need_down, need_weights, need_gate_up_bias, need_down_bias = needs
    need_rows = need_x or (need_weights and not on_output)
    need_d_h = need_rows or need_gate_up or need_gate_up_bias
    d_x = d_gate_up = d_down = d_gate_up_bias = d_down_bias = d_weights = d_h = a = None
    if need_weights:
        # The gate's gradient fills it; the weights of an input are told slot by slot, and dropped ones are not.
        d_weights = torch.empty(call.expert_weights.shape, dtype=torch.float32, device=call.device)
        if not on_output:
            zero(d_weights)

    rows = launch.rows_of(layout)
    # The bias's gradient, and its share of the weights', read rows in order.
    if call.down_bias is not None and (need_down_bias or (need_weights and on_output)):
        d_y, by_token = gather_rows(grad, layout), False
    else:
        d_y, by_token = launch.inputs(grad, layout, launch.GATHERED_COLUMNS)
    if need_d_h or need_down or (need_weights and on_output):
        a = call.x.new_empty(layout.num_rows, call.down_nk.shape[2]) if need_down else None
        if h is None:
            # Nobody else sees this one, so its gradient may take its place.
            h = call.x.new_empty(layout.num_rows, call.gate_up_nk.shape[1])
            x, gathered = _inputs(call)
            launch.gemm(x, call.gate_up_nk, rows, h, bias=call.gate_up_bias, gathered=gathered)
            del x
            d_h = h if need_d_h else None
        elif need_d_h:
            d_h = torch.empty_like(h)
        pre_activation_gradient(
            d_y,
            call.down_nk.mT,
            h,
            scale,
            rows,
            call.epilogue,
            interleaved=call.gate_layout == "interleaved",
            d_h=d_h,
            a_out=a,
            d_scale=d_weights if on_output else None,
            gathered=by_token,
        )
    if need_down:
        assert a is not None
        d_down = torch.empty_like(call.down, memory_format=torch.contiguous_format)
        launch.weight_gradient(
            *_roles(call, d_y, a),
            rows,
            d_down,
            a_gathered=by_token and not call.transpose_weight,
            b_gathered=by_token and call.transpose_weight,
        )
        del a
    if call.down_bias is not None:
        if need_down_bias:
            d_down_bias = torch.empty_like(call.down_bias, memory_format=torch.contiguous_format)
            bias_gradient(d_y, layout, d_down_bias, z_rows=ROW, scale=scale)
        if d_weights is not None and on_output:
            row_dot(call, d_y, call.down_bias, d_weights, by_expert=True)
    del d_y
    if need_rows:
        assert d_h is not None
        x_rows = call.x.new_empty(layout.num_rows, call.x.shape[1])
        launch.gemm(d_h, call.gate_up_nk.mT, rows, x_rows)
        if d_weights is not None and not on_output:
            row_dot(call, x_rows, call.x, d_weights, by_expert=False)
        if need_x:
            d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            combine(x_rows, layout.slot_to_row, None if on_output else call.expert_weights, d_x)
        del x_rows
    if need_gate_up:
        assert d_h is not None
        d_gate_up = torch.empty_like(call.gate_up, memory_format=torch.contiguous_format)
        x, gathered = _inputs(call, launch.GATHERED_COLUMNS)
        launch.weight_gradient(
            *_roles(call, d_h, x),
            rows,
            d_gate_up,
            a_gathered=gathered and call.transpose_weight,
            b_gathered=gathered and not call.transpose_weight,
        )
    if need_gate_up_bias and call.gate_up_bias is not None:
        assert d_h is not None
        d_gate_up_bias = torch.empty_like(call.gate_up_bias, memory_format=torch.contiguous_format)
        bias_gradient(d_h, layout, d_gate_up_bias, z_rows=ROW)
    if d_weights is not None:
        d_weights = converted(d_weights, call.expert_weights.dtype)
    return d_x, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def _roles(call: MoeMlpCall, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of a weight's gradient, which lies as the weight does."""
    return (inputs, outputs) if call.transpose_weight else (outputs, inputs)
