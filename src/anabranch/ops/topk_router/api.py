"""topk_router: which K experts each token goes to, and how much each of them counts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from anabranch.ops.topk_router import autograd, reference
from anabranch.ops.topk_router.call import bind_topk_router


def topk_router(
    logits: Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk",
    renormalize: bool = False,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scaling: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses each token's ``k`` experts and their weights, best first.

    Letters: T tokens, E experts, K = ``k``. With s = ``score`` and b = ``bias`` (or 0)::

        score_then_topk:  ids = top_k(s(logits) + b)     weights = s(logits)[ids]
        topk_then_score:  ids = top_k(logits + b)        weights = s(logits[ids])

    then, with ``renormalize``, ``weights / (sum(weights) + 1e-20)``, and last ``* scaling``. The arithmetic
    is in fp32, or fp64 for fp64 logits. Mixtral (Jiang et al. 2024) is softmax with renormalize, gpt-oss
    softmax with topk_then_score, DeepSeek-V3 (2024, section 2.1.2) sigmoid with bias, groups, renormalize
    and scaling.

    Ties go to the lower id, as in a stable descending sort, on every device; NaN sorts before every number,
    as in torch.sort. Without bias the choice is made on the logits themselves: softmax and sigmoid keep
    their order, but round some of them to equal scores. The ids of a token are always distinct and within
    ``[0, E)``.

    Groups: experts ``[g * E / num_groups, (g + 1) * E / num_groups)`` are group g, and its value is the sum
    of its two largest s(logits) + b (of logits + b for topk_then_score; its only one in groups of one), as
    in DeepSeek-V3. DeepSeek-V2's rule, the largest alone, is not offered. Experts outside the
    ``top_groups`` best groups are never chosen; equal groups go to the lower one.

    Args:
        logits: (T, E), fp16, bf16, fp32 or fp64; any strides. The only argument that gets a gradient.
        k: experts per token, 1 to E.
        score: ``"softmax"`` or ``"sigmoid"``.
        order: ``"score_then_topk"`` scores all E experts, ``"topk_then_score"`` only the K chosen ones.
        renormalize: divide each token's weights by their sum.
        bias: (E,) added for the choice alone, any float dtype; not trained by gradient but by a rule
            (:meth:`anabranch.nn.Router.update_selection_bias`), so one that requires grad is refused.
        num_groups: into how many groups of equal size E is divided; None for no groups.
        top_groups: how many groups a token may choose from; given with num_groups.
        scaling: factor of every weight.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.

    Returns:
        weights (T, K) fp32, fp64 for fp64 logits; and ids (T, K) int64. What
        :func:`anabranch.moe_mlp` and :meth:`anabranch.ExpertLayout.from_topk` take.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Autocast changes nothing: logits keep their dtype. bf16 logits choose other experts than fp32 ones
    would, so compute them in fp32, as :class:`anabranch.nn.Router` does.
    """
    call = bind_topk_router(
        logits,
        k,
        score=score,
        order=order,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling=scaling,
        backend=backend,
    )
    if backend == "reference":
        return reference.topk_router(call)
    return autograd.topk_router(call)
