"""moe_mlp in plain PyTorch: expert by expert, so that an expert's rows stay in cache from gather to scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.ops.grouped_gemm.backends.eager import experts, is_full, wide
from anabranch.ops.moe_mlp.call import MoeMlpCall

Gradients = tuple[Tensor | None, ...]


def supports(call: MoeMlpCall) -> str | None:
    """Everything."""
    return None


def forward(call: MoeMlpCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the pre-activation if ``h`` is given."""
    layout = call.layout
    assert layout is not None
    acc = wide(call.dtype)
    y = call.x.new_empty(layout.num_rows, call.x.shape[1])
    if not is_full(layout):
        y.zero_()
        if h is not None:
            h.zero_()
    for expert, rows, slots in experts(layout):
        x = _inputs(call, slots)
        z = torch.mm(x, call.gate_up_nk[expert].T)
        if call.gate_up_bias is not None:
            z = z.to(acc) + call.gate_up_bias[expert]
        if h is not None:
            h[rows] = z.to(h.dtype)
        a = call.epilogue.forward(*call.columns(z.to(acc))).to(call.dtype)
        y_expert = torch.mm(a, call.down_nk[expert].T)
        if call.down_bias is not None:
            y_expert = (y_expert.to(acc) + call.down_bias[expert]).to(call.dtype)
        y[slots] = y_expert
    out.copy_(_combine(call, y))


def backward(call: MoeMlpCall, grad: Tensor, h: Tensor, needs: Sequence[bool]) -> Gradients:
    """The gradients of x, gate_up, down, expert_weights and the biases; None for those not needed."""
    layout = call.layout
    assert layout is not None
    acc = wide(call.dtype)
    on_output = call.weight_on == "output"
    need_x, need_gate_up, need_down, need_weights, need_gate_up_bias, need_down_bias = needs
    below = need_x or need_gate_up or need_gate_up_bias or (need_weights and not on_output)
    d_x = grad.new_zeros(layout.num_rows, call.x.shape[1]) if need_x else None
    d_gate_up = torch.zeros_like(call.gate_up_nk, memory_format=torch.contiguous_format) if need_gate_up else None
    d_down = torch.zeros_like(call.down_nk, memory_format=torch.contiguous_format) if need_down else None
    d_weights = torch.zeros_like(call.expert_weights, dtype=acc, memory_format=torch.contiguous_format)
    d_gate_up_bias = torch.zeros_like(call.gate_up_bias) if need_gate_up_bias and call.gate_up_bias is not None else None
    d_down_bias = torch.zeros_like(call.down_bias) if need_down_bias and call.down_bias is not None else None
    weights = call.expert_weights.reshape(-1, 1)

    for expert, rows, slots in experts(layout):
        weight = weights[slots].to(acc)
        d_out = grad[slots // layout.top_k]
        z = call.columns(h[rows].to(acc))
        d_a = torch.mm(d_out, call.down_nk[expert]).to(acc)
        a = call.epilogue.forward(*z)
        if on_output and need_weights:
            dot = (d_a * a).sum(-1)
            if call.down_bias is not None:
                dot += (d_out.to(acc) * call.down_bias[expert]).sum(-1)
            d_weights.view(-1)[slots] = dot
        if d_down is not None:
            d_down[expert] = torch.mm(d_out.T, (a * weight if on_output else a).to(call.dtype))
        if d_down_bias is not None:
            d_down_bias[expert] = (d_out * weight if on_output else d_out).sum(0, dtype=acc)
        if not below:
            continue
        d_h = torch.empty_like(h[rows])
        for column, value in zip(
            call.columns(d_h), call.epilogue.backward(d_a * weight if on_output else d_a, *z), strict=True
        ):
            column.copy_(value)
        if d_gate_up is not None:
            d_gate_up[expert] = torch.mm(d_h.T, _inputs(call, slots))
        if d_gate_up_bias is not None:
            d_gate_up_bias[expert] = d_h.sum(0, dtype=acc)
        if on_output:
            if d_x is not None:
                d_x[slots] = torch.mm(d_h, call.gate_up_nk[expert])
        elif need_x or need_weights:
            d_rows = torch.mm(d_h, call.gate_up_nk[expert])
            if need_weights:
                d_weights.view(-1)[slots] = (d_rows.to(acc) * call.x[slots // layout.top_k]).sum(-1)
            if d_x is not None:
                d_x[slots] = (d_rows.to(acc) * weight).to(call.dtype)

    return (
        None if d_x is None else d_x.view(*layout.slot_to_row.shape, -1).sum(1, dtype=acc).to(call.dtype),
        _stored(call, d_gate_up),
        _stored(call, d_down),
        d_weights.to(call.expert_weights.dtype) if need_weights else None,
        d_gate_up_bias,
        d_down_bias,
    )


def _stored(call: MoeMlpCall, d_weight: Tensor | None) -> Tensor | None:
    return d_weight.mT.contiguous() if d_weight is not None and call.transpose_weight else d_weight


def _inputs(call: MoeMlpCall, slots: Tensor) -> Tensor:
    """The up-projection's operand for some slots."""
    x = call.x[slots // call.expert_weights.shape[1]]
    if call.weight_on == "output":
        return x
    acc = wide(call.dtype)
    return (x.to(acc) * call.expert_weights.reshape(-1, 1)[slots].to(acc)).to(call.dtype)


def _combine(call: MoeMlpCall, y: Tensor) -> Tensor:
    """The sum over K in fp32, in slot order."""
    assert call.layout is not None
    kept = call.layout.slot_to_row >= 0
    acc = wide(call.dtype)
    y = y.view(*kept.shape, -1)
    if call.weight_on == "input":
        return y.sum(1, dtype=acc)
    total = torch.zeros_like(call.x, dtype=acc, memory_format=torch.contiguous_format)
    for k in range(kept.shape[1]):
        weight = torch.where(kept[:, k], call.expert_weights[:, k].to(acc), 0)
        total.addcmul_(y[:, k].to(acc), weight[:, None])
    return total
