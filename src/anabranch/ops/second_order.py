"""Derivatives that the operators do not offer, and say so: those of gradients, and forward-mode ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anabranch.errors import UnsupportedError


def refuse_second_derivative(op: str) -> Callable[..., NoReturn]:
    """What makes differentiating through a backward operator (create_graph=True) raise with the way out."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise UnsupportedError(
            op,
            "create_graph",
            expected='first derivatives (backend="reference" has higher ones)',
            got="a second one",
        )

    return refuse


def refuse_forward_mode(op: str, *values: Tensor | None) -> None:
    """Raises if a value carries a tangent, which an operator would drop: a derivative of zero, without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for value in values:
        if value is not None and forward_ad.unpack_dual(value).tangent is not None:
            raise UnsupportedError(
                op,
                "tangent",
                expected='none (backend="reference" has forward-mode derivatives)',
                got="one of forward-mode automatic differentiation",
            )
