"""topk_router in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.topk_router.call import EPSILON, TopkRouterCall


def supports(call: TopkRouterCall) -> str | None:
    """Everything."""
    return None


def forward(call: TopkRouterCall) -> tuple[Tensor, Tensor]:
    """(weights, ids)."""
    logits = _wide(call)
    scores = _score(call, logits) if call.scores_all else None
    ids = _choose(call, logits, scores)
    chosen = scores.gather(1, ids) if scores is not None else _score(call, logits.gather(1, ids))
    if call.renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + EPSILON)
    return chosen * call.scaling, ids


def backward(call: TopkRouterCall, ids: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits from that of the weights, and the ids chosen."""
    logits = _wide(call)
    d_chosen = grad.to(call.wide) * call.scaling
    over_all = call.scores_all and call.score == "softmax"
    scores = _score(call, logits if over_all else logits.gather(1, ids))
    chosen = scores.gather(1, ids) if over_all else scores
    if call.renormalize:
        total = chosen.sum(-1, keepdim=True) + EPSILON
        d_chosen = (d_chosen - (d_chosen * chosen).sum(-1, keepdim=True) / total) / total
    # Ids are distinct within a token, so nothing is scattered twice.
    d_logits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    if over_all:
        d_logits.scatter_(1, ids, d_chosen)
        d_logits = scores * (d_logits - (d_chosen * chosen).sum(-1, keepdim=True))
    elif call.score == "softmax":
        d_logits.scatter_(1, ids, chosen * (d_chosen - (d_chosen * chosen).sum(-1, keepdim=True)))
    else:
        d_logits.scatter_(1, ids, d_chosen * chosen * (1 - chosen))
    return d_logits.to(call.dtype)


def _wide(call: TopkRouterCall) -> Tensor:
    # Contiguous, because PyTorch's strided loops round exp and sigmoid otherwise, and equal logits must tie.
    return call.logits.to(call.wide).contiguous()


def _score(call: TopkRouterCall, logits: Tensor) -> Tensor:
    return logits.softmax(-1) if call.score == "softmax" else logits.sigmoid()


def _choose(call: TopkRouterCall, logits: Tensor, scores: Tensor | None) -> Tensor:
    """(T, K) ids. A stable sort, because torch.topk does not say which of equal values it takes."""
    # Both scores grow with the logit, so without a bias the logits say the same with fewer ties.
    key = logits
    if call.bias is not None:
        key = (logits if scores is None else scores) + call.bias.to(call.wide)
    if call.top_groups == call.num_groups:
        return _descending(key)[:, : call.k].contiguous()
    experts = _experts_of_best_groups(call, scores if scores is not None and call.bias is None else key)
    best = _descending(key.gather(1, experts))[:, : call.k]
    return experts.gather(1, best)


def _experts_of_best_groups(call: TopkRouterCall, values: Tensor) -> Tensor:
    """(T, top_groups * E / num_groups) ids in ascending order.

    The experts of other groups are left out rather than masked: no value of theirs can win.
    """
    grouped = values.unflatten(1, (call.num_groups, -1))
    size = grouped.shape[-1]
    best = grouped.topk(min(2, size), dim=-1).values.sum(-1)
    kept = _descending(best)[:, : call.top_groups].sort(-1).values
    within = torch.arange(size, device=values.device)
    return (kept.unsqueeze(-1) * size + within).flatten(1)


def _descending(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices
