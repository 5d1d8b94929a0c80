"""Validation of topk_router: arguments in, a frozen call out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError
from anabranch.ops import checks
from anabranch.ops.precision import wide
from anabranch.ops.topk_router.options import check_options

OP = "topk_router"

EPSILON = 1e-20
"""Added to the sum of a token's scores, so that scores that are all zero renormalize to zero."""


@dataclass(frozen=True, eq=False)
class TopkRouterCall:
    """A topk_router whose arguments fit together. The fields are the arguments; no groups is one group."""

    logits: Tensor
    bias: Tensor | None
    k: int
    score: str
    order: str
    renormalize: bool
    num_groups: int
    top_groups: int
    scaling: float
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def dtype(self) -> torch.dtype:
        return self.logits.dtype

    @property
    def wide(self) -> torch.dtype:
        """What is computed in, and the weights' dtype: fp32, or fp64 for fp64."""
        return wide(self.dtype)

    @property
    def scores_all(self) -> bool:
        """Whether scores are taken over all E experts rather than over the K chosen."""
        return self.order == "score_then_topk"


def bind_topk_router(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    order: str = "score_then_topk",
    renormalize: bool = False,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scaling: float = 1.0,
    backend: str | None = None,
) -> TopkRouterCall:
    """Checks the arguments of topk_router and freezes the call."""
    check_name(OP, backend)
    checks.flag(OP, renormalize=renormalize)
    checks.tensor(OP, "logits", logits, "(T, E)", checks.FLOATS)
    experts = logits.shape[1]
    check_options(
        OP,
        experts,
        k,
        score=score,
        order=order,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling=scaling,
    )
    if bias is not None:
        checks.tensor(OP, "bias", bias, "(E,)", checks.FLOATS)
        checks.shape(OP, "bias", bias, experts, means="(E,) of logits")
        checks.same_device(OP, logits, "logits", bias=bias)
        if checks.needs_grad(bias):
            expected = "no gradient to be needed (the bias selects, and is updated by a rule)"
            raise ArgumentError(OP, "bias", expected=expected, got="a tensor that requires grad")
    return TopkRouterCall(
        logits, bias, k, score, order, renormalize, num_groups or 1, top_groups or 1, float(scaling), backend
    )
