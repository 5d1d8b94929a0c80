"""The interface's tensors as the public functions take them: as views, and as an ExpertLayout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.layout import ExpertLayout
from anabranch.ops import checks

WORDS = {
    "x": "X",
    "weight": "W",
    "layout": "m_sizes",
    "a layout": "the sizes",
    "gather": "permute_x",
    "scatter": "permute_y",
    "scale": "topk_weights",
    "grad": "dY",
    "K_dim": "K",
    "layout's T": "num_tokens",
    "layout's R": "total_tokens",
    "of the result": "(total_tokens, N)",
    "(T * K,)": "(total_tokens,)",
    "counts": "m_sizes",
    "row_to_slot": "gather_indices",
    "top_k": "topk",
    # The rules spell it as their argument, the functions and configurations as theirs.
    "use_tma_load_dY": "use_tma_load_dy",
}
"""What the public functions call things in their errors, and what they are called here."""

_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Integers that an ExpertLayout is not made from directly."""
_INTEGERS = (*checks.INTEGERS, *_NARROW)


def product(
    op: str,
    X: Tensor,
    W: Tensor,
    m_sizes: Tensor,
    topk: int,
    gather_indices: Tensor | None,
    permute_x: bool,
    permute_y: bool,
    topk_weights: Tensor | None,
    fuse_mul_post: bool,
    layouts: Any = ExpertLayout,
) -> dict[str, Any]:
    """The arguments of anabranch.grouped_gemm that compute the same.

    ``layouts`` has the constructors of the layout, :class:`anabranch.ops.route.api.Unfilled` for checks alone.
    """
    checks.flag(op, fuse_mul_post=fuse_mul_post, permute_y=permute_y)
    if fuse_mul_post and not permute_y:
        raise ArgumentError(op, "fuse_mul_post", expected="False without permute_y", got="True")
    x, layout = routed(op, X, m_sizes, topk, gather_indices, permute_x, permute_y, layouts)
    weight = stacked(op, W, layout)
    check_columns(op, "X", x, "num_tokens" if permute_x else "total_tokens", W, weight, axis=2)
    return {
        "x": x,
        "weight": weight,
        "layout": layout,
        "gather": permute_x,
        "scatter": permute_y,
        "scale": by_slot(op, topk_weights, layout) if fuse_mul_post else None,
    }


