"""The oracle of permute and unpermute: one slot after the other in plain, differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.permute.call import PermuteCall, UnpermuteCall
from anabranch.ops.precision import wide


def permute(call: PermuteCall) -> Tensor:
    """Each row that has a slot, from that slot's token; a gradient adds up in the accumulator's precision."""
    acc = wide(call.dtype)
    x = call.x.to(acc)
    rows = torch.nonzero(call.layout.row_to_slot >= 0)[:, 0]
    tokens = call.layout.row_to_slot[rows].long() // max(call.layout.top_k, 1)
    out = x.new_zeros(call.layout.num_rows, x.shape[1])
    return out.index_put((rows,), x[tokens]).to(call.dtype)


def unpermute(call: UnpermuteCall) -> Tensor:
    """Adds one choice of every token after the other, in the accumulator's precision; rounds at the end."""
    acc = wide(call.dtype)
    y, layout = call.y.to(acc), call.layout
    out = y[:0].sum(0).repeat(layout.num_tokens, 1)  # zeros that autograd traces to y
    for k in range(layout.top_k):
        tokens = torch.nonzero(layout.slot_to_row[:, k] >= 0)[:, 0]
        term = y[layout.slot_to_row[tokens, k].long()]
        if call.weights is not None:
            term = term * call.weights[tokens, k].to(acc)[:, None]
        out = out.index_put((tokens,), out[tokens] + term)
    return out.to(call.dtype)
