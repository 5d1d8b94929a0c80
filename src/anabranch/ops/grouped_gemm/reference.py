"""The oracle of grouped_gemm: a loop over experts in plain, differentiable PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from anabranch.ops.grouped_gemm.call import OP, GroupedGemmCall
from anabranch.ops.overlap import no_overlap
from anabranch.ops.precision import wide


def grouped_gemm(call: GroupedGemmCall) -> Tensor:
    """The output, in the accumulator's precision until the one rounding at the end."""
    layout, epilogue = call.layout, call.epilogue
    acc = wide(call.dtype)
    x, weight = call.x.to(acc), call.weight_nk.to(acc)
    assert layout.offsets is not None
    offsets = layout.offsets.tolist()
    out = x.new_zeros(call.out_rows, call.out_columns)
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
        rows = torch.arange(start, stop, device=x.device)
        slots = layout.row_to_slot[start:stop].long()
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        z = (x[slots // layout.top_k] if call.gather else x[rows]) @ weight[expert].T
        if call.bias is not None:
            z = z + call.bias[expert].to(acc)
        y = epilogue.forward(*z.chunk(epilogue.columns, dim=-1))
        if call.scale is not None:
            y = y * call.scale.reshape(-1, 1)[slots].to(acc)
        out = out.index_put((slots if call.scatter else rows,), y)
    out = out.to(call.dtype)
    if call.out is None:
        return out
    no_overlap(OP, "out", call.out, x=call.x, weight=call.weight, bias=call.bias, scale=call.scale)
    return call.out.copy_(out)
