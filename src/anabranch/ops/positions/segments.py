"""Cuts token ids into runs of text, image and video, and gives each vision run its grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.errors import ArgumentError

Grid = tuple[int, int, int]

HOST = torch.device("cpu")
"""Named throughout, as a default device may be set."""

_NAMES = ("text", "image", "video")


@dataclass(frozen=True)
class Segments:
    """Runs of unpadded tokens, row after row, on the host; the V fields hold the vision runs alone."""

    keep: Tensor | None
    """(B, S) bool: the unpadded places; None: all."""
    row: Tensor
    """(G,) int64."""
    start: Tensor
    """(G,) int64, counted in unpadded tokens of the batch."""
    length: Tensor
    """(G,) int64."""
    vision: Tensor
    """(V,) int64: which of the G runs."""
    grids: list[Grid]
    """V merged t, h, w; their product is the run's length."""
    seconds: Tensor
    """(V,): seconds between frames; 0 for images."""


def find_segments(
    op: str,
    ids: Tensor,
    keep: Tensor | None,
    token_ids: tuple[int, int, int],
    images: list[Grid],
    videos: list[Grid],
    seconds: Tensor,
) -> Segments:
    """Cuts, matches and checks. ``token_ids``: image, video, vision start."""
    image_id, video_id, start_id = token_ids
    keep = None if keep is None else keep.cpu()
    row = torch.arange(ids.shape[0], device=HOST)[:, None].expand(ids.shape)
    tokens, row = (x.reshape(-1) if keep is None else x[keep] for x in (ids, row))
    kind = (tokens == image_id).to(torch.int8) + 2 * (tokens == video_id).to(torch.int8)

    cut = torch.ones(len(tokens), dtype=torch.bool, device=HOST)
    cut[1:] = (kind[1:] != kind[:-1]) | (row[1:] != row[:-1])
    start = cut.nonzero().flatten()
    length = torch.diff(start, append=torch.tensor([len(tokens)], device=HOST))
    row, kind = row[start], kind[start]
    vision = kind.nonzero().flatten()

    def place(run: int) -> str:
        """Where a run starts, in the caller's coordinates."""
        seen = int(start[run])
        flat = seen if keep is None else int(keep.flatten().nonzero()[seen])
        return f"row {flat // ids.shape[1]}, column {flat % ids.shape[1]}"

    # Led within the row: at a row's start the token before is another row's, or (index -1) the batch's last.
    led = (tokens[start[vision] - 1] == start_id) & (vision > 0) & (row[vision - 1] == row[vision])
    if not bool(led.all()):
        run = int(vision[led.logical_not().nonzero()[0]])
        expected = f"vision_start_token_id = {start_id} before each run of placeholders"
        got = f"a run of {_NAMES[kind[run]]} tokens without it at {place(run)}"
        raise ArgumentError(op, "input_ids", expected=expected, got=got)

    kinds = kind[vision].tolist()
    for which, grids in ((1, images), (2, videos)):
        runs = kinds.count(which)
        if runs != len(grids):
            expected = f"one grid for each of the {runs} runs of {_NAMES[which]} tokens in input_ids"
            raise ArgumentError(op, f"{_NAMES[which]}_grid_thw", expected=expected, got=f"{len(grids)} grids")
    queues = iter(images), iter(videos)
    matched = [next(queues[which - 1]) for which in kinds]

    lengths = length[vision].tolist()
    for run, which, (t, h, w), got in zip(vision.tolist(), kinds, matched, lengths, strict=True):
        if got != t * h * w:
            grid = f"merged grid {t} x {h} x {w}"
            expected = f"{t * h * w} {_NAMES[which]} tokens at {place(run)}, as {grid} says"
            raise ArgumentError(op, "input_ids", expected=expected, got=got)
    pace = torch.zeros(len(vision), dtype=seconds.dtype, device=HOST)
    pace[kind[vision] == 2] = seconds
    return Segments(keep, row, start, length, vision, matched, pace)
