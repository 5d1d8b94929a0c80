"""Validation of permute and unpermute: arguments in, a frozen call out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError
from anabranch.layout import ExpertLayout
from anabranch.ops import checks

OP = "permute"
"""The folder, and so what dispatch knows both functions by."""


@dataclass(frozen=True, eq=False)
class PermuteCall:
    """A permute whose arguments fit together. The fields are the arguments, named as there."""

    x: Tensor
    layout: ExpertLayout
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


@dataclass(frozen=True, eq=False)
class UnpermuteCall:
    """An unpermute whose arguments fit together. The fields are the arguments, named as there."""

    y: Tensor
    layout: ExpertLayout
    weights: Tensor | None
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.y.device

    @property
    def dtype(self) -> torch.dtype:
        return self.y.dtype


@dataclass(frozen=True, eq=False)
class UnpermuteBackwardCall:
    """The gradients of a weighted unpermute.

    Attributes:
        needs: whether the gradients of y and of weights are needed.
        grad: (T, H), of the output.
        y: only for the gradient of weights.
        layout: as in the forward.
        weights: as in the forward.
        backend: as in the forward.
    """

    needs: Sequence[bool]
    grad: Tensor
    y: Tensor | None
    layout: ExpertLayout
    weights: Tensor
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.grad.device

    @property
    def dtype(self) -> torch.dtype:
        return self.grad.dtype


def bind_permute(x: Tensor, layout: ExpertLayout, *, backend: str | None = None) -> PermuteCall:
    """Checks the arguments of permute and freezes the call."""
    op = "permute"
    check_name(op, backend)
    checks.tensor(op, "x", x, "(T, H)", checks.FLOATS)
    checks.layout(op, layout)
    checks.shape(op, "x", x, layout.num_tokens, x.shape[1], means="(layout's T, H)")
    checks.same_device(op, x, layout=layout)
    return PermuteCall(x, layout, backend)


def bind_unpermute(
    y: Tensor, layout: ExpertLayout, weights: Tensor | None = None, *, backend: str | None = None
) -> UnpermuteCall:
    """Checks the arguments of unpermute and freezes the call."""
    op = "unpermute"
    check_name(op, backend)
    checks.tensor(op, "y", y, "(R, H)", checks.FLOATS)
    checks.layout(op, layout)
    checks.shape(op, "y", y, layout.num_rows, y.shape[1], means="(layout's R, H)")
    if weights is not None:
        checks.tensor(op, "weights", weights, "(T, K)", checks.FLOATS)
        checks.shape(op, "weights", weights, layout.num_tokens, layout.top_k, means="layout's (T, K)")
    checks.same_device(op, y, "y", layout=layout, weights=weights)
    return UnpermuteCall(y, layout, weights, backend)


def check_maps(op: str, layout: ExpertLayout) -> None:
    """Demands that the maps are each other's inverse. Reads values: runs inside operators, if at all."""
    slots, rows = layout.row_to_slot.tolist(), layout.slot_to_row.reshape(-1).tolist()
    for here, there, index, inverse in (("row", "slot", slots, rows), ("slot", "row", rows, slots)):
        for i, j in enumerate(index):
            if j != -1 and not (0 <= j < len(inverse) and inverse[j] == i):
                expected = "maps that are each other's inverse, -1 where there is no partner"
                got = f"{here} {i} with {there} {j}, which does not name it back"
                raise ArgumentError(op, "layout", expected=expected, got=got)
