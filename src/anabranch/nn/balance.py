"""How evenly a router spreads tokens: counts, and losses that keep it even and its logits small."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from anabranch.errors import ArgumentTypeError
from anabranch.layout import ExpertLayout
from anabranch.nn.router import Routing
from anabranch.ops import checks
from anabranch.ops.precision import wide
from anabranch.ops.topk_router.options import SCORES


def expert_counts(routing: Routing) -> Tensor:
    """(E,) int32, how many tokens chose each expert.

    Raises:
        ArgumentError, ArgumentTypeError: not a :class:`anabranch.nn.Routing`, or one whose logits are not (T, E)
            floats or whose ids are not (T, K) integers with the same T, on the same device.
    """
    _check("expert_counts", routing)
    counts = ExpertLayout.from_topk(routing.ids, routing.logits.shape[-1]).counts
    assert counts is not None
    return counts


def load_balance_loss(routing: Routing, *, score: Literal["softmax", "sigmoid"] = "softmax") -> Tensor:
    """``E * sum_e f_e * P_e``, a scalar that is K where every expert gets as much as any other.

    f_e is the number of tokens that chose e divided by T, so the f add up to K; P_e is the mean over tokens
    of expert e's score, the scores of a token adding up to 1. Only P has a gradient. This is equations 4 to
    6 of Switch Transformers (Fedus et al. 2021), extended to K > 1 as Mixtral's in transformers is, so that
    published coefficients carry over; divide by K for a loss that is 1 at balance. Without tokens it is 0.

    Args:
        routing: of T tokens, from :class:`anabranch.nn.Router`, or the second result of :class:`anabranch.nn.MoE`
            with ``return_routing=True``.
        score: ``"softmax"`` of the logits, or ``"sigmoid"`` divided by its sum over E (DeepSeek-V3,
            equations 17 to 20).

    Raises:
        ArgumentError, ArgumentTypeError: not a :class:`anabranch.nn.Routing`, or one whose logits are not (T, E)
            floats or whose ids are not (T, K) integers with the same T, on the same device.
    """
    _check("load_balance_loss", routing)
    checks.choice("load_balance_loss", "score", score, SCORES)
    logits = routing.logits.to(wide(routing.logits.dtype))
    tokens, experts = logits.shape
    if score == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
    share = expert_counts(routing).to(scores.dtype) / max(tokens, 1)
    return experts * (share * scores.sum(0)).sum() / max(tokens, 1)


def z_loss(logits: Tensor) -> Tensor:
    """``mean_t(logsumexp_e(logits[t, e]) ** 2)``, which keeps logits small (ST-MoE, Zoph et al. 2022).

    Args:
        logits: (T, E), those of a :class:`anabranch.nn.Routing`. Without tokens the loss is 0.
    """
    checks.tensor("z_loss", "logits", logits, "(T, E)", checks.FLOATS)
    return logits.to(wide(logits.dtype)).logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def _check(op: str, routing: object) -> None:
    if not isinstance(routing, Routing):
        got = type(routing).__name__
        if isinstance(routing, tuple) and len(routing) == 2 and isinstance(routing[1], Routing):
            got = "the pair of output and Routing; pass the second of the pair"
        raise ArgumentTypeError(op, "routing", expected="a Routing", got=got)
    logits, ids = routing.logits, routing.ids
    checks.tensor(op, "routing.logits", logits, "(T, E)", checks.FLOATS)
    checks.tensor(op, "routing.ids", ids, "(T, K)", checks.INTEGERS)
    checks.shape(op, "routing.ids", ids, logits.shape[0], ids.shape[1], means="(logits' T, K)")
    checks.same_device(op, logits, "logits", **{"routing.ids": ids})
