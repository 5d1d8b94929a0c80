"""moe_mlp in Triton: two grouped GEMMs and a combine; the backward is four more, and one pass over h between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch import tuning
from anabranch._backends.triton import device as on
from anabranch._backends.triton import explained, operand
from anabranch._backends.triton.combine import combine, power_of_2, prepare
from anabranch._backends.triton.explained import expert_rows, load_path
from anabranch._backends.triton.gather import gather_rows
from anabranch._backends.triton.prepared import REMEMBERED, Launch, launch
from anabranch._backends.triton.schedule import Schedule, of_layout
from anabranch.epilogues import Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.checks import needs_grad
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
from anabranch.ops.grouped_gemm.backends.triton.plan import GemmLaunch
from anabranch.ops.grouped_gemm.backends.triton.tuned import Gemm, chosen
from anabranch.ops.moe_mlp.backends.triton import kernels
from anabranch.ops.moe_mlp.call import MoeMlpCall


def supports(call: MoeMlpCall) -> str | None:
    """fp16, bf16 and fp32, and epilogues that have device code."""
    return refusal(call.dtype, call.epilogue)


class _Forward(NamedTuple):
    """The launches of a forward, and what the tuner stood by when their tiles were chosen."""

    standing: object
    tables: tuple[Schedule, ...]
    up: GemmLaunch
    down: GemmLaunch
    combine: Launch

    def run(
        self,
        call: MoeMlpCall,
        x: Tensor,
        maps: tuple[Tensor, Tensor, Tensor],
        a: Tensor,
        y: Tensor,
        out: Tensor,
        h: Tensor | None,
    ) -> None:
        """Launches them for tensors like those that they were prepared with."""
        tables = [schedule.of(maps[0]) for schedule in self.tables]
        self.up.run(x, call.gate_up_nk, maps, a, h, call.gate_up_bias, None, tables[0])
        self.down.run(a, call.down_nk, maps, y, None, call.down_bias, None, tables[-1])
        self.combine(y, maps[2], call.expert_weights if call.weight_on == "output" else None, out)


@lru_cache(REMEMBERED)
def _remembered(*facts: Any) -> list[_Forward]:
    """Where the launches of forwards that look alike are kept: none, or one."""
    return []


def forward(call: MoeMlpCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the pre-activation if ``h`` is given. Both, and the layout, are freshly allocated."""
    layout = call.layout
    assert layout is not None
    on_output = call.weight_on == "output"
    weights = call.expert_weights if on_output else None
    x = call.x if on_output else gather_rows(call.x, layout, call.expert_weights)
    a = x.new_empty(layout.num_rows, call.down_nk.shape[2])
    y = x.new_empty(layout.num_rows, x.shape[1])
    maps = contiguous_maps(layout)

    known, maybe, standing = operand.of, operand.maybe, tuning.standing(call.device)
    memory = _remembered(
        on.gpu(call.device), on.input_precision(call.dtype), known(call.x), known(call.gate_up), known(call.down),
        known(call.expert_weights), maybe(call.gate_up_bias), maybe(call.down_bias), h is None, call.epilogue,
        call.transpose_weight, call.gate_layout, call.weight_on,
    )  # fmt: skip
    for found in memory:
        if found.standing is standing:
            found.run(call, x, maps, a, y, out, h)
            return

    schedules: Schedules = {}
    up = gemm(
        x,
        call.gate_up_nk,
        layout,
        a,
        h=h,
        bias=call.gate_up_bias,
        epilogue=call.epilogue,
        interleaved=call.gate_layout == "interleaved",
        x_rows=TOKEN if on_output else ROW,
        schedules=schedules,
    )
    down = gemm(a, call.down_nk, layout, y, bias=call.down_bias, schedules=schedules)
    combine(y, layout.slot_to_row, weights, out)
    if standing is not None and up is not None and down is not None and out.numel():
        last = prepare(call.device, known(y), known(maps[2]), maybe(weights), known(out))
        tables = [of_layout(call.device, known(maps[0]), layout.num_rows, rows) for rows in schedules]
        memory[:] = [_Forward(standing, tuple(tables), up, down, last)]


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
    inputs = call.x, call.gate_up, call.down, call.expert_weights, call.gate_up_bias, call.down_bias

    def rows(columns: int) -> Tensor:
        return call.x.new_empty((layout.num_rows, columns), device="meta")

    hidden, inner = call.down_nk.shape[1:]
    a, h = rows(inner), rows(call.gate_up_nk.shape[1]) if needs_grad(*inputs) else None
    up = product(
        call.x if on_output else rows(hidden), call.gate_up_nk, layout, a, h, call.gate_up_bias, None, call.epilogue,
        call.gate_layout == "interleaved", TOKEN if on_output else ROW, ROW,
    )  # fmt: skip
    down = product(
        a, call.down_nk, layout, rows(hidden), None, call.down_bias, None, Identity(), False, ROW, ROW
    )
    return up, down


def backward(call: MoeMlpCall, grad: Tensor, h: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate_up, down, expert_weights and the biases; None for those not needed.

    The products read x's and the gradient's rows in expert order, gathered once, so that all their operands load
    through the tensor memory accelerator.
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
        d_weights = torch.zeros(call.expert_weights.shape, dtype=torch.float32, device=call.device)

    schedules: Schedules = {}
    d_rows = gather_rows(grad, layout)
    a = call.x.new_empty(layout.num_rows, call.down_nk.shape[2])
    if need_d_h or need_down or need_weights:
        # a holds the gradient of the activation first, and then, tile by tile, the weighted activation itself.
        gemm(d_rows, call.down_nk.mT, layout, a, schedules=schedules)
        d_h = torch.empty_like(h) if need_d_h else None
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
    if need_gate_up:
        assert d_h is not None
        d_gate_up = torch.empty_like(call.gate_up, memory_format=torch.contiguous_format)
        x = gather_rows(call.x, layout, None if on_output else call.expert_weights)
        weight_gradient(d_h, x, layout, _nk(call, d_gate_up), z_rows=ROW, x_rows=ROW)
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
        d_weights = d_weights.to(call.expert_weights.dtype)
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
