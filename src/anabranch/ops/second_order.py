"""Transforms that operators do not offer, and say so: second derivatives, forward-mode ones, maps over lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

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
    if is_dynamo_compiling() or forward_ad._current_level < 0:
        return
    for value in values:
        if value is not None and forward_ad.unpack_dual(value).tangent is not None:
            raise UnsupportedError(
                op,
                "tangent",
                expected='none (backend="reference" has forward-mode derivatives)',
                got="one of forward-mode automatic differentiation",
            )


def refuse_vmap(op: str, *values: Tensor) -> None:
    """Raises if torch.func.vmap maps over a value, in place of what PyTorch says of operators that take lists."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    if any(torch._C._functorch.is_batchedtensor(value) for value in values):
        raise UnsupportedError(
            op,
            "torch.func.vmap",
            expected='tensors that are not mapped over (backend="reference" takes them)',
            got="a mapped one",
        )
