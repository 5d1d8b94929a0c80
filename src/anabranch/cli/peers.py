"""What moe_mlp is compared with: other ways to the same result, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_loop(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU experts as a loop over masks, the way a model's first version has them."""
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        z = F.linear(F.silu(gate) * up, down[expert])
        y = y.index_add(0, token, (z * weights[token, choice, None]).to(y.dtype))
    return y


def has_grouped_mm() -> bool:
    """Whether this torch has a grouped product."""
    return hasattr(F, "grouped_mm")


def moe_grouped_mm(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same with torch.nn.functional.grouped_mm, on rows sorted by expert."""
    tokens, top_k = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    counts.index_add_(0, ids.reshape(-1), torch.ones_like(order, dtype=torch.int32))
    offsets = counts.cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x[order // top_k], gate_up.mT, offs=offsets).chunk(2, dim=-1)
    z = F.grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
    z = z * weights.reshape(-1, 1)[order]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return z[back].view(tokens, top_k, -1).sum(1).to(x.dtype)
