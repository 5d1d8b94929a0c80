"""permute and unpermute in plain PyTorch: row gathers, and sums on slices that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anabranch._backends.eager.product import gather, whole_rows
from anabranch.ops.permute.call import PermuteCall, UnpermuteBackwardCall, UnpermuteCall
from anabranch.ops.precision import wide

SLICE = 2**17
"""Elements of the fp32 accumulator per slice: half a megabyte, which the second-level cache holds."""


def supports(call: PermuteCall | UnpermuteCall | UnpermuteBackwardCall) -> str | None:
    """Everything."""
    return None


def permute(call: PermuteCall, out: Tensor) -> None:
    """Writes (R, H): each row from its slot's token."""
    layout = call.layout
    slots, absent = _within(layout.row_to_slot, layout.slot_to_row.numel())
    if layout.slot_to_row.numel():
        gather(call.x, slots // layout.top_k, out)
    _zero(out, absent)


def unpermute(call: UnpermuteCall, out: Tensor) -> None:
    """Writes (T, H): the weighted sum over each token's slots, in slot order."""
    layout, acc = call.layout, wide(call.dtype)
    if layout.num_rows == 0:
        out.zero_()
        return
    y = whole_rows(call.y)
    rows, absent = _within(layout.slot_to_row, layout.num_rows)
    weights = None if call.weights is None else call.weights.to(acc).masked_fill(absent, 0)
    for tokens in _slices(*out.shape):
        total = torch.zeros_like(out[tokens], dtype=acc)
        for k in range(layout.top_k):
            term = y.index_select(0, rows[tokens, k]).to(acc)
            # A weight of zero is not enough: the row read in its stead may hold NaN.
            _zero(term, absent[tokens, k])
            if weights is None:
                total += term
            else:
                total.addcmul_(term, weights[tokens, k, None])
        out[tokens] = total


def unpermute_backward(call: UnpermuteBackwardCall, d_y: Tensor | None, d_weights: Tensor | None) -> None:
    """Writes the gradients asked for, both from one reading of the output's."""
    layout, acc = call.layout, wide(call.dtype)
    slots, no_slot = _within(layout.row_to_slot, layout.slot_to_row.numel())
    dots = call.grad.new_zeros(max(layout.num_rows, 1), dtype=acc)
    if layout.slot_to_row.numel():
        grad, weights = whole_rows(call.grad), call.weights.reshape(-1).to(acc)
        tokens = slots // layout.top_k
        for rows in _slices(layout.num_rows, grad.shape[1]):
            d_row = grad.index_select(0, tokens[rows]).to(acc)
            if d_weights is not None:
                assert call.y is not None
                dots[rows] = (d_row * call.y[rows]).sum(-1)
            if d_y is not None:
                d_y[rows] = d_row.mul_(weights[slots[rows], None])
    if d_y is not None:
        _zero(d_y, no_slot)
    if d_weights is not None:
        rows_of_slots, no_row = _within(layout.slot_to_row, layout.num_rows)
        d_weights.copy_(dots[rows_of_slots].masked_fill(no_row, 0))


def _within(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The indices, with 0 for those outside ``[0, size)``; and which those are."""
    absent = (index < 0) | (index >= size)
    return index.masked_fill(absent, 0), absent


def _zero(value: Tensor, absent: Tensor) -> None:
    """Zeroes rows: on the CPU only these, elsewhere without asking the device how many there are."""
    if value.device.type == "cpu":
        value.index_fill_(0, torch.nonzero(absent)[:, 0], 0)
    else:
        value.masked_fill_(absent[:, None], 0)


def _slices(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, SLICE // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
