"""What the position builders demand, and the frozen calls of host values that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks
from anabranch.ops.positions.segments import HOST, Grid, Segments, find_segments

MAX_SIZE = 2**31 - 1
"""Of each side of a grid."""
MAX_POSITION = 2**53
"""Ticks stay where fp64 counts exactly."""


@dataclass(frozen=True)
class RopeIndexCall:
    """``segments`` None: every token is text."""

    size: tuple[int, int]
    device: torch.device
    mask: Tensor | None
    segments: Segments | None
    tokens_per_second: float


@dataclass(frozen=True)
class VisionRotaryCall:
    """``grids`` count merged tokens."""

    inv_freq: Tensor
    grids: list[Grid]
    merge: int


@dataclass(frozen=True)
class WindowIndexCall:
    """``grids`` and ``window`` count merged tokens."""

    grids: list[Grid]
    window: int
    unit: int
    device: torch.device


def merged_grids(op: str, argument: str, grids: object, merge: int) -> list[Grid]:
    """Reads grids of patches on the host and divides h and w by ``merge``."""
    expected = "a tensor (N, 3) or a list of [t, h, w]"
    if isinstance(grids, Tensor):
        checks.tensor(op, argument, grids, "(N, 3)", checks.INTEGERS)
        if grids.shape[1] != 3:
            raise ArgumentError(op, argument, expected="shape (N, 3)", got=f"shape {tuple(grids.shape)}")
        _on_host(op, argument, grids)
        grids = grids.tolist()
    if not isinstance(grids, (list, tuple)):
        raise ArgumentTypeError(op, argument, expected=expected, got=type(grids).__name__)
    merged = []
    for grid in grids:
        if not isinstance(grid, (list, tuple)) or not all(_is_int(size) for size in grid):
            raise ArgumentTypeError(op, argument, expected=expected, got=f"an entry {grid!r}")
        if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            wanted = f"[t, h, w] of at least 1, h and w multiples of spatial_merge_size = {merge}"
            raise ArgumentError(op, argument, expected=wanted, got=list(grid))
        if max(grid) > MAX_SIZE:
            raise ArgumentError(op, argument, expected=f"[t, h, w] of at most {MAX_SIZE}", got=list(grid))
        t, h, w = map(int, grid)
        merged.append((t, h // merge, w // merge))
    return merged


def bind_rope_index(
    input_ids: Tensor,
    *,
    spatial_merge_size: int,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    tokens_per_second: float,
    image_grid_thw: object,
    video_grid_thw: object,
    second_per_grid_ts: object,
    attention_mask: Tensor | None,
) -> RopeIndexCall:
    """Checks every argument, then matches placeholder runs with grids."""
    op = "rope_index"
    checks.tensor(op, "input_ids", input_ids, "(B, S)", checks.INTEGERS)
    checks.integer(op, "spatial_merge_size", spatial_merge_size, minimum=1)
    ids = {
        "image_token_id": image_token_id,
        "video_token_id": video_token_id,
        "vision_start_token_id": vision_start_token_id,
    }
    for argument, value in ids.items():
        if not _is_int(value):
            raise ArgumentTypeError(op, argument, expected="an int", got=type(value).__name__)
        if not -(2**63) <= value < 2**63:
            raise ArgumentError(op, argument, expected="an id that fits int64", got=value)
    if len(set(ids.values())) < 3:
        expected = "an id apart from video_token_id and vision_start_token_id, which differ too"
        raise ArgumentError(op, "image_token_id", expected=expected, got=", ".join(map(str, ids.values())))
    if not isinstance(tokens_per_second, Real) or isinstance(tokens_per_second, bool):
        got = type(tokens_per_second).__name__
        raise ArgumentTypeError(op, "tokens_per_second", expected="an int or a float", got=got)
    if not 0 < tokens_per_second < math.inf:
        raise ArgumentError(op, "tokens_per_second", expected="above 0 and finite", got=tokens_per_second)
    if float(tokens_per_second) > MAX_POSITION:
        raise ArgumentError(op, "tokens_per_second", expected="at most 2**53", got=tokens_per_second)
    # As Python's own numbers: torch multiplies by no other, such as a Fraction.
    tokens_per_second = int(tokens_per_second) if _is_int(tokens_per_second) else float(tokens_per_second)
    images, videos = (
        [] if grids is None else merged_grids(op, argument, grids, spatial_merge_size)
        for argument, grids in (("image_grid_thw", image_grid_thw), ("video_grid_thw", video_grid_thw))
    )
    seconds = _seconds(op, second_per_grid_ts, videos, tokens_per_second)
    keep = _host_mask(op, attention_mask, input_ids)
    segments = None
    if image_grid_thw is not None or video_grid_thw is not None:
        _on_host(op, "input_ids", input_ids)
        segments = find_segments(op, input_ids.cpu(), keep, tuple(ids.values()), images, videos, seconds)
    size = (input_ids.shape[0], input_ids.shape[1])
    return RopeIndexCall(size, input_ids.device, attention_mask, segments, tokens_per_second)


def bind_vision_rotary(inv_freq: Tensor, grid_thw: object, spatial_merge_size: int) -> VisionRotaryCall:
    """Checks every argument."""
    op = "vision_rotary"
    checks.tensor(op, "inv_freq", inv_freq, "(F,)", checks.FLOATS)
    checks.integer(op, "spatial_merge_size", spatial_merge_size, minimum=1)
    grids = merged_grids(op, "grid_thw", grid_thw, spatial_merge_size)
    return VisionRotaryCall(inv_freq, grids, spatial_merge_size)


def bind_window_index(
    grid_thw: object,
    window_size: int,
    spatial_merge_size: int,
    patch_size: int,
    spatial_merge_unit: int | None,
) -> WindowIndexCall:
    """Checks every argument and turns pixels and patches into merged tokens."""
    op = "window_index"
    checks.integer(op, "window_size", window_size, minimum=1)
    checks.integer(op, "spatial_merge_size", spatial_merge_size, minimum=1)
    checks.integer(op, "patch_size", patch_size, minimum=1)
    unit = spatial_merge_size**2 if spatial_merge_unit is None else spatial_merge_unit
    checks.integer(op, "spatial_merge_unit", unit, minimum=1)
    grids = merged_grids(op, "grid_thw", grid_thw, spatial_merge_size)
    # No frame is larger than MAX_SIZE, so neither need a window be.
    window = min(window_size // spatial_merge_size // patch_size, MAX_SIZE)
    if window < 1:
        expected = f"at least spatial_merge_size * patch_size = {spatial_merge_size * patch_size}"
        raise ArgumentError(op, "window_size", expected=expected, got=window_size)
    total = sum(t * h * w for t, h, w in grids) * unit
    if total >= 2**31:
        raise ArgumentError(op, "grid_thw", expected="bounds that fit int32", got=f"an end of {total}")
    device = grid_thw.device if isinstance(grid_thw, Tensor) else HOST
    return WindowIndexCall(grids, window, unit, device)


def _on_host(op: str, argument: str, value: Tensor) -> None:
    """Demands values to read, which a tensor on the meta device has not."""
    if value.is_meta:
        raise ArgumentError(
            op, argument, expected="values to read on the host", got="a tensor on device meta"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _seconds(op: str, seconds: object, videos: list[Grid], tokens_per_second: float) -> Tensor:
    """(videos,) on the host, in the dtype the ticks are computed in."""
    argument, expected = "second_per_grid_ts", "a tensor (videos,) or a list of numbers"
    if seconds is None:
        return torch.ones(len(videos), dtype=torch.float32, device=HOST)
    if isinstance(seconds, Tensor):
        checks.tensor(op, argument, seconds, "(videos,)", checks.FLOATS + checks.INTEGERS)
        _on_host(op, argument, seconds)
        seconds = seconds.detach().cpu()
    elif isinstance(seconds, (list, tuple)):
        for value in seconds:
            if not isinstance(value, Real) or isinstance(value, bool):
                raise ArgumentTypeError(op, argument, expected=expected, got=f"an entry {value!r}")
            if isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63:
                raise ArgumentError(op, argument, expected="seconds that fit int64", got=value)
        whole = all(_is_int(value) for value in seconds)
        seconds = torch.tensor(seconds, dtype=torch.int64 if whole else torch.float32, device=HOST)
    else:
        raise ArgumentTypeError(op, argument, expected=expected, got=type(seconds).__name__)
    if len(seconds) != len(videos):
        wanted = f"one value for each of the {len(videos)} videos"
        raise ArgumentError(op, argument, expected=wanted, got=f"{len(seconds)} values")
    # In fp64 for the bound, and in its own dtype because half precision overflows early. NaN fails both.
    frames = torch.tensor([t - 1 for t, _, _ in videos], dtype=torch.int64, device=HOST)
    exact = frames.double() * seconds.double() * tokens_per_second
    fits = (exact < MAX_POSITION) & (frames * seconds * tokens_per_second < MAX_POSITION) & (seconds >= 0)
    if not bool(fits.all()):
        wanted = "finite seconds of at least 0, with ticks that count exactly"
        raise ArgumentError(op, argument, expected=wanted, got=seconds.tolist())
    return seconds


def _host_mask(op: str, mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """The mask's truth on the host; not read where it is bool and so cannot be wrong."""
    if mask is None:
        return None
    checks.tensor(op, "attention_mask", mask, "(B, S)", (torch.bool, *checks.INTEGERS))
    checks.shape(op, "attention_mask", mask, *input_ids.shape, means="of input_ids")
    checks.same_device(op, input_ids, "input_ids", attention_mask=mask)
    if mask.dtype == torch.bool:
        return mask
    _on_host(op, "attention_mask", mask)
    host = mask.cpu()
    if not bool(((host == 0) | (host == 1)).all()):
        got = f"values from {int(host.min())} to {int(host.max())}"
        raise ArgumentError(op, "attention_mask", expected="0 and 1 alone", got=got)
    return host != 0
