"""moe_mlp in Triton: two grouped GEMMs and a combine; the backward fuses the gate's gradient into the product before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton.combine import combine
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN
from anabranch.ops.grouped_gemm.backends.triton.launch import bias_gradient, gemm, refusal, weight_gradient
from anabranch.ops.moe_mlp.backends.triton import kernels
from anabranch.ops.moe_mlp.backends.triton.launch import activation_gradient, routing_weight_gradient
from anabranch.ops.moe_mlp.call import MoeMlpCall


def supports(call: MoeMlpCall) -> str | None:
    """fp16, bf16 and fp32, and epilogues that have device code."""
    return refusal(call.dtype, call.epilogue)


def forward(call: MoeMlpCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the pre-activation if ``h`` is given."""
    layout = call.layout
    assert layout is not None
    on_output = call.weight_on == "output"
    a = call.x.new_empty(layout.num_rows, call.down_nk.shape[2])
    gemm(
        call.x if on_output else _weighted_rows(call),
        call.gate_up_nk,
        layout,
        a,
        h=h,
        bias=call.gate_up_bias,
        epilogue=call.epilogue,
        interleaved=call.gate_layout == "interleaved",
        x_rows=TOKEN if on_output else ROW,
    )
    y = call.x.new_empty(layout.num_rows, call.x.shape[1])
    gemm(a, call.down_nk, layout, y, bias=call.down_bias)
    combine(y, layout.slot_to_row, call.expert_weights if on_output else None, out)


def backward(call: MoeMlpCall, grad: Tensor, h: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate_up, down, expert_weights and the biases; None for those not needed."""
    layout = call.layout
    assert layout is not None
    on_output = call.weight_on == "output"
    need_x, need_gate_up, need_down, need_weights, need_gate_up_bias, need_down_bias = needs
    need_rows = need_x or (need_weights and not on_output)
    need_d_h = need_rows or need_gate_up or need_gate_up_bias
    d_x = d_gate_up = d_down = d_weights = d_gate_up_bias = d_down_bias = None
    if need_weights:
        d_weights = torch.empty_like(call.expert_weights, memory_format=torch.contiguous_format)

    if need_d_h or need_down or need_weights:
        d_h, a, partial = activation_gradient(call, grad, h, need_d_h, need_down, need_weights and on_output)
        if partial is not None and d_weights is not None:
            routing_weight_gradient(call, grad, partial, d_weights)
    if need_rows:
        rows = call.x.new_empty(layout.num_rows, call.x.shape[1])
        gemm(d_h, call.gate_up_nk.mT, layout, rows)
        if d_weights is not None and not on_output:
            _input_weight_gradient(call, rows, d_weights)
        if need_x:
            d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            combine(rows, layout.slot_to_row, None if on_output else call.expert_weights, d_x)
    if need_gate_up:
        d_gate_up = torch.empty_like(call.gate_up, memory_format=torch.contiguous_format)
        x, x_rows = (call.x, TOKEN) if on_output else (_weighted_rows(call), ROW)
        weight_gradient(d_h, x, layout, _nk(call, d_gate_up), z_rows=ROW, x_rows=x_rows)
    if need_down:
        d_down = torch.empty_like(call.down, memory_format=torch.contiguous_format)
        weight_gradient(grad, a, layout, _nk(call, d_down), z_rows=TOKEN, x_rows=ROW)
    if need_gate_up_bias and call.gate_up_bias is not None:
        d_gate_up_bias = torch.empty_like(call.gate_up_bias, memory_format=torch.contiguous_format)
        bias_gradient(d_h, layout, d_gate_up_bias, z_rows=ROW)
    if need_down_bias and call.down_bias is not None:
        d_down_bias = torch.empty_like(call.down_bias, memory_format=torch.contiguous_format)
        bias_gradient(grad, layout, d_down_bias, z_rows=TOKEN, scale=call.expert_weights if on_output else None)
    return d_x, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def _nk(call: MoeMlpCall, d_weight: Tensor) -> Tensor:
    return d_weight.mT if call.transpose_weight else d_weight


def _weighted_rows(call: MoeMlpCall) -> Tensor:
    """The up-projection's operand where the weight is on the input: (R, H), ``weight * x[token]`` rounded."""
    layout = call.layout
    assert layout is not None
    hidden = call.x.shape[1]
    out = call.x.new_empty(layout.num_rows, hidden)
    if out.numel():
        block = min(1024, triton.next_power_of_2(hidden))
        with on.current(call.device):
            kernels.weighted_rows_kernel[(layout.num_rows, triton.cdiv(hidden, block))](
                call.x, call.expert_weights, layout.row_to_slot, out, layout.top_k, hidden, *call.x.stride(),
                *call.expert_weights.stride(), BLOCK_H=block, num_warps=4,
            )  # fmt: skip
    return out


def _input_weight_gradient(call: MoeMlpCall, d_rows: Tensor, d_weights: Tensor) -> None:
    layout = call.layout
    assert layout is not None
    hidden = call.x.shape[1]
    if d_weights.numel():
        with on.current(call.device):
            kernels.input_weight_gradient_kernel[(layout.num_rows,)](
                d_rows, call.x, layout.slot_to_row, d_weights, layout.top_k, hidden, *call.x.stride(),
                BLOCK_H=min(1024, triton.next_power_of_2(hidden)), num_warps=4,
            )  # fmt: skip
