"""grouped_gemm on Hopper, in Gluon: warp-specialised products that gather on load, with a fused epilogue.

Rows leave in tiles, so the product of a scatter is plain Triton's, which stores row by row; its gradients are ours.

What it refuses, plain Triton serves. Both share the passes that are bound by memory: gather, combine, gradients of the
pre-activation and of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anabranch._backends.hopper import serves
from anabranch.epilogues import Identity
from anabranch.ops.checks import needs_grad
from anabranch.ops.grouped_gemm.call import NO_TILES, GroupedGemmCall

if TYPE_CHECKING:
    from anabranch.ops.grouped_gemm.backends.hopper.launch import Rows

BY_COPIES = "asynchronous copies, as its rows are gathered"
FROM_A_COPY = "TMA, from a copy in expert order"


def supports(call: GroupedGemmCall) -> str | None:
    """fp16 and bf16, epilogues that have device code, and operands that tiles can be loaded of."""
    if (call.config, call.d_x_config, call.d_weight_config) != (None, None, None):
        return NO_TILES
    reason = serves.refusal(call.backend, call.dtype, call.layout.num_rows, call.weight.shape[0])
    if reason is not None:
        return reason
    if call.scale is not None:
        return "it has no place for a scale of its rows"
    from anabranch._backends.triton import device, operand
    from anabranch.ops.grouped_gemm.backends.hopper import launch, plan

    x = None if call.gather else operand.of(call.x)
    weight, maps = operand.of(call.weight_nk), launch.maps_of(call.layout)
    return plan.refusal(device.capability(call.device), call.epilogue, x, weight, maps)


def loads(call: GroupedGemmCall) -> dict[str, str]:
    """How the forward loads and stores each operand."""
    from anabranch.ops.grouped_gemm.backends import triton
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    if call.scatter:
        return triton.loads(call)
    found = dict.fromkeys(("x", "weight", "out"), "TMA")
    if call.gather:
        found["x"] = BY_COPIES if launch.gatherable(call.x) else FROM_A_COPY
    if call.out is not None and not launch.tiled(call.out):
        found["out"] = "TMA, to be copied from there"
    if needs_grad(call.x, call.weight, call.bias) and not isinstance(call.epilogue, Identity):
        found["h"] = "TMA"
    return found


def padding(call: GroupedGemmCall) -> float | None:
    """Share of padding in the rows that the forward computes untuned. Waits for the device."""
    from anabranch._backends.triton.explained import expert_rows
    from anabranch._backends.triton.explained import padding as share
    from anabranch.ops.grouped_gemm.backends import triton
    from anabranch.ops.grouped_gemm.backends.hopper import config as tiles

    if call.scatter:
        return triton.padding(call)
    layout = call.layout
    assert layout.offsets is not None
    experts, n, _ = call.weight_nk.shape
    config = tiles.heuristic(n, layout.num_rows // experts)
    return share([(expert_rows(layout.offsets, layout.num_rows), tiles.filled(config))])


def forward(call: GroupedGemmCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the rounded pre-activation if ``h`` is given."""
    from anabranch.ops.grouped_gemm.backends import triton
    from anabranch.ops.grouped_gemm.backends.hopper import launch, unused

    if call.scatter:
        # Tiles in expert order and a pass that takes their rows to the slots would take longer.
        triton.forward(call, out, h)
        return
    rows = launch.rows_of(call.layout)
    x, gathered = _inputs(call)
    # In expert order, and of strides that the accelerator can store by.
    target = out if launch.tiled(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    launch.gemm(
        x, call.weight_nk, rows, target, h=h, bias=call.bias, epilogue=call.epilogue, gathered=gathered
    )
    unused.clear(target, rows.offsets, rows.row_to_slot)
    if target is not out:
        out.copy_(target)


def _inputs(call: GroupedGemmCall, width: int = 1) -> tuple[Tensor, bool]:
    """x as a kernel reads it, and whether the kernel gathers it, in tiles of so many columns."""
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    return launch.inputs(call.x, call.layout, width) if call.gather else (call.x, False)


def backward(
    call: GroupedGemmCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and scale, of which there is none; None for those not needed."""
    from anabranch.ops.grouped_gemm.backends.hopper import launch
    from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, SLOT, TOKEN
    from anabranch.ops.grouped_gemm.backends.triton.launch import (
        bias_gradient,
        pre_activation_gradient,
        without_holes,
    )

    need_x, need_weight, need_bias, _ = needs
    d_x = d_weight = d_bias = None
    own = h is not None or call.scatter
    if own:
        d_z = grad.new_empty(call.layout.num_rows, call.weight_nk.shape[1])
        pre_activation_gradient(
            grad, h, None, call.layout, call.epilogue, grad_rows=SLOT if call.scatter else ROW, d_z=d_z
        )
    else:
        # One that was expanded, as by sum, or starts anywhere cannot be loaded in tiles.
        d_z = grad if launch.tiled(grad) else grad.clone(memory_format=torch.contiguous_format)
    rows = launch.rows_of(call.layout)
    if need_x:
        d_x = _d_x(call, d_z, rows)
    if need_weight:
        d_weight = torch.empty_like(call.weight, memory_format=torch.contiguous_format)
        x, gathered = _inputs(call, launch.GATHERED_COLUMNS)
        a, b = (x, d_z) if call.transpose_weight else (d_z, x)
        launch.weight_gradient(
            a, b, rows, d_weight, a_gathered=gathered and a is x, b_gathered=gathered and b is x
        )
        # In rows without a slot a d_z of our own is zero, and so is what was gathered.
        if not own or not call.gather:
            d_weight_nk = d_weight.mT if call.transpose_weight else d_weight
            x_rows = TOKEN if call.gather else ROW
            without_holes(d_z, call.x, call.layout, d_weight_nk, z_rows=ROW, x_rows=x_rows)
    if need_bias:
        assert call.bias is not None
        d_bias = torch.empty_like(call.bias, memory_format=torch.contiguous_format)
        bias_gradient(d_z, call.layout, d_bias, z_rows=ROW)
    return d_x, d_weight, d_bias, None


def _d_x(call: GroupedGemmCall, d_z: Tensor, rows: Rows) -> Tensor:
    """The gradient of x: a row's own, or with a gather the sum over a token's rows."""
    from anabranch._backends.triton.combine import combine
    from anabranch.ops.grouped_gemm.backends.hopper import launch, unused

    d_rows = call.x.new_empty(call.layout.num_rows, call.x.shape[1])
    launch.gemm(d_z, call.weight_nk.mT, rows, d_rows)
    if not call.gather:
        unused.clear(d_rows, rows.offsets, rows.row_to_slot)
        return d_rows
    d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    combine(d_rows, call.layout.slot_to_row, None, d_x)
    return d_x
