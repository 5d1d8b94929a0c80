"""grouped_gemm in plain PyTorch: one product per expert, on slices that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anabranch.epilogues import Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.call import GroupedGemmCall

Rows = slice | Tensor


def supports(call: GroupedGemmCall) -> str | None:
    """Everything."""
    return None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulator's dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def experts(layout: ExpertLayout) -> Iterator[tuple[int, Rows, Tensor]]:
    """(expert, its rows, their slots) of each expert that has rows; rows without a slot are left out."""
    assert layout.offsets is not None
    offsets, slots = layout.offsets.tolist(), layout.row_to_slot.long()
    holes = offsets[-1] > 0 and int(slots[: offsets[-1]].min()) < 0
    for expert, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        rows: Rows = slice(start, stop)
        mine = slots[rows]
        if holes:
            rows = torch.nonzero(mine >= 0)[:, 0] + start
            mine = slots[rows]
        if mine.numel():
            yield expert, rows, mine


def is_full(layout: ExpertLayout) -> bool:
    """Whether every row has a slot and every slot a row, so that nothing is left to zero."""
    full = layout.num_rows == layout.slot_to_row.numel()
    return full and bool((layout.row_to_slot >= 0).all()) and bool((layout.slot_to_row >= 0).all())


def forward(call: GroupedGemmCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the rounded pre-activation if ``h`` is given."""
    layout, epilogue = call.layout, call.epilogue
    acc = wide(call.dtype)
    if not is_full(layout):
        out.zero_()
        if h is not None:
            h.zero_()
    for expert, rows, slots in experts(layout):
        x = call.x[slots // layout.top_k] if call.gather else call.x[rows]
        z = _product(call, x, expert)
        if h is not None:
            h[rows] = z.to(h.dtype)
        if not isinstance(epilogue, Identity):
            z = epilogue.forward(*z.to(acc).chunk(epilogue.columns, dim=-1))
        if call.scale is not None:
            z = z.to(acc) * _scale(call, slots)
        out[slots if call.scatter else rows] = z.to(out.dtype)


def backward(
    call: GroupedGemmCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and scale; None for those not needed."""
    layout, acc = call.layout, wide(call.dtype)
    need_x, need_weight, need_bias, need_scale = needs
    x_rows = layout.slot_to_row.numel() if call.gather else layout.num_rows
    d_x = grad.new_zeros(x_rows, call.x.shape[1]) if need_x else None
    # Contiguous whatever the inputs' strides are, as the fake kernel says.
    d_weight = grad.new_zeros(call.weight.shape) if need_weight else None
    d_bias = grad.new_zeros(call.bias.shape, dtype=acc) if need_bias and call.bias is not None else None
    d_scale = grad.new_zeros(call.scale.shape, dtype=acc) if need_scale and call.scale is not None else None

    for expert, rows, slots in experts(layout):
        d_y = grad[slots if call.scatter else rows]
        d_z = _pre_activation_gradient(call, d_y, h, rows, slots, d_scale)
        x = None
        if need_weight or (d_scale is not None and h is None):
            x = call.x[slots // layout.top_k] if call.gather else call.x[rows]
        if d_scale is not None and h is None:
            assert x is not None
            y = _product(call, x, expert).to(acc)
            d_scale.view(-1)[slots] = (d_y.to(acc) * y).sum(-1)
        if d_x is not None:
            d_x[slots if call.gather else rows] = torch.mm(d_z, call.weight_nk[expert])
        if d_weight is not None:
            assert x is not None
            d_weight_nk = d_weight[expert].T if call.transpose_weight else d_weight[expert]
            d_weight_nk.copy_(torch.mm(d_z.T, x))
        if d_bias is not None:
            d_bias[expert] = d_z.to(acc).sum(0)

    if d_x is not None and call.gather:
        d_x = d_x.view(layout.num_tokens, layout.top_k, d_x.shape[1]).sum(1, dtype=acc).to(call.dtype)
    if d_bias is not None:
        d_bias = d_bias.to(call.dtype)
    if d_scale is not None and call.scale is not None:
        d_scale = d_scale.to(call.scale.dtype)
    return d_x, d_weight, d_bias, d_scale


def _product(call: GroupedGemmCall, x: Tensor, expert: int) -> Tensor:
    weight = call.weight_nk[expert].T
    # addmm adds the bias to the accumulator, before it is rounded.
    return torch.mm(x, weight) if call.bias is None else torch.addmm(call.bias[expert], x, weight)


def _scale(call: GroupedGemmCall, slots: Tensor) -> Tensor:
    assert call.scale is not None
    return call.scale.reshape(-1, 1)[slots].to(wide(call.dtype))


def _pre_activation_gradient(
    call: GroupedGemmCall, d_y: Tensor, h: Tensor | None, rows: Rows, slots: Tensor, d_scale: Tensor | None
) -> Tensor:
    """d_z of some rows, rounded; with an activation it also fills their ``d_scale`` as ``<d_y, a>``."""
    if call.scale is None and h is None:
        return d_y
    d_a = d_y.to(wide(call.dtype))
    z = () if h is None else h[rows].to(d_a.dtype).chunk(call.epilogue.columns, dim=-1)
    if d_scale is not None and h is not None:
        d_scale.view(-1)[slots] = (d_a * call.epilogue.forward(*z)).sum(-1)
    if call.scale is not None:
        d_a = d_a * _scale(call, slots)
    d_z = d_a if h is None else torch.cat(call.epilogue.backward(d_a, *z), dim=-1)
    return d_z.to(call.dtype)
