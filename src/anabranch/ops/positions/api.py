"""The position builders: rope_index, vision_rotary, window_index."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anabranch.ops.positions import builders
from anabranch.ops.positions.call import bind_rope_index, bind_vision_rotary, bind_window_index


def rope_index(
    input_ids: Tensor,
    *,
    spatial_merge_size: int,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    tokens_per_second: float = 1.0,
    image_grid_thw: Tensor | Sequence[Sequence[int]] | None = None,
    video_grid_thw: Tensor | Sequence[Sequence[int]] | None = None,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gives every token its temporal, height and width position (Qwen2-VL, Qwen2.5-VL).

    Text advances all three axes by one a token. An image or video that starts at position p gives its token
    of frame f, row y and column x of the merged grid the positions (p + tick(f), p + y, p + x), and what
    follows it starts one past the largest of them. tick(f) is 0 for an image, and for a video the integer
    part of f * second_per_grid_ts[video] * tokens_per_second, multiplied in that order and in the dtype of
    second_per_grid_ts (a list with a float in it counts as float32). The defaults make it f itself, which is
    Qwen2-VL. Qwen3-VL: pass one grid (1, h, w) a frame. Source: Qwen2.5-VL, ``get_rope_index``, as first
    published. transformers later truncated the seconds to an integer first; its 5.x ignores the ticks in what
    follows a video, puts 0 at padded places and counts deltas from the unpadded length.

    With neither grid given, every token is text and the ids are not read. Otherwise the n-th run of image
    (video) tokens in the batch, row by row, belongs to the n-th grid, and the ids are read on the host.

    Args:
        input_ids: (B, S) int64 or int32.
        spatial_merge_size: patches merged along h, and along w, into one token; it divides every h and w.
        image_token_id: placeholder of an image's tokens.
        video_token_id: placeholder of a video's tokens.
        vision_start_token_id: the token right before each run of placeholders.
        tokens_per_second: temporal positions a second of video takes; above 0.
        image_grid_thw: (N, 3), in patches: frames, height, width of each image. A tensor of int64 or int32 on
            any device, or a list of lists, which needs no device read.
        video_grid_thw: as image_grid_thw, of the videos.
        second_per_grid_ts: (videos,) seconds between two frames of each video; None: 1.0.
        attention_mask: (B, S) bool, or int64 or int32 of 0 and 1, where input_ids is; 0 is padding, on any
            side. None: no padding. An integer mask is read on the host.

    Returns:
        position_ids, (3, B, S) int64: t, h, w; 1 at padded places. deltas, (B, 1) int64: the position of the
        next token minus S, to add to a token's index while decoding; -S for a row that is all padding. With
        neither grid it is published as the row's largest position, padded places included, plus 1 minus S.
        Both are where input_ids is.

    Raises:
        ArgumentError: placeholders and grids that do not match (another number of runs than grids, a run
            longer or shorter than its grid, a run without its start token), or a bad value or shape.
        ArgumentTypeError: a bad type or dtype.
    """
    return builders.rope_index(
        bind_rope_index(
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
    )


def vision_rotary(
    inv_freq: Tensor, grid_thw: Tensor | Sequence[Sequence[int]], spatial_merge_size: int
) -> Tensor:
    """Gives every patch the angles of its row and column, in the order of the vision tower.

    That order is image, frame, then block of spatial_merge_size by spatial_merge_size patches, row-major
    within and across blocks. Every frame repeats the same angles. Source: Qwen2-VL and Qwen2.5-VL,
    ``rot_pos_emb``.

    Args:
        inv_freq: (F,) fp16, bf16, fp32 or fp64: radians a patch. Differentiable.
        grid_thw: (N, 3), in patches: frames, height, width. A tensor of int64 or int32 on any device, or a
            list of lists, with which nothing waits for the device.
        spatial_merge_size: side of a block in patches; it divides every h and w.

    Returns:
        (tokens, 2F), in the dtype and on the device of inv_freq: row * inv_freq, then column * inv_freq.
        tokens is the sum of t * h * w. Positions are first rounded to that dtype, as published: in bf16 they
        are exact to 256.

    Raises:
        ArgumentError: a bad value or shape, such as a grid that spatial_merge_size does not divide.
        ArgumentTypeError: a bad type or dtype.
    """
    return builders.vision_rotary(bind_vision_rotary(inv_freq, grid_thw, spatial_merge_size))


def window_index(
    grid_thw: Tensor | Sequence[Sequence[int]],
    window_size: int,
    spatial_merge_size: int,
    patch_size: int,
    spatial_merge_unit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Orders merged tokens by attention window, and gives the windows' bounds.

    A window is a square of window_size // spatial_merge_size // patch_size merged tokens a side, cut short at
    the right and bottom borders of a frame. Source: Qwen2.5-VL, ``get_window_index``.

    Args:
        grid_thw: (N, 3), in patches: frames, height, width. A tensor of int64 or int32, or a list of lists,
            with which nothing waits for the device.
        window_size: side of a window in pixels.
        spatial_merge_size: patches merged along h, and along w, into one token; it divides every h and w.
        patch_size: side of a patch in pixels.
        spatial_merge_unit: what one merged token adds to the bounds; None: spatial_merge_size ** 2, so that
            they count patches.

    Returns:
        index, (merged tokens,) int64: x[index] is in window order, and argsort(index) undoes it. cu_seqlens,
        (windows + 1,) int32: where each window starts, and the end. Windows go by image, frame, row, column.
        None is empty, as in transformers 5.x; 4.x also lists empty ones past a frame that divides into whole
        windows, and its model then drops them. Both are where a tensor grid_thw is; on the CPU for a list.

    Raises:
        ArgumentError: a bad value or shape, such as a window smaller than one merged token.
        ArgumentTypeError: a bad type or dtype.
    """
    return builders.window_index(
        bind_window_index(grid_thw, window_size, spatial_merge_size, patch_size, spatial_merge_unit)
    )
