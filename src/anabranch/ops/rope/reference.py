"""The oracle of rope and mrope: one 2x2 matrix a pair of channels, in plain, differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.precision import wide
from anabranch.ops.rope.call import RopeCall, check_memory


def rope(call: RopeCall) -> tuple[Tensor, Tensor | None]:
    """The rotated q and k, each rounded once."""
    q = _rotate(call, call.q)
    k = None if call.k is None else _rotate(call, call.k)
    if not call.inplace and call.out is None:
        return q, k
    check_memory(call)
    q_out, k_out = (call.q, call.k) if call.out is None else call.out
    return q_out.copy_(q), None if k_out is None or k is None else k_out.copy_(k)


def _rotate(call: RopeCall, x: Tensor) -> Tensor:
    acc = wide(call.dtype)
    channels = list(x.unbind(-1))
    for pair in range(call.pairs):
        i, j = (pair, pair + call.pairs) if call.pairing == "half" else (2 * pair, 2 * pair + 1)
        a, b = channels[i], channels[j]
        (c, s, inside), (c_b, s_b, _) = (_entries(call, x, pair, channel, acc) for channel in (i, j))
        upper, lower = (-s, s_b) if not call.transpose else (s_b, -s)
        # Widened once, so that the two parts of a gradient add up before they are rounded.
        wide_a, wide_b = a.to(acc), b.to(acc)
        first = wide_a * c + wide_b * upper
        second = wide_b * c_b + wide_a * lower
        channels[i] = torch.where(inside, first.to(call.dtype), a)
        channels[j] = torch.where(inside, second.to(call.dtype), b)
    return torch.stack(channels, -1)


def _entries(
    call: RopeCall, x: Tensor, pair: int, channel: int, acc: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """cos and sin of one channel, to multiply ``x[..., channel]``, and where they hold."""
    column = pair if call.cos.shape[-1] == call.pairs else channel
    cos, sin = call.cos[..., column].to(acc), call.sin[..., column].to(acc)
    row = _row(call, pair, channel)
    if call.positions is None:
        cos, sin = (cos[row], sin[row]) if call.sections else (cos, sin)
        inside = torch.ones_like(cos, dtype=torch.bool)
    else:
        positions = call.positions[row] if call.sections else call.positions
        inside = (positions >= 0) & (positions < cos.shape[0])
        # One more entry stands for every position outside.
        index = torch.where(inside, positions, cos.shape[0]).long()
        cos = torch.cat((cos, cos.new_ones(1)))[index]
        sin = torch.cat((sin, sin.new_zeros(1)))[index]
    if x.dim() == 3:
        return cos[0, :, None], sin[0, :, None], inside[0, :, None]
    return cos.unsqueeze(call.head_axis), sin.unsqueeze(call.head_axis), inside.unsqueeze(call.head_axis)


def _row(call: RopeCall, pair: int, channel: int) -> int:
    """Which row a channel of a pair follows."""
    if not call.sections:
        return 0
    temporal, height, width = call.sections
    if call.order != "interleaved":
        place = channel if call.order == "channels" else pair
        return 0 if place < temporal else 1 if place < temporal + height else 2
    turn, row = divmod(pair, 3)
    return row if row and turn < (height, width)[row - 1] else 0
