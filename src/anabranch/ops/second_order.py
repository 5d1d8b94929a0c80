"""Gradients of gradients: not offered by the fused operators, and said so."""

from __future__ import annotations

from typing import Any

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