def views(
    X: Tensor,
    W: Tensor,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    topk_weights: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """A product's tensors, which have passed its checks, as anabranch takes them: x, weight, counts, slots, scale."""
    x = X if X.dim() == 2 else X.flatten(0, -2)
    counts = m_sizes.to(torch.int64) if m_sizes.dtype in _NARROW else m_sizes
    weight = W if W.dim() == 3 else W.unflatten(0, (counts.shape[0], W.shape[0] // counts.shape[0]))
    slots = gather_indices
    if slots is not None and slots.dtype in _NARROW:
        slots = slots.to(torch.int64)
    scale = None if topk_weights is None else topk_weights.reshape(-1, topk)
    return x, weight, counts, slots, scale


def routed(
    op: str,
    X: Tensor,
    m_sizes: Tensor,
    topk: int,
    gather_indices: Tensor | None,
    permute_x: bool,
    permute_y: bool,
    layouts: Any = ExpertLayout,
) -> tuple[Tensor, ExpertLayout]:
    """X as a matrix, and the layout of the product's rows."""
    checks.flag(op, permute_x=permute_x, permute_y=permute_y)
    checks.integer(op, "topk", topk, minimum=1)
    x = rows(op, "X", X)
    total = x.shape[0] * topk if permute_x else x.shape[0]
    return x, layout_of(op, total, m_sizes, gather_indices, topk, permute_x, permute_y, layouts)


def layout_of(
    op: str,
    total_tokens: int,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    layouts: Any = ExpertLayout,
) -> ExpertLayout:
    """The layout of total_tokens rows, whose slots are in gather_indices where one side is permuted."""
    if permute_x and permute_y:
        raise ArgumentError(op, "permute_y", expected="False beside permute_x", got="True")
    counts = _wide(op, "m_sizes", m_sizes, "(E,)")
    if not (permute_x or permute_y):
        if gather_indices is not None:
            # Not needed, but another size says that a permutation was meant.
            checks.tensor(op, "gather_indices", gather_indices, "(total_tokens,)", _INTEGERS)
            checks.shape(
                op,
                "gather_indices",
                gather_indices,
                total_tokens,
                means="(total_tokens,)",
                fits=lambda: "permute_x=True" if gather_indices.shape[0] == total_tokens * topk else "",
            )
        identity: ExpertLayout = layouts.from_counts(counts, total_tokens)
        return identity
    slots = _wide(op, "gather_indices", gather_indices, "(total_tokens,)")
    checks.shape(op, "gather_indices", slots, total_tokens, means="(total_tokens,)")
    made: ExpertLayout = layouts.from_sorted(counts, slots, topk)
    return made


def rows(op: str, argument: str, value: Tensor) -> Tensor:
    """A matrix of all rows: leading dimensions flattened."""
    checks.dense(op, argument, value, "(..., columns)", checks.FLOATS)
    if value.dim() < 2:
        raise ArgumentError(op, argument, expected="shape (rows, columns)", got=f"shape {tuple(value.shape)}")
    return value if value.dim() == 2 else value.flatten(0, -2)


def stacked(op: str, W: Tensor, layout: ExpertLayout) -> Tensor:
    """W as (E, N, K), also where it came as (E * N, K)."""
    checks.dense(op, "W", W, "(E, N, K) or (E * N, K)", checks.FLOATS)
    if W.dim() != 2:
        return W
    experts = layout.num_experts
    if not experts or W.shape[0] % experts:
        expected = f"(E, N, K), or (E * N, K) for the E = {experts} of m_sizes"
        raise ArgumentError(op, "W", expected=expected, got=f"shape {tuple(W.shape)}")
    return W.unflatten(0, (experts, W.shape[0] // experts))


def check_columns(op: str, argument: str, x: Tensor, rows: str, W: Tensor, weight: Tensor, axis: int) -> None:
    """Demands as many columns as W has along ``axis``, 1 for N and 2 for K, and says which of its shapes would fit."""
    if weight.dim() != 3 or x.shape[1] == weight.shape[axis]:
        # Of another rank W is refused by name later.
        return
    letter = "K" if axis == 2 else "N"
    expected = f"shape ({rows}, W's {letter}) = ({x.shape[0]}, {weight.shape[axis]})"
    got = f"shape {tuple(x.shape)} beside W of shape {tuple(W.shape)}"
    if W.dim() == 3 and x.shape[1] == W.shape[3 - axis]:
        got = f"{got}, which fits W.mT"
    raise ArgumentError(op, argument, expected=expected, got=got)


def by_slot(op: str, topk_weights: Tensor | None, layout: ExpertLayout) -> Tensor:
    """Routing weights as (num_tokens, topk), however they came."""
    checks.dense(op, "topk_weights", topk_weights, "of total_tokens values", checks.FLOATS)
    assert topk_weights is not None
    slots = layout.slot_to_row.shape
    if topk_weights.numel() != slots.numel():
        expected = f"total_tokens = {slots.numel()} values in slot order"
        raise ArgumentError(op, "topk_weights", expected=expected, got=f"shape {tuple(topk_weights.shape)}")
    return topk_weights.reshape(slots)


def unweighted(op: str, **fused: bool) -> None:
    """Demands that no routing weights are to be multiplied, where none can be given."""
    checks.flag(op, **fused)
    for argument, value in fused.items():
        if value:
            expected = "False, for this product takes no topk_weights"
            raise ArgumentError(op, argument, expected=expected, got=repr(value))


def _wide(op: str, argument: str, value: Tensor | None, shape: str) -> Tensor:
    checks.tensor(op, argument, value, shape, _INTEGERS)
    assert value is not None
    return value.to(torch.int64) if value.dtype in _NARROW else value
