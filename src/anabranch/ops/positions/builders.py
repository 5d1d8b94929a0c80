"""Plain torch; loops over images, never over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from anabranch.ops.positions.call import RopeIndexCall, VisionRotaryCall, WindowIndexCall
from anabranch.ops.positions.segments import HOST, Grid


def rope_index(call: RopeIndexCall) -> tuple[Tensor, Tensor]:
    """(3, B, S) positions and (B, 1) deltas."""
    if call.segments is None:
        return _text_index(call)
    (rows, width), segments = call.size, call.segments
    # The order of the products and their dtype are part of the contract.
    ticks = [
        (torch.arange(t, device=HOST) * seconds * call.tokens_per_second).long()
        for (t, _, _), seconds in zip(segments.grids, segments.seconds.unbind(), strict=True)
    ]

    # How far each run moves the position, and where it starts: the sum of those before it in its row.
    span = segments.length.clone()
    reach = [max(int(tick[-1]) + 1, h, w) for tick, (_, h, w) in zip(ticks, segments.grids, strict=True)]
    span[segments.vision] = torch.tensor(reach, dtype=torch.int64, device=HOST)
    base = span.cumsum(0) - span
    base = base - base[torch.searchsorted(segments.row, segments.row)]

    lead = (base - segments.start).repeat_interleave(segments.length)
    index = (lead + torch.arange(len(lead), device=HOST)).repeat(3, 1)
    places = torch.stack([base, segments.start])[:, segments.vision].T.tolist()
    for tick, (t, h, w), (first, start) in zip(ticks, segments.grids, places, strict=True):
        block = index[:, start : start + t * h * w].view(3, t, h, w)
        block[0] = (tick + first)[:, None, None]
        block[1] = torch.arange(first, first + h, device=HOST)[:, None]
        block[2] = torch.arange(first, first + w, device=HOST)

    positions = index
    if segments.keep is not None:
        positions = torch.ones(3, rows * width, dtype=torch.int64, device=HOST)
        positions[:, segments.keep.flatten()] = index
    deltas = torch.full((rows,), -width, dtype=torch.int64, device=HOST).index_add_(0, segments.row, span)
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


def vision_rotary(call: VisionRotaryCall) -> Tensor:
    """(tokens, 2F) angles."""
    merge, inv_freq = call.merge, call.inv_freq
    angles = [inv_freq.new_empty(0, 2 * len(inv_freq))]
    for height, width, frames in _alike(call.grids):
        row = torch.arange(height * merge, device=inv_freq.device).view(height, 1, merge, 1)
        column = torch.arange(width * merge, device=inv_freq.device).view(1, width, 1, merge)
        place = torch.stack(torch.broadcast_tensors(row, column), -1).view(-1, 2, 1)
        angle = (place.to(inv_freq.dtype) * inv_freq).flatten(1)
        angles.append(angle.expand(frames, -1, -1).flatten(0, 1))
    return torch.cat(angles)


def window_index(call: WindowIndexCall) -> tuple[Tensor, Tensor]:
    """(merged tokens,) order and (windows + 1,) bounds."""
    side, device = call.window, call.device
    orders, counts, tokens = [torch.empty(0, dtype=torch.int64, device=device)], [], 0
    for height, width, frames in _alike(call.grids):
        size, down, across = height * width, -(-height // side), -(-width // side)
        row, column = (torch.arange(n, device=device) // side for n in (height, width))
        order = (row[:, None] * across + column).flatten().argsort(stable=True)
        first = torch.arange(tokens, tokens + frames * size, size, device=device)
        orders.append((first[:, None] + order).flatten())
        band, stripe = (
            (n - torch.arange(0, n, side, device=device)).clamp(max=side) for n in (height, width)
        )
        counts.append((band[:, None] * stripe).expand(frames, down, across).flatten())
        tokens += frames * size
    bounds = torch.zeros(1 + sum(map(len, counts)), dtype=torch.int32, device=device)
    if counts:
        bounds[1:] = torch.cat(counts).cumsum(0) * call.unit
    return torch.cat(orders), bounds


def _alike(grids: list[Grid]) -> Iterator[tuple[int, int, int]]:
    """Height, width and number of frames of each stretch of frames of one size."""
    for (height, width), stretch in groupby(grids, key=lambda grid: grid[1:]):
        yield height, width, sum(t for t, _, _ in stretch)
