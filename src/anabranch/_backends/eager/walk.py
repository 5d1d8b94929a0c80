"""The walk over experts, in blocks that stay in cache, and the sum over a token's choices at its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as nn

from anabranch._backends.eager import cuts
from anabranch._backends.eager.product import Block, EvenBlock
from anabranch.layout import ExpertLayout
from anabranch.ops.precision import wide


@dataclass(frozen=True)
class Walk:
    """The rows that have a slot, in expert order; a row's place is its number among them and the fillers.

    A filler repeats its expert's last row: it brings in no number that is not there anyway. What comes of it is
    nobody's.

    Attributes:
        blocks: cut at experts.
        slots: (places,) slot of each.
        tokens: (places,) int64, token of each: PyTorch gathers rows by int32 at two thirds of the speed.
        rows: (places,) row of each, or None where place and row are the same.
        slot_to_place: (T, K); the number of places where a slot is dropped.
        idle: experts without a row.
        places_of_rows: the place of each row; None unless the blocks are even.
    """

    blocks: Sequence[Block]
    slots: Tensor
    tokens: Tensor
    rows: Tensor | None
    slot_to_place: Tensor
    idle: list[int]
    places_of_rows: Tensor | None = None

    @classmethod
    def of(cls, layout: ExpertLayout, width: int, price: int | None = None) -> Walk:
        """Through a layout, in blocks for ``width`` columns.

        Even ones, if the counts allow, where a ``price`` is given: rows that one more block costs as much as.
        Reads the offsets on the host.
        """
        assert layout.offsets is not None
        offsets, rows = layout.offsets.tolist(), None
        slots = layout.row_to_slot[: offsets[-1]]
        if slots.numel() and int(slots.min()) < 0:
            rows = torch.nonzero(slots >= 0)[:, 0]
            slots, offsets = slots[rows], torch.searchsorted(rows, layout.offsets.long()).tolist()
        places, inverse = offsets[-1], layout.slot_to_row
        if rows is not None:
            inverse = torch.full_like(inverse, -1).view(-1)
            inverse[slots.long()] = torch.arange(places, dtype=inverse.dtype, device=inverse.device)
            inverse = inverse.view(layout.slot_to_row.shape)
        if places < inverse.numel():
            inverse = torch.where(inverse < 0, places, inverse)
        size, places_of_rows = max(1, cuts.BLOCK // max(1, width)), None
        blocks: Sequence[Block] = cuts.blocks(offsets, size)
        found: Sequence[EvenBlock] = ()
        if price is not None and rows is None:
            found = cuts.even_blocks(offsets, size, price, 2 * len(blocks))
        if found:
            blocks = found
            rows, places_of_rows = _filled(found, offsets)
            ends = places_of_rows
            if places < inverse.numel():
                ends = nn.pad(ends, (0, 1), value=rows.shape[0])  # where dropped slots go
            # Indexing with brackets takes several times as long.
            slots = slots.index_select(0, rows)
            inverse = ends.index_select(0, inverse.reshape(-1)).view(inverse.shape)
        idle = [e for e, (start, stop) in enumerate(pairwise(offsets)) if start == stop]
        tokens = _quotient(slots.to(torch.int64, copy=True), max(1, layout.top_k))
        return cls(blocks, slots, tokens, rows, inverse, idle, places_of_rows)

    @property
    def places(self) -> int:
        """How many."""
        return self.slots.shape[0]

    @property
    def fillers(self) -> Tensor | None:
        """(places,) bool, which are fillers; None unless the blocks are even."""
        if self.places_of_rows is None:
            return None
        marks = self.slots.new_ones(self.places, dtype=torch.bool)
        return marks.index_fill_(0, self.places_of_rows, False)

    @property
    def drops(self) -> bool:
        """Whether some slot has no place; for walks without fillers."""
        return self.places < self.slot_to_place.numel()

    def index(self, block: Block) -> slice | Tensor:
        """The rows of a block."""
        return block.places if self.rows is None else self.rows[block.places]

    def of_rows(self, value: Tensor, block: Block) -> Tensor:
        """A block of a matrix in row order: a view, unless some row has no slot."""
        return value[self.index(block)]

    def put_back(self, part: Tensor, value: Tensor, block: Block) -> None:
        """Writes a block of a matrix in row order, unless ``part`` is the view of it that :meth:`of_rows` gives."""
        if isinstance(block, EvenBlock):
            assert self.places_of_rows is not None
            torch.index_select(part, 0, self.places_of_rows[block.rows] - block.start, out=value[block.rows])
        elif self.rows is not None:
            value[self.rows[block.places]] = part

    def zero_rest(self, value: Tensor) -> None:
        """Zeroes the rows without a slot of a matrix in row order."""
        if self.places_of_rows is not None:
            value[self.places_of_rows.shape[0] :].zero_()
        elif self.rows is not None:
            value.zero_()
        else:
            value[self.places :].zero_()

    def new_gradient(self, weight: Tensor | None, needed: bool) -> Tensor | None:
        """Contiguous memory for an expert weight's gradient, if needed; zero where no block will write."""
        if weight is None or not needed:
            return None
        grad = weight.new_empty(weight.shape)
        for expert in self.idle:
            grad[expert].zero_()
        return grad

    def new_places(self, like: Tensor, columns: int) -> Tensor:
        """(places + 1, columns), for results by place: the last row stands for dropped slots and is zero."""
        value = like.new_empty(self.places + 1, columns)
        value[self.places].zero_()
        return value

    def to_slots(self, value: Tensor) -> Tensor:
        """(T, K) of the numbers in ``value``, which :meth:`new_places` made."""
        return value.view(-1)[self.slot_to_place]

    def combine(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """(T, H): each token's sum over its choices' places in ``y``, which :meth:`new_places` made.

        In the accumulator's dtype and in slot order, rounded once.
        """
        (tokens, top_k), acc = self.slot_to_place.shape, wide(y.dtype)
        if weights is not None:
            # A dropped slot's weight may be NaN.
            weights = torch.where(self.slot_to_place < self.places, weights.to(acc), 0)
        bag = y.device.type == "cpu" and (weights is None or y.dtype == acc)
        if bag and self.slot_to_place.numel() and y.shape[1]:
            return _sum_of_bags(y, self.slot_to_place, weights)
        total = y.new_zeros(tokens, y.shape[1], dtype=acc)
        for k in range(top_k):
            term = y.index_select(0, self.slot_to_place[:, k]).to(acc)
            total = total.add_(term) if weights is None else total.addcmul_(term, weights[:, k, None])
        return total.to(y.dtype)


class Scratch:
    """Memory that blocks use one after another, by name; allocated when first asked for."""

    def __init__(self, walk: Walk, like: Tensor) -> None:
        self.rows = max((block.size for block in walk.blocks), default=0)
        self.like = like
        self.held: dict[str, Tensor] = {}

    def __call__(self, name: str, block: Block, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """(block.size, columns) of ``like``'s dtype, or of another."""
        if name not in self.held:
            self.held[name] = self.like.new_empty(self.rows, columns, dtype=dtype)
        return self.held[name][: block.size]

    def wide(self, name: str, block: Block, rounded: Tensor) -> Tensor:
        """Memory for what ``rounded`` holds in the accumulator's dtype: itself, if it has that."""
        dtype = wide(rounded.dtype)
        return rounded if rounded.dtype == dtype else self(name, block, rounded.shape[1], dtype)

    def rounded(self, name: str, block: Block, value: Tensor) -> Tensor:
        """``value`` in ``like``'s dtype."""
        return value if value.dtype == self.like.dtype else self(name, block, value.shape[1]).copy_(value)


def _quotient(value: Tensor, divisor: int) -> Tensor:
    """``value // divisor``, in place, of numbers from 0 on: most divisors are powers of two, whose shift is fast."""
    if divisor & (divisor - 1) == 0:
        return value.bitwise_right_shift_(divisor.bit_length() - 1)
    return value.floor_divide_(divisor)


def _filled(blocks: Sequence[EvenBlock], offsets: list[int]) -> tuple[Tensor, Tensor]:
    """(row of each place, place of each row)."""
    firsts, steps, last = [], [], 0
    for block in blocks:
        for e, i, _ in block.experts:
            firsts.append(offsets[e])
            steps.append(block.start + i - last)
            last = block.start + i + offsets[e + 1] - offsets[e] - 1
    # torch.tensor takes several times as long.
    first, step = torch.frombuffer(array("q", firsts + steps), dtype=torch.int64).view(2, -1).unbind()
    # One place further with each row, but past the fillers with each expert's first.
    places_of_rows = first.new_ones(offsets[-1]).scatter_(0, first, step).cumsum_(0)
    # A filler has the number of the row before it.
    rows = first.new_zeros(blocks[-1].stop).index_fill_(0, places_of_rows[1:], 1).cumsum_(0)
    return rows, places_of_rows


def _sum_of_bags(value: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """(T, H): the sums of ``value``'s rows at ``index`` (T, K): embedding_bag without what its module form checks."""
    starts = torch.arange(0, index.numel(), index.shape[1], dtype=index.dtype, device=index.device)
    weights = None if weights is None else weights.reshape(-1)
    return torch.embedding_bag(value, index.reshape(-1), starts, False, 0, False, weights)[0]
