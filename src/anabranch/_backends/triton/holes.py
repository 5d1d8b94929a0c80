"""Rows without a slot amid an expert's, as a sort made elsewhere may leave them; a layout of top-k ids has none.

The tensor memory accelerator loads them with the others, so a sum over an expert's rows has to know of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import prepared


@triton.jit(do_not_specialize=["num_rows"])
def _mark_kernel(marks, offsets, row_to_slot, num_rows, BLOCK: tl.constexpr):
    """One expert's mark: 1 if some row of it has no slot, or else 0."""
    expert = tl.program_id(0)
    start = tl.maximum(tl.load(offsets + expert), 0).to(tl.int32)
    end = tl.minimum(tl.load(offsets + expert + 1), num_rows).to(tl.int32)
    found = tl.zeros([BLOCK], tl.int32)
    for r in range(start, end, BLOCK):
        o_r = r + tl.arange(0, BLOCK)
        found |= (tl.load(row_to_slot + o_r, mask=o_r < end, other=0) < 0).to(tl.int32)
    tl.store(marks + expert, tl.max(found, 0))


def mark(offsets: Tensor, row_to_slot: Tensor) -> Tensor:
    """(E,) int32: 1 for an expert that has rows without a slot, or else 0."""
    marks = torch.empty(offsets.shape[0] - 1, dtype=torch.int32, device=offsets.device)
    tensors = marks, offsets, row_to_slot
    prepared.launch(
        marks.device, _mark_kernel, marks.shape, tensors, row_to_slot.shape[0], BLOCK=4096, num_warps=8
    )
    return marks


@triton.jit
def any_marked(marks, num_experts):
    """Whether some expert is marked."""
    found = tl.zeros([256], tl.int32)
    for first in range(0, num_experts, 256):
        o_e = first + tl.arange(0, 256)
        found |= tl.load(marks + o_e, mask=o_e < num_experts, other=0)
    return tl.max(found, 0) > 0
