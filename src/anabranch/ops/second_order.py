"""Derivatives that the operators do not offer, and say so: those of gradients, and forward-mode ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from anabranch.errors import UnsupportedError


def refuse_second_derivative(operator: CustomOpDef, op: str) -> None:
    """Makes differentiating through a backward operator (create_graph=True) raise with the way out."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise UnsupportedError(
            op,
            "create_graph",
            expected='first derivatives (backend="reference" has higher ones)',
            got="a second one",
        )

    operator.register_autograd(refuse)


def refuse_forward_mode(op: str, *values: Tensor | None) -> None:
    """Raises if a value carries a tangent, which an operator would drop: a derivative of zero, without a word."""
    if torch.compiler.is_compiling():
        return
    for value in values:
        if value is not None and unpack_dual(value).tangent is not None:
            raise UnsupportedError(
                op,
                "tangent",
                expected='none (backend="reference" has forward-mode derivatives)',
                got="one of forward-mode automatic differentiation",
            )
