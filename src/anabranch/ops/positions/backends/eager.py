"""Plain torch; loops over nothing, whatever the number of rows, images and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.ops.positions.call import RopeIndexCall, VisionRotaryCall, WindowIndexCall
from anabranch.ops.positions.segments import Segments


def rope_index(call: RopeIndexCall) -> tuple[Tensor, Tensor]:
    """(3, B, S) positions and (B, 1) deltas."""
    if call.segments is None:
        return _text_index(call)
    (rows, width), segments = call.size, call.segments
    ticks, first_tick = _ticks(segments, call.tokens_per_second)
    frames, height, columns = segments.grid.unbind(1)

    # How far each run moves the position, and where it starts: the sum of those before it in its row.
    span = segments.length.clone()
    last_tick = ticks[first_tick + frames - 1]
    span[segments.vision] = torch.stack([last_tick + 1, height, columns]).amax(0)
    base = span.cumsum(0) - span
    base = base - base[torch.searchsorted(segments.row, segments.row)]

    total = int(segments.length.sum())
    run, offset = _spread(segments.length, total)
    index = (base[run] + offset).expand(3, -1).clone()

    lengths = segments.length[segments.vision]
    run, offset = _spread(lengths, int(lengths.sum()))
    rest, x = _divide(offset, columns[run])
    frame, y = _divide(rest, height[run])
    which = segments.vision[run]
    coordinates = torch.stack([ticks[first_tick[run] + frame], y, x])
    index[:, segments.start[which] + offset] = base[which] + coordinates

    positions = index
    if segments.keep is not None:
        positions = torch.ones(3, rows * width, dtype=torch.int64)
        positions[:, segments.keep.flatten()] = index
    deltas = torch.full((rows,), -width, dtype=torch.int64).index_add_(0, segments.row, span)
    return positions.view(3, rows, width).to(call.device), deltas[:, None].to(call.device)


def _text_index(call: RopeIndexCall) -> tuple[Tensor, Tensor]:
    (rows, width), mask = call.size, call.mask
    if mask is None:
        index = torch.arange(width, device=call.device).expand(3, rows, width)
        return index.clone(), torch.zeros(rows, 1, dtype=torch.int64, device=call.device)
    index = (mask.long().cumsum(1) - 1).masked_fill(mask == 0, 1)
    # The largest position of no token at all is -1, so that a row of width 0 starts at 0.
    top = index.amax(1, keepdim=True) if width else index.new_full((rows, 1), -1)
    return index.expand(3, rows, width).clone(), top + 1 - width


def _ticks(segments: Segments, tokens_per_second: float) -> tuple[Tensor, Tensor]:
    """Temporal offset of every frame of every vision run, and which of them is a run's first."""
    frames = segments.grid[:, 0]
    run, frame = _spread(frames, int(frames.sum()))
    # The order of the products and their dtype are part of the contract.
    ticks = (frame * segments.seconds[run] * tokens_per_second).long()
    return ticks, frames.cumsum(0) - frames


def vision_rotary(call: VisionRotaryCall) -> Tensor:
    """(tokens, 2F) angles."""
    merge, inv_freq = call.merge, call.inv_freq
    sizes = [t * h * w * merge * merge for t, h, w in call.grids]
    table = _table([(size, h, w) for size, (_, h, w) in zip(sizes, call.grids, strict=True)], inv_freq.device)
    lengths, height, width = table.unbind(0)
    image, offset = _spread(lengths, sum(sizes))
    block, inner = _divide(offset, merge * merge)
    block_row, block_column = _divide(block, width[image])
    block_row = block_row % height[image]  # each frame starts over
    inner_row, inner_column = _divide(inner, merge)
    place = torch.stack([block_row * merge + inner_row, block_column * merge + inner_column], 1)
    return (place[:, :, None].to(inv_freq.dtype) * inv_freq).flatten(1)


def window_index(call: WindowIndexCall) -> tuple[Tensor, Tensor]:
    """(merged tokens,) order and (windows + 1,) bounds."""
    side, rows, windows, tokens = call.window, [], 0, 0
    for t, h, w in call.grids:
        down, across = -(-h // side), -(-w // side)
        rows.append((t * down * across, down, across, h, w, tokens))
        windows, tokens = windows + t * down * across, tokens + t * h * w
    lengths, downs, acrosses, height, width, first = _table(rows, call.device, columns=6).unbind(0)

    image, offset = _spread(lengths, windows)
    rest, window_column = _divide(offset, acrosses[image])
    frame, window_row = _divide(rest, downs[image])
    height, width = height[image], width[image]
    top, left = window_row * side, window_column * side
    columns = (width - left).clamp(max=side)
    counts = (height - top).clamp(max=side) * columns
    corner = first[image] + (frame * height + top) * width + left

    window, offset = _spread(counts, tokens)
    y, x = _divide(offset, columns[window])
    bounds = torch.zeros(windows + 1, dtype=torch.int32, device=call.device)
    bounds[1:] = counts.cumsum(0) * call.unit
    return corner[window] + y * width[window] + x, bounds


def _table(rows: Sequence[tuple[int, ...]], device: torch.device, columns: int = 3) -> Tensor:
    """(columns, rows) int64 on a device, without waiting for it."""
    table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), columns).T.contiguous()
    return table.to(device, non_blocking=True)


def _spread(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each element of consecutive runs: its run, and its offset in it. ``total`` saves a device read."""
    run = torch.repeat_interleave(lengths, output_size=total)
    start = lengths.cumsum(0) - lengths
    return run, torch.arange(total, device=lengths.device) - start[run]


def _divide(value: Tensor, by: Tensor | int) -> tuple[Tensor, Tensor]:
    quotient = value // by
    return quotient, value - quotient * by
