"""grouped_gemm in Triton: persistent tiles over experts, gather on load, scatter on store, fused epilogue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch._backends.triton import explained
from anabranch._backends.triton.combine import combine
from anabranch._backends.triton.explained import expert_rows, load_path
from anabranch._backends.triton.fill import converted, zeros
from anabranch.epilogues import Identity
from anabranch.ops.checks import needs_grad
from anabranch.ops.grouped_gemm.backends.triton import launch
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, SLOT, TOKEN
from anabranch.ops.grouped_gemm.backends.triton.plan import kind_of
from anabranch.ops.grouped_gemm.backends.triton.tuned import Gemm, chosen, refusal
from anabranch.ops.grouped_gemm.call import GroupedGemmCall
from anabranch.ops.grouped_gemm.config import FORWARD, WEIGHT_GRADIENT, GroupedGemmConfig
from anabranch.tuning import HEURISTIC


def supports(call: GroupedGemmCall) -> str | None:
    """fp16, bf16 and fp32, epilogues that have device code, and tiles that fit."""
    return launch.refusal(call.dtype, call.epilogue) or _config_refusal(call)


def _config_refusal(call: GroupedGemmCall) -> str | None:
    kinds = kind_of(call.epilogue), FORWARD, WEIGHT_GRADIENT
    for config, kind in zip((call.config, call.d_x_config, call.d_weight_config), kinds, strict=True):
        if isinstance(config, GroupedGemmConfig):
            reason = refusal(config, call.dtype, call.device, kind)
            if reason is not None:
                return f"config: {reason}"
    return None


def forward(call: GroupedGemmCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the rounded pre-activation if ``h`` is given."""
    launch.gemm(
        call.x,
        call.weight_nk,
        call.layout,
        out,
        h=h,
        bias=call.bias,
        scale=call.scale,
        epilogue=call.epilogue,
        x_rows=TOKEN if call.gather else ROW,
        out_rows=SLOT if call.scatter else ROW,
        config=call.config,
    )


def loads(call: GroupedGemmCall) -> dict[str, str]:
    """How the forward loads and stores each operand."""
    plan = _forward_product(call).plan
    return {name: load_path(refusal) for name, refusal in plan.refusals.items()}


def padding(call: GroupedGemmCall) -> float | None:
    """Share of padding in the rows that the forward computes. Waits for the device."""
    assert call.layout.offsets is not None
    block_m = chosen(call.config, _forward_product(call), search=False).block_m
    return explained.padding([(expert_rows(call.layout.offsets, call.layout.num_rows), block_m)])


def _forward_product(call: GroupedGemmCall) -> Gemm:
    """What :func:`forward` would launch."""
    out, h = call.out, None
    if out is None:
        out = call.x.new_empty((call.out_rows, call.out_columns), device="meta")
    if needs_grad(call.x, call.weight, call.bias, call.scale) and not isinstance(call.epilogue, Identity):
        h = call.x.new_empty((call.layout.num_rows, call.weight_nk.shape[1]), device="meta")
    return launch.product(
        call.x, call.weight_nk, call.layout, out, h, call.bias, call.scale, call.epilogue, False,
        TOKEN if call.gather else ROW, SLOT if call.scatter else ROW,
    )  # fmt: skip


def backward(
    call: GroupedGemmCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and scale; None for those not needed."""
    layout = call.layout
    need_x, need_weight, need_bias, need_scale = needs
    d_x = d_weight = d_bias = d_scale = None
    d_z, z_rows = grad, SLOT if call.scatter else ROW
    if need_scale:
        assert call.scale is not None
        d_scale = zeros(call.scale.shape, torch.float32, call.device)
    if call.scale is not None or h is not None:
        if d_scale is not None and h is None:
            h = _pre_activation(call)
        d_z = call.x.new_empty(layout.num_rows, call.weight_nk.shape[1])
        launch.pre_activation_gradient(
            grad, h, call.scale, layout, call.epilogue, grad_rows=z_rows, d_z=d_z, d_scale=d_scale
        )
        z_rows = ROW
    if need_x:
        rows = call.x.new_empty(layout.num_rows, call.x.shape[1])
        launch.gemm(d_z, call.weight_nk.mT, layout, rows, x_rows=z_rows, out_rows=ROW, config=call.d_x_config)
        d_x = rows
        if call.gather:
            d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            combine(rows, layout.slot_to_row, None, d_x)
    if need_weight:
        d_weight = torch.empty_like(call.weight, memory_format=torch.contiguous_format)
        d_weight_nk = d_weight.mT if call.transpose_weight else d_weight
        x_rows = TOKEN if call.gather else ROW
        launch.weight_gradient(
            d_z,
            call.x,
            layout,
            d_weight_nk,
            z_rows=z_rows,
            x_rows=x_rows,
            # In rows without a slot a d_z of our own is zero, and so is what was gathered.
            holes=d_z is grad or not call.gather,
            config=call.d_weight_config,
        )
    if need_bias:
        assert call.bias is not None
        d_bias = torch.empty_like(call.bias, memory_format=torch.contiguous_format)
        launch.bias_gradient(d_z, layout, d_bias, z_rows=z_rows)
    if d_scale is not None:
        assert call.scale is not None
        d_scale = converted(d_scale, call.scale.dtype)
    return d_x, d_weight, d_bias, d_scale


def _pre_activation(call: GroupedGemmCall) -> Tensor:
    """The unscaled output, in row order: without an activation it was not kept."""
    h = call.x.new_empty(call.layout.num_rows, call.weight_nk.shape[1])
    x_rows = TOKEN if call.gather else ROW
    launch.gemm(
        call.x,
        call.weight_nk,
        call.layout,
        h,
        bias=call.bias,
        epilogue=Identity(),
        x_rows=x_rows,
        out_rows=ROW,
        config=None if call.config is None else HEURISTIC,
    )
    return h
