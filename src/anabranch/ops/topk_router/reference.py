"""The oracle of topk_router: Python's stable sort chooses, token by token; plain PyTorch scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from anabranch.ops.topk_router.call import EPSILON, TopkRouterCall


def topk_router(call: TopkRouterCall) -> tuple[Tensor, Tensor]:
    """(weights, ids); the weights are differentiable any number of times."""
    logits = call.logits.to(call.wide)
    everywhere = _score(call, logits)
    key = logits
    if call.bias is not None:
        key = (everywhere if call.scores_all else logits) + call.bias.to(call.wide)
    limits = everywhere if call.scores_all and call.bias is None else key
    chosen = [_choose(call, *rows) for rows in zip(key.tolist(), limits.tolist(), strict=True)]
    ids = torch.tensor(chosen, dtype=torch.int64, device=call.device).reshape(len(chosen), call.k)
    weights = everywhere.gather(1, ids) if call.scores_all else _score(call, logits.gather(1, ids))
    if call.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    return weights * call.scaling, ids


def _score(call: TopkRouterCall, logits: Tensor) -> Tensor:
    return logits.softmax(-1) if call.score == "softmax" else logits.sigmoid()


def _choose(call: TopkRouterCall, key: Sequence[float], limits: Sequence[float]) -> list[int]:
    """One token's experts: the best groups by the sum of their best two, then the best experts of those."""
    size = len(key) // call.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(call.num_groups)]
    best = torch.tensor(
        [sum(limits[e] for e in _descending(limits, group)[:2]) for group in groups], dtype=call.wide
    )
    kept = sorted(_descending(best.tolist(), range(call.num_groups))[: call.top_groups])
    return _descending(key, (e for g in kept for e in groups[g]))[: call.k]


def _descending(values: Sequence[float], indices: Iterable[int]) -> list[int]:
    """Indices by value; NaN is the largest; equal ones keep their order."""
    return sorted(
        indices, key=lambda i: (not math.isnan(values[i]), -values[i] if values[i] == values[i] else 0)
    )
