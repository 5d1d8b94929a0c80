"""The oracle of moe_mlp: token by token, in plain, differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.moe_mlp.call import MoeMlpCall
from anabranch.ops.precision import wide


def moe_mlp(call: MoeMlpCall) -> Tensor:
    """The output, in the accumulator's precision until the one rounding at the end."""
    assert call.expert_ids is not None
    acc = wide(call.dtype)
    gate_up, down = call.gate_up_nk.to(acc), call.down_nk.to(acc)
    gate_up_bias = None if call.gate_up_bias is None else call.gate_up_bias.to(acc)
    down_bias = None if call.down_bias is None else call.down_bias.to(acc)
    inputs = (call.x, gate_up, down, call.expert_weights, gate_up_bias, down_bias)
    # Zero, but traced to every input: those that no token reads have gradients of zero too.
    nothing = torch.stack([v.flatten()[:0].sum(dtype=acc) for v in inputs if v is not None]).sum()
    rows = []
    for t, experts in enumerate(call.expert_ids.tolist()):
        total = call.x.new_zeros(call.x.shape[1], dtype=acc) + nothing
        for k, e in enumerate(experts):
            if not 0 <= e < gate_up.shape[0]:
                continue
            weight, x = call.expert_weights[t, k].to(acc), call.x[t].to(acc)
            if call.weight_on == "input":
                x = (weight * x).to(call.dtype).to(acc)
            h = gate_up[e] @ x
            if gate_up_bias is not None:
                h = h + gate_up_bias[e]
            y = down[e] @ call.epilogue.forward(*(c[0] for c in call.columns(h[None])))
            if down_bias is not None:
                y = y + down_bias[e]
            total = total + (weight * y if call.weight_on == "output" else y)
        rows.append(total)
    return torch.stack(rows).to(call.dtype) if rows else torch.zeros_like(call.x) + nothing.to(call.dtype)
