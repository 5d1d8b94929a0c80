"""The upper level of wall-x's operators: functions with gradients, and the builders of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.interop.wallx.backend import asym_dual_gmm_separated
from anabranch.interop.wallx.shared import (
    NO_HEAD_AXIS,
    WEIGHT_NAMES,
    check_rows,
    one_row,
    read_map,
    sort_slots,
    weights_of,
)
from anabranch.ops import checks
from anabranch.ops.multi_gemm.api import dual_gemm
from anabranch.ops.permute import api
from anabranch.ops.positions.api import rope_index, vision_rotary, window_index
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.wording import speaks_of

__all__ = [
    "asym_dual_gmm",
    "asym_dual_gmm_separated",
    "get_rope_index",
    "get_window_index",
    "multimodal_rope",
    "permute",
    "rot_pos_emb",
    "unpermute",
]

Grids = Tensor | Sequence[Sequence[int]]


@speaks_of({"x0": "input_expert0", "x1": "input_expert1", **WEIGHT_NAMES})
def asym_dual_gmm(
    input_expert0: Tensor,
    input_expert1: Tensor,
    weight_expert0: Tensor,
    weight_expert1: Tensor,
    trans_b: bool = False,
) -> tuple[Tensor, Tensor]:
    """Multiplies the rows of two experts by their weights, in one launch on a GPU: ``input_i @ weight_i``.

    Gradients reach all four, each computed only if needed, and those needed in one launch.

    Args:
        input_expert0: (m_0, k_0); fp16, bf16, fp32 or fp64, any strides.
        input_expert1: (m_1, k_1); no size need be that of the other expert, and any may be 0.
        weight_expert0: (k_0, n_0), or (n_0, k_0) with ``trans_b``.
        weight_expert1: (k_1, n_1) likewise.
        trans_b: both weights are transposed, as nn.Linear stores them.

    Returns:
        (m_0, n_0) and (m_1, n_1).
    """
    checks.flag("dual_gemm", trans_b=trans_b)
    return dual_gemm(
        input_expert0, input_expert1, weight_expert0, weight_expert1, transpose_weight=not trans_b
    )


@speaks_of({"x": "input_act", "layout": "indices", "num_rows": "num_out_tokens", "row_to_slot": "indices"})
def permute(
    input_act: Tensor, indices: Tensor, num_out_tokens: int | None = None, max_token_num: int = 0
) -> tuple[Tensor, Tensor]:
    """Copies the row of each token to the places of its slots, in a stable order of experts.

    Args:
        input_act: (T, H); fp16, bf16, fp32 or fp64, any strides.
        indices: (T, topK) or (T,) expert ids, of int8 to int64; any number of experts. A negative one is dropped.
        num_out_tokens: rows of the result: slots whose row would be beyond are dropped, rows without a slot are 0.
            None or 0 is T * topK.
        max_token_num: not needed.

    Returns:
        permuted, (rows, H). row_id_map, (topK * T,) int32: entry k * T + t is the row of token t's k-th slot, or
        -1.
    """
    layout, row_id_map = sort_slots("permute", indices, 0 if num_out_tokens is None else num_out_tokens)
    return api.permute(input_act, layout), row_id_map


@speaks_of({"y": "input_act", "layout": "row_id_map", "slot_to_row": "row_id_map", "weights": "probs"})
def unpermute(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Adds up the rows of each token's slots, ``probs[t, k] * input_act[row_id_map[k * T + t]]``, in fp32.

    Gradients reach input_act and probs, each computed only if needed.

    Args:
        input_act: (rows, H); fp16, bf16, fp32 or fp64, any strides.
        row_id_map: (topK * T,) int32 or int64, as from :func:`permute`; slots whose row is not there add nothing.
        probs: (T, topK) of any float dtype; None or an empty tensor is topK = 1 with ones.

    Returns:
        (T, H).
    """
    op = "unpermute"
    weights = weights_of(op, "probs", probs, row_id_map)
    if weights is None:
        checks.tensor(op, "row_id_map", row_id_map, "(topK * T,)", checks.INTEGERS)
        tokens, top_k = row_id_map.shape[0], 1
    else:
        tokens, top_k = weights.shape
    return api.unpermute(input_act, read_map(op, input_act, row_id_map, tokens, top_k), weights)


