"""Named prompts with the grids of real models, as arguments of rope_index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

START, IMAGE, VIDEO, END, TEXT, PAD = 1, 2, 3, 4, 5, 0
"""Token ids of the prompts built here."""


@dataclass(frozen=True)
class Vision:
    """An image or, with seconds between frames, a video; the grid counts patches."""

    grid: tuple[int, int, int]
    seconds: float | None = None


Part = int | Vision
"""A number of text tokens, or what stands between a start and an end token."""


@dataclass(frozen=True)
class Case:
    """A batch of prompts, padded to the longest, or more."""

    name: str
    rows: tuple[tuple[Part, ...], ...]
    merge: int = 2
    tokens_per_second: float = 1.0
    pad_left: bool = True
    extra_padding: int = 0

    def arguments(self, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
        """Every argument of rope_index, on the CPU; None where a list would be empty."""
        visions = [part for row in self.rows for part in row if isinstance(part, Vision)]
        images = [list(v.grid) for v in visions if v.seconds is None]
        videos = [list(v.grid) for v in visions if v.seconds is not None]
        tokens = [self._tokens(row) for row in self.rows]
        width = max(map(len, tokens), default=0) + self.extra_padding
        ids = torch.full((len(tokens), width), PAD, dtype=dtype)
        for line, row in zip(ids, tokens, strict=True):
            place = slice(width - len(row), width) if self.pad_left else slice(0, len(row))
            line[place] = torch.tensor(row, dtype=dtype)
        return {
            "input_ids": ids,
            "spatial_merge_size": self.merge,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "tokens_per_second": self.tokens_per_second,
            "image_grid_thw": torch.tensor(images) if images else None,
            "video_grid_thw": torch.tensor(videos) if videos else None,
            "second_per_grid_ts": torch.tensor([v.seconds for v in visions if v.seconds is not None])
            if videos
            else None,
            "attention_mask": (ids != PAD).long(),
        }

    def _tokens(self, row: tuple[Part, ...]) -> list[int]:
        tokens: list[int] = []
        for part in row:
            if isinstance(part, Vision):
                t, h, w = part.grid
                count = t * (h // self.merge) * (w // self.merge)
                tokens += [START, *[IMAGE if part.seconds is None else VIDEO] * count, END]
            else:
                tokens += [TEXT] * part
        return tokens


PHOTO = Vision((1, 52, 78))
CLIP = Vision((8, 22, 30), seconds=1.0)

CASES = (
    Case("qwen2_5_vl_photo", ((14, PHOTO, 30),), tokens_per_second=2),
    Case("qwen2_5_vl_clip", ((14, CLIP, 30),), tokens_per_second=2),
    Case("qwen2_5_vl_slow_clip", ((14, Vision((40, 8, 8), seconds=0.7), 30),), tokens_per_second=2),
    Case("qwen2_5_vl_chat", ((9, PHOTO, 20, CLIP, 7, PHOTO), (55,), (4, CLIP, 9)), tokens_per_second=2),
    Case("qwen2_5_vl_train", ((9, PHOTO, 20), (300,)), tokens_per_second=2, pad_left=False, extra_padding=8),
    Case("qwen2_vl_clip", ((14, CLIP, 30),)),
    Case("qwen3_vl_clip", ((14, *(8, Vision((1, 22, 30), seconds=1.0)) * 6, 30),)),
)
