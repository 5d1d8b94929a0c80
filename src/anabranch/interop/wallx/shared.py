"""What the two levels share: layouts from wall-x's maps, and how to read its optional arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.layout import ExpertLayout
from anabranch.ops import checks
from anabranch.ops.rope.operands import check_vectors

IDS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
WEIGHT_NAMES = {
    "w0": "weight_expert0",
    "w1": "weight_expert1",
    "transpose_weight=True": "trans_b=False",
    "transpose_weight=False": "trans_b=True",
}
NO_HEAD_AXIS = {", which fits head_axis=2": "", ", which fits head_axis=1": ""}
"""The heads have one place here."""


def sort_slots(op: str, indices: Tensor, num_out_tokens: int) -> tuple[ExpertLayout, Tensor]:
    """The layout of expert ids, (T, K) or (T,), and its row_id_map; negative ids are dropped.

    Nothing says how many experts there are, so the slots are sorted here and one expert counts all rows.
    """
    checks.dense(op, "indices", indices, "(T, topK) or (T,)", IDS)
    if indices.dim() not in (1, 2):
        expected = "shape (T, topK) or (T,)"
        raise ArgumentError(op, "indices", expected=expected, got=f"shape {tuple(indices.shape)}")
    checks.integer(op, "num_out_tokens", num_out_tokens, minimum=0)
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    if top_k == 0:
        raise ArgumentError(op, "indices", expected="at least one id per token", got="shape (T, 0)")
    ids = indices.reshape(-1)
    keys = ids
    if ids.dtype.is_signed:
        # With its sign bit turned a negative id comes after all others.
        keys = ids ^ torch.iinfo(ids.dtype).min
    slots = torch.sort(keys, stable=True).indices
    layout = ExpertLayout.from_sorted((ids >= 0).sum(0, keepdim=True), slots, top_k)
    if num_out_tokens not in (0, slots.shape[0]):
        layout = ExpertLayout.from_slot_to_row(layout.slot_to_row, num_out_tokens)
    return layout, layout.slot_to_row.T.reshape(-1)


def read_map(op: str, y: Tensor, row_id_map: Tensor, num_tokens: int, top_k: int) -> ExpertLayout:
    """The layout of a row_id_map, whose entry k * T + t is the row in y of slot (t, k)."""
    checks.tensor(op, "y", y, "(rows, H)", checks.FLOATS)
    checks.tensor(op, "row_id_map", row_id_map, "(topK * T,)", checks.INTEGERS)
    checks.shape(op, "row_id_map", row_id_map, top_k * num_tokens, means="(topK * T,)")
    return ExpertLayout.from_slot_to_row(row_id_map.view(top_k, num_tokens).T, y.shape[0])


def weights_of(op: str, argument: str, prob: Tensor | None, row_id_map: Tensor) -> Tensor | None:
    """The routing weights, or None for those that are 1: an empty tensor says so too, unless nothing is routed."""
    if prob is None:
        return None
    checks.dense(op, argument, prob, "(T, topK)", checks.FLOATS)
    routed = isinstance(row_id_map, Tensor) and row_id_map.numel() > 0
    if prob.numel() == 0 and (routed or prob.dim() != 2):
        return None
    checks.tensor(op, argument, prob, "(T, topK)", checks.FLOATS)
    return prob


def check_rows(op: str, q: Tensor, k: Tensor, cos: Tensor) -> None:
    """Demands what sections need: q and k (B, H, S, D), and three rows of cos, (3, B, S, D).

    mrope takes one row as well, for text, and tables of half the width. It is left to check sin against cos.
    """
    checks.tensor(op, "q", q, "(B, H, S, D)", checks.FLOATS)
    sizes = check_vectors(op, q, k, 1, cos)
    checks.tensor(op, "cos", cos, "(3, B, S, D)", checks.FLOATS)
    # A batch of one is broadcast.
    batch = 1 if cos.shape[1] == 1 else sizes.batch
    checks.shape(op, "cos", cos, 3, batch, sizes.tokens, sizes.channels, means="(3, B, S, D)")


def one_row(sections: object) -> bool:
    """Whether sections say that there are none, so that cos and sin have one row for all channels."""
    return sections is None or sections is False or (isinstance(sections, (list, tuple)) and not sections)