@speaks_of(
    {
        "sections": "mrope_section",
        'order="channels"': "mrope_section",
        **{f"sections[{i}]": f"mrope_section[{i}]" for i in range(3)},
        "rotary_dim": "D",
        **NO_HEAD_AXIS,
    }
)
def multimodal_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Rotates q and k as :func:`anabranch.interop.wallx.backend.rope` does, into new tensors, with gradients.

    Args:
        q: (B, Hq, S, D); fp16, bf16, fp32 or fp64, any strides.
        k: (B, Hk, S, D).
        cos: (3, B, S, D) of any float dtype, or (B, S, D) without sections; no gradient.
        sin: like cos.
        mrope_section: three ints that add up to D / 2. Doubled, they are what backend.rope takes. None, False or an
            empty list: there is one row.

    Returns:
        (q, k) rotated.
    """
    if one_row(mrope_section):
        turned = rope(q, k, cos, sin)
    else:
        check_rows("multimodal_rope", q, k, cos)
        turned = mrope(q, k, cos, sin, _doubled(mrope_section, q.shape[-1]), order="channels")
    return cast(tuple[Tensor, Tensor], turned)


def _doubled(mrope_section: Sequence[int], channels: int) -> Sequence[int]:
    """The sections of all channels. Of those given errors speak, not of these; mrope refuses what is no list."""
    if not isinstance(mrope_section, (list, tuple)):
        return mrope_section
    for i, size in enumerate(mrope_section):
        checks.integer("multimodal_rope", f"sections[{i}]", size, minimum=0)
    if channels % 2 == 0 and (len(mrope_section) != 3 or 2 * sum(mrope_section) != channels):
        expected = f"three ints that add up to D / 2 = {channels // 2}"
        got = f"{list(mrope_section)}, which add up to {sum(mrope_section)}"
        raise ArgumentError("multimodal_rope", "mrope_section", expected=expected, got=got)
    return [2 * size for size in mrope_section]


@speaks_of()
def get_rope_index(
    input_ids: Tensor,
    spatial_merge_size: int,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    tokens_per_second: float,
    image_grid_thw: Grids | None = None,
    video_grid_thw: Grids | None = None,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The three positions of every token, (3, B, S), and deltas, (B, 1); see :func:`anabranch.rope_index`."""
    return rope_index(
        input_ids,
        spatial_merge_size=spatial_merge_size,
        image_token_id=image_token_id,
        video_token_id=video_token_id,
        vision_start_token_id=vision_start_token_id,
        tokens_per_second=tokens_per_second,
        image_grid_thw=image_grid_thw,
        video_grid_thw=video_grid_thw,
        second_per_grid_ts=second_per_grid_ts,
        attention_mask=attention_mask,
    )


@speaks_of()
def rot_pos_emb(inv_freq: Tensor, grid_thw: Grids, spatial_merge_size: int) -> Tensor:
    """The angles of every patch, (tokens, 2 * len(inv_freq)); see :func:`anabranch.vision_rotary`."""
    return vision_rotary(inv_freq, grid_thw, spatial_merge_size)


@speaks_of()
def get_window_index(
    grid_thw: Grids,
    window_size: int,
    spatial_merge_size: int,
    patch_size: int,
    spatial_merge_unit: int = 1,
) -> tuple[Tensor, Tensor]:
    """The order of merged tokens by window, and the windows' bounds; see :func:`anabranch.window_index`."""
    return window_index(grid_thw, window_size, spatial_merge_size, patch_size, spatial_merge_unit)
