"""Router: the linear layer that scores experts, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks
from anabranch.ops.precision import wide, without_autocast
from anabranch.ops.topk_router.api import topk_router
from anabranch.ops.topk_router.options import check_options


class Routing(NamedTuple):
    """Where tokens go. T tokens, E experts, K experts per token.

    T is the product of x's leading dimensions: for x (B, S, H), token ``b * S + s`` is ``x[b, s]``, and the tensors
    here are (B * S, ...) all the same.
    """

    weights: Tensor
    """(T, K) fp32 (fp64 for fp64), how much each chosen expert counts; has a gradient."""
    ids: Tensor
    """(T, K) int64, the experts chosen, best first, each in ``[0, E)``."""
    logits: Tensor
    """(T, E) fp32 (fp64 for fp64), what the choice was made from, before score and selection bias; has a gradient.
    For the losses of :mod:`anabranch.nn.balance`."""


class Router(nn.Module):
    """Chooses K of E experts for each token: :func:`anabranch.topk_router` of a linear layer.

    The logits are computed in fp32 (fp64 for fp64) whatever the dtypes of x and weight are, under autocast
    too: bf16 logits collapse near ties and so choose other experts.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        score: ``"softmax"`` or ``"sigmoid"``.
        order: ``"score_then_topk"`` or ``"topk_then_score"``.
        renormalize: divide each token's weights by their sum.
        selection_bias: keep a buffer (E,) that is added to the scores for the choice alone, starts at 0 and
            is moved by :meth:`update_selection_bias`. It stays fp32 whatever the module is cast to.
        num_groups: into how many groups E is divided; None for no groups.
        top_groups: how many groups a token may choose from.
        scaling: factor of every weight.
        bias: give the linear layer a trained bias.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.
        device: where the parameters live.
        dtype: theirs.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk",
        renormalize: bool = False,
        selection_bias: bool = False,
        num_groups: int | None = None,
        top_groups: int | None = None,
        scaling: float = 1.0,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.integer("Router", "hidden_size", hidden_size, minimum=1)
        checks.integer("Router", "num_experts", num_experts, minimum=1)
        check_options(
            "Router",
            num_experts,
            top_k,
            score=score,
            order=order,
            num_groups=num_groups,
            top_groups=top_groups,
            scaling=scaling,
            k_name="top_k",
        )
        checks.flag("Router", renormalize=renormalize, selection_bias=selection_bias, bias=bias)
        check_name("Router", backend)
        checks.float_dtype("Router", dtype)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.order = order
        self.renormalize = renormalize
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.scaling = scaling
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        correction = torch.empty(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", correction)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weight and bias as nn.Linear does; zeroes the selection bias."""
        bound = 1 / math.sqrt(self.hidden_size)
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """The routing of x (..., H), whose leading dimensions make up T."""
        checks.last_size("Router", "x", x, "H", self.hidden_size)
        checks.same_device("Router", x, weight=self.weight)
        logits = self._logits(x.reshape(-1, self.hidden_size))
        weights, ids = topk_router(
            logits,
            self.top_k,
            score=self.score,
            order=self.order,
            renormalize=self.renormalize,
            bias=self.selection_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scaling=self.scaling,
            backend=self.backend,
        )
        return Routing(weights, ids, logits)

    def _logits(self, x: Tensor) -> Tensor:
        acc = wide(torch.promote_types(x.dtype, self.weight.dtype))
        with without_autocast(x.device):
            return F.linear(x.to(acc), self.weight.to(acc), None if self.bias is None else self.bias.to(acc))

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """Moves the selection bias, in place, so that experts with few tokens are chosen more often.

        ``selection_bias += rate * sign(mean(counts) - counts)``: balancing without an auxiliary loss (Wang
        et al. 2024, arXiv 2408.15664; DeepSeek-V3). Call it once after each optimizer step.

        Args:
            counts: (E,) tokens that chose each expert since the last update
                (:func:`anabranch.nn.expert_counts`), summed over the ranks that share the router; int32, int64 or
                floats, on the bias's device.
            rate: the step.

        Raises:
            ArgumentError, ArgumentTypeError: a router without selection bias, or counts or a rate that do not fit.
        """
        if self.selection_bias is None:
            expected = "a router made with selection_bias=True"
            raise ArgumentError("Router", "selection_bias", expected=expected, got="one without")
        checks.tensor("Router", "counts", counts, "(E,)", (*checks.INTEGERS, *checks.FLOATS))
        checks.shape("Router", "counts", counts, self.num_experts, means="(E,)")
        checks.same_device("Router", self.selection_bias, "selection_bias", counts=counts)
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise ArgumentTypeError("Router", "rate", expected="a float", got=type(rate).__name__)
        # E times the comparison with the mean, which is exact in integers. E * counts needs more than int32.
        counts = counts.to(torch.float64 if counts.is_floating_point() else torch.int64)
        missing = counts.sum() - self.num_experts * counts
        self.selection_bias.add_(missing.sign().to(torch.float32), alpha=rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # .to(bfloat16) moves the selection bias but leaves its dtype: in 16 bits an update would be rounded
        # away.
        kept = self.selection_bias
        super()._apply(fn, recurse)
        if kept is not None and self.selection_bias is not None and self.selection_bias.dtype != kept.dtype:
            self.selection_bias = kept.to(self.selection_bias.device)
        return self

    def extra_repr(self) -> str:
        """The arguments, without those at their defaults."""
        shown = [f"{self.hidden_size}, {self.num_experts}, top_k={self.top_k}, score={self.score!r}"]
        shown += [f"order={self.order!r}"] if self.order != "score_then_topk" else []
        shown += ["renormalize=True"] if self.renormalize else []
        shown += ["selection_bias=True"] if self.selection_bias is not None else []
        if self.num_groups is not None:
            shown += [f"num_groups={self.num_groups}, top_groups={self.top_groups}"]
        shown += [f"scaling={self.scaling}"] if self.scaling != 1 else []
        shown += ["bias=True"] if self.bias is not None else []
        shown += [f"backend={self.backend!r}"] if self.backend is not None else []
        return ", ".join(shown)
