"""MultiExpertLinear: linear layers of different widths, run together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks
from anabranch.ops.multi_gemm.api import multi_gemm
from anabranch.ops.wording import speaks_of


class MultiExpertLinear(nn.Module):
    """A linear layer for each of a few experts that share no size: :func:`anabranch.multi_gemm` with its
    weights.

    Vision-language-action models pair a wide expert for language with a narrow one for actions. Expert i's
    weight is ``weights[i]`` (out_i, in_i), its bias ``biases[i]`` (out_i,). A frozen expert costs nothing
    in the backward.

    Args:
        in_features: in_i of each expert.
        out_features: out_i of each expert, as many.
        bias: give every expert a bias.
        device: where the parameters live.
        dtype: theirs.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.
    """

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: Sequence[int],
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_name("MultiExpertLinear", backend)
        checks.flag("MultiExpertLinear", bias=bias)
        checks.float_dtype("MultiExpertLinear", dtype)
        self.backend = backend
        self.in_features = _sizes("in_features", in_features)
        self.out_features = _sizes("out_features", out_features)
        if len(self.in_features) != len(self.out_features):
            expected = f"as many as in_features, {len(self.in_features)}"
            raise ArgumentError(
                "MultiExpertLinear", "out_features", expected=expected, got=len(self.out_features)
            )
        self.weights = nn.ParameterList(
            torch.empty(o, i, device=device, dtype=dtype)
            for i, o in zip(self.in_features, self.out_features, strict=True)
        )
        self.biases = None
        if bias:
            self.biases = nn.ParameterList(
                torch.empty(o, device=device, dtype=dtype) for o in self.out_features
            )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws each expert's weight and bias as nn.Linear does."""
        for i, fan_in in enumerate(self.in_features):
            bound = 1 / math.sqrt(fan_in)
            self.weights[i].uniform_(-bound, bound)
            if self.biases is not None:
                self.biases[i].uniform_(-bound, bound)

    @speaks_of(name="MultiExpertLinear")
    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """One (..., in_i) per expert to one (..., out_i) per expert; any of them may be empty."""
        if not isinstance(xs, (list, tuple)):
            expected = "a list or tuple of tensors"
            raise ArgumentTypeError("MultiExpertLinear", "xs", expected=expected, got=type(xs).__name__)
        if len(xs) != len(self.in_features):
            expected = f"{len(self.in_features)} tensors, one per expert"
            raise ArgumentError("MultiExpertLinear", "xs", expected=expected, got=len(xs))
        for i, (x, size) in enumerate(zip(xs, self.in_features, strict=True)):
            checks.last_size("MultiExpertLinear", f"xs[{i}]", x, "in", size)
            checks.own_dtype("MultiExpertLinear", f"xs[{i}]", x, self.weights[i], "the parameters")
        ys = multi_gemm([x.reshape(-1, x.shape[-1]) for x in xs], list(self.weights), backend=self.backend)
        if self.biases is not None:
            ys = [y + bias.to(y.dtype) for y, bias in zip(ys, self.biases, strict=True)]
        return [y.view(*x.shape[:-1], y.shape[-1]) for x, y in zip(xs, ys, strict=True)]

    def extra_repr(self) -> str:
        """The arguments."""
        bias = self.biases is not None
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}{backend}"


def _sizes(argument: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(sizes, (list, tuple)):
        expected = "a list or tuple of ints"
        raise ArgumentTypeError("MultiExpertLinear", argument, expected=expected, got=type(sizes).__name__)
    if not sizes:
        raise ArgumentError("MultiExpertLinear", argument, expected="at least one int", got="none")
    for i, size in enumerate(sizes):
        checks.integer("MultiExpertLinear", f"{argument}[{i}]", size, minimum=1)
    return tuple(sizes)
