"""The oracle of grouped_gemm: a loop over experts in plain, differentiable PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from anabranch.ops import checks
from anabranch.ops.grouped_gemm.call import OP, GroupedGemmCall


def grouped_gemm(call: GroupedGemmCall) -> Tensor:
    """The output, in the accumulator's precision until the one rounding at the end."""
    layout, epilogue = call.layout, call.epilogue
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    x, weight = call.x.to(wide), call.weight_nk.to(wide)
    assert layout.offsets is not None
    offsets = layout.offsets.tolist()
    out = x.new_zeros(call.out_rows, call.out_columns)
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
        rows = torch.arange(start, stop, device=x.device)
        slots = layout.row_to_slot[start:stop].long()
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        z = (x[slots // layout.top_k] if call.gather else x[rows]) @ weight[expert].T
        if call.bias is not None:
            z = z + call.bias[expert].to(wide)
        y = epilogue.forward(*z.chunk(epilogue.columns, dim=-1))
        if call.scale is not None:
            y = y * call.scale.reshape(-1, 1)[slots].to(wide)
        out = out.index_put((slots if call.scatter else rows,), y)
    out = out.to(call.dtype)
    if call.out is None:
        return out
    checks.no_overlap(OP, "out", call.out, x=call.x, weight=call.weight, bias=call.bias, scale=call.scale)
    return call.out.copy_(out)
