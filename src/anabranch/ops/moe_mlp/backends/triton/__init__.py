"""moe_mlp in Triton: two grouped GEMMs and a combine; the backward is four more, and one pass over h between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch._backends.triton import explained
from anabranch._backends.triton.combine import combine, power_of_2
from anabranch._backends.triton.explained import expert_rows, load_path
from anabranch._backends.triton.fill import converted, zeros
from anabranch._backends.triton.gather import gather_rows
from anabranch._backends.triton.prepared import launch
from anabranch.epilogues import Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN
from anabranch.ops.grouped_gemm.backends.triton.launch import (
    Schedules,
    bias_gradient,
    contiguous_maps,
    gemm,
    pre_activation_gradient,
    product,
    refusal,
    weight_gradient,
)
from anabranch.ops.grouped_gemm.backends.triton.tuned import Gemm, chosen
from anabranch.ops.moe_mlp.backends.triton import kernels
from anabranch.ops.moe_mlp.call import MoeMlpCall
from anabranch.ops.route.call import Fields, Routing


def supports(call: MoeMlpCall) -> str | None:
    """fp16, bf16 and fp32, and epilogues that have device code."""
    return refusal(call.dtype, call.epilogue)


def forward(call: MoeMlpCall, out: Tensor, h: Tensor | None, routing: Routing) -> Fields:
    """Routes, and writes the output, and the pre-activation if ``h`` is given. Returns the fields of the layout."""
    assert call.expert_ids is not None
    fields = routing(call.expert_ids, call.down.shape[0])
    call = call.routed(fields)
    layout = call.layout
    assert layout is not None
    x = _up_operand(call)
    a = x.new_empty(layout.num_rows, call.down_nk.shape[2])
    y = x.new_empty(layout.num_rows, x.shape[1])
    schedules: Schedules = {}
    _up(call, x, a, h, schedules)
    gemm(a, call.down_nk, layout, y, bias=call.down_bias, schedules=schedules)
    combine(y, layout.slot_to_row, call.expert_weights if call.weight_on == "output" else None, out)
    return fields


def _up_operand(call: MoeMlpCall) -> Tensor:
    """x as the up-projection reads it: as it is, or in expert order, weighted."""
    assert call.layout is not None
    return call.x if call.weight_on == "output" else gather_rows(call.x, call.layout, call.expert_weights)


def _up(call: MoeMlpCall, x: Tensor, a: Tensor, h: Tensor | None, schedules: Schedules) -> None:
    """Writes the activation, and the pre-activation if ``h`` is given."""
    assert call.layout is not None
    gemm(
        x,
        call.gate_up_nk,
        call.layout,
        a,
        h=h,
        bias=call.gate_up_bias,
        epilogue=call.epilogue,
        interleaved=call.gate_layout == "interleaved",
        x_rows=TOKEN if call.weight_on == "output" else ROW,
        schedules=schedules,
    )


def loads(call: MoeMlpCall) -> dict[str, str]:
    """How the two products of the forward load and store each operand."""
    up, down = (what.plan.refusals for what in _forward_products(call, routed(call)))
    named = {"x": up["x"], "gate_up": up["weight"], "h": up.get("h"), "a": up["out"], "down": down["weight"]}
    if "h" not in up:
        del named["h"]
    return {name: load_path(refusal) for name, refusal in named.items()}


def padding(call: MoeMlpCall) -> float | None:
    """Share of padding in the rows that the two products of the forward compute. Waits for the device."""
    layout = routed(call)
    assert layout.offsets is not None
    rows = expert_rows(layout.offsets, layout.num_rows)
    products = _forward_products(call, layout)
    return explained.padding((rows, chosen(None, what, search=False).block_m) for what in products)


def routed(call: MoeMlpCall) -> ExpertLayout:
    """The layout of a call, which has none before an operator runs it."""
    if call.layout is not None:
        return call.layout
    assert call.expert_ids is not None
    return ExpertLayout.from_topk(call.expert_ids, call.down.shape[0])


def _forward_products(call: MoeMlpCall, layout: ExpertLayout) -> tuple[Gemm, Gemm]:
    """What :func:`forward` would launch, of a call that need not have been routed."""
    on_output = call.weight_on == "output"

    def rows(columns: int) -> Tensor:
        return call.x.new_empty((layout.num_rows, columns), device="meta")

    hidden, inner = call.down_nk.shape[1:]
    a, h = rows(inner), rows(call.gate_up_nk.shape[1]) if call.keeps_h else None
    up = product(
        call.x if on_output else rows(hidden), call.gate_up_nk, layout, a, h, call.gate_up_bias, None, call.epilogue,
        call.gate_layout == "interleaved", TOKEN if on_output else ROW, ROW,
    )  # fmt: skip
    down = product(
        a, call.down_nk, layout, rows(hidden), None, call.down_bias, None, Identity(), False, ROW, ROW
    )
    return up, down


def backward(
    call: MoeMlpCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate_up, down, expert_weights and the biases; None for those not needed.

    Without h the up-projection is launched again, as the forward would to keep h: the same bits. The other products
    read x's and the gradient's rows in expert order, gathered once, so that all their operands load through the
    tensor memory accelerator.
    """
    layout = call.layout
    assert layout is not None
    on_output = call.weight_on == "output"
    scale = call.expert_weights if on_output else None
    need_x, need_gate_up, need_down, need_weights, need_gate_up_bias, need_down_bias = needs
    need_rows = need_x or (need_weights and not on_output)
    need_d_h = need_rows or need_gate_up or need_gate_up_bias
    d_x = d_gate_up = d_down = d_gate_up_bias = d_down_bias = d_weights = d_h = None
    if need_weights:
        d_weights = zeros(call.expert_weights.shape, torch.float32, call.device)

    schedules: Schedules = {}
    d_rows = gather_rows(grad, layout)
    a = call.x.new_empty(layout.num_rows, call.down_nk.shape[2])
    if need_d_h or need_down or need_weights:
        if h is None:
            # Nobody else sees this one, so its gradient may take its place.
            h = call.x.new_empty(layout.num_rows, call.gate_up_nk.shape[1])
            _up(call, _up_operand(call), a, h, schedules)
            d_h = h if need_d_h else None
        elif need_d_h:
            d_h = torch.empty_like(h)
        # a holds the gradient of the activation first, and then, tile by tile, the weighted activation itself.
        gemm(d_rows, call.down_nk.mT, layout, a, schedules=schedules)
        pre_activation_gradient(
            a,
            h,
            scale,
            layout,
            call.epilogue,
            grad_rows=ROW,
            interleaved=call.gate_layout == "interleaved",
            d_z=d_h,
            a_out=a if need_down else None,
            d_scale=d_weights if on_output else None,
        )
    if need_rows:
        assert d_h is not None
        rows = call.x.new_empty(layout.num_rows, call.x.shape[1])
        gemm(d_h, call.gate_up_nk.mT, layout, rows, schedules=schedules)
        if d_weights is not None and not on_output:
            row_dot(call, rows, call.x, d_weights, by_expert=False)
        if need_x:
            d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            combine(rows, layout.slot_to_row, None if on_output else call.expert_weights, d_x)
        del rows
    if need_gate_up:
        assert d_h is not None
        d_gate_up = torch.empty_like(call.gate_up, memory_format=torch.contiguous_format)
        x = gather_rows(call.x, layout, None if on_output else call.expert_weights)
        weight_gradient(d_h, x, layout, _nk(call, d_gate_up), z_rows=ROW, x_rows=ROW)
        del x
    if need_down:
        d_down = torch.empty_like(call.down, memory_format=torch.contiguous_format)
        weight_gradient(d_rows, a, layout, _nk(call, d_down), z_rows=ROW, x_rows=ROW)
    if need_gate_up_bias and call.gate_up_bias is not None:
        assert d_h is not None
        d_gate_up_bias = torch.empty_like(call.gate_up_bias, memory_format=torch.contiguous_format)
        bias_gradient(d_h, layout, d_gate_up_bias, z_rows=ROW)
    if call.down_bias is not None:
        if need_down_bias:
            d_down_bias = torch.empty_like(call.down_bias, memory_format=torch.contiguous_format)
            bias_gradient(d_rows, layout, d_down_bias, z_rows=ROW, scale=scale)
        if d_weights is not None and on_output:
            row_dot(call, d_rows, call.down_bias, d_weights, by_expert=True)
    if d_weights is not None:
        d_weights = converted(d_weights, call.expert_weights.dtype)
    return d_x, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def _nk(call: MoeMlpCall, d_weight: Tensor) -> Tensor:
    return d_weight.mT if call.transpose_weight else d_weight


def row_dot(call: MoeMlpCall, rows: Tensor, x: Tensor, d_weights: Tensor, *, by_expert: bool) -> None:
    """Each row's dot with its token of x, or added to what is there, with its expert's vector."""
    layout = call.layout
    assert layout is not None
    hidden, num_experts = rows.shape[1], call.down.shape[0]
    if rows.numel():
        offsets, row_to_slot, _ = contiguous_maps(layout)
        launch(
            call.device, kernels.row_dot_kernel, (layout.num_rows,), (rows, x, row_to_slot, offsets, d_weights),
            d_weights.numel(), layout.top_k, hidden, num_experts, *x.stride(),
            BY_EXPERT=by_expert, ADD=by_expert, EXPERTS=power_of_2(num_experts),
            BLOCK_H=min(1024, power_of_2(hidden)), num_warps=4,
        )  # fmt: skip
