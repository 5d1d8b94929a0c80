"""The position builders as loops over tokens: slow, and what is right. Takes valid arguments, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    """(3, B, S) positions and (B, 1) deltas. Placeholders alone tell where a run starts."""
    rows, width = input_ids.shape
    positions = torch.ones(3, rows, width, dtype=torch.int64)
    deltas = torch.zeros(rows, 1, dtype=torch.int64)
    text_only = image_grid_thw is None and video_grid_thw is None
    images, videos = iter(_lists(image_grid_thw)), iter(_lists(video_grid_thw))
    seconds = iter([1.0] * len(_lists(video_grid_thw)) if second_per_grid_ts is None else second_per_grid_ts)
    for b in range(rows):
        places = [s for s in range(width) if attention_mask is None or attention_mask[b, s]]
        index: list[tuple[int, int, int]] = []
        while len(index) < len(places):
            start = max((max(p) for p in index), default=-1) + 1
            token = int(input_ids[b, places[len(index)]])
            if text_only or token not in (image_token_id, video_token_id):
                index.append((start, start, start))
                continue
            t, h, w = next(images if token == image_token_id else videos)
            pace = 0 if token == image_token_id else next(seconds)
            for frame in range(t):
                tick = int((torch.tensor(frame) * pace * tokens_per_second).long())
                for y in range(h // spatial_merge_size):
                    for x in range(w // spatial_merge_size):
                        index.append((start + tick, start + y, start + x))
        for place, position in zip(places, index, strict=True):
            positions[:, b, place] = torch.tensor(position)
        following = max((max(p) for p in index), default=-1) + 1
        if text_only and width:
            following = int(positions[:, b].max()) + 1
        deltas[b] = following - width
    return positions, deltas


def vision_rotary(
    inv_freq: Tensor, grid_thw: Tensor | Sequence[Sequence[int]], spatial_merge_size: int
) -> Tensor:
    """(tokens, 2F) angles."""
    m = spatial_merge_size
    angles = [inv_freq.new_zeros(0, 2 * len(inv_freq))]
    for t, h, w in _lists(grid_thw):
        for _ in range(t):
            for top in range(0, h, m):
                for left in range(0, w, m):
                    for y in range(top, top + m):
                        for x in range(left, left + m):
                            place = torch.tensor([[y], [x]], dtype=inv_freq.dtype)
                            angles.append((place * inv_freq).reshape(1, -1))
    return torch.cat(angles)


def window_index(
    grid_thw: Tensor | Sequence[Sequence[int]],
    window_size: int,
    spatial_merge_size: int,
    patch_size: int,
    spatial_merge_unit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(merged tokens,) order and (windows + 1,) bounds."""
    side = window_size // spatial_merge_size // patch_size
    unit = spatial_merge_size**2 if spatial_merge_unit is None else spatial_merge_unit
    index: list[int] = []
    bounds, base = [0], 0
    for t, h, w in _lists(grid_thw):
        rows, columns = h // spatial_merge_size, w // spatial_merge_size
        for _ in range(t):
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    for y in range(top, min(top + side, rows)):
                        for x in range(left, min(left + side, columns)):
                            index.append(base + y * columns + x)
                    bounds.append(len(index) * unit)
            base += rows * columns
    return torch.tensor(index, dtype=torch.int64), torch.tensor(bounds, dtype=torch.int32)


def _lists(grids: Tensor | Sequence[Sequence[int]] | None) -> list[list[int]]:
    return [] if grids is None else [[int(size) for size in grid] for grid in grids]
