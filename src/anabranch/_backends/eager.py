"""What eager backends share: one product, the walk over experts in blocks that stay in cache, the sum over choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anabranch.layout import ExpertLayout

BLOCK = 2**18
"""Elements of pre-activation in a block: large enough to outweigh the calls, small enough for the cache."""

ONEDNN_WORTH = 2**20
"""Multiplications from which oneDNN's speed outweighs what it takes to call it."""

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
CONVERTS_FP16 = ONEDNN and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
MM_KEEPS_FP32 = "dtype" in torch.ops.aten.mm.overloads()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulator's dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exposes_accumulator(value: Tensor) -> bool:
    """Whether a product of half precision matrices can be had before it is rounded."""
    if value.device.type == "cpu":
        return value.dtype == torch.float16 and CONVERTS_FP16
    return value.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16) and MM_KEEPS_FP32


def matmul_nt(a: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """``out = a @ w.T + bias`` for any strides, rounded once; bias is (N,) or (M, N).

    ``out`` has the operands' dtype, or where :func:`exposes_accumulator` says so fp32.
    """
    on_cpu = a.device.type == "cpu"
    if on_cpu and a.dtype == torch.float16 and CONVERTS_FP16:
        # Without fp16 arithmetic in the CPU, torch.mm multiplies number by number.
        a, w = a.float(), w.float()
    if on_cpu and a.dtype == torch.float32 and ONEDNN and a.numel() * w.shape[0] >= ONEDNN_WORTH:
        # torch.mm would take MKL, which runs at half of oneDNN's speed on the CPUs of other vendors.
        value = torch.ops.mkldnn._linear_pointwise(a, w, None, "none", [], "")
    elif out.dtype == a.dtype:
        if bias is None:
            torch.mm(a, w.T, out=out)
        else:
            torch.addmm(bias.to(a.dtype), a, w.T, out=out)
        return
    else:
        value = torch.mm(a, w.T) if on_cpu else torch.mm(a, w.T, out_dtype=out.dtype)
    if bias is None:
        out.copy_(value)
    else:
        torch.add(value, bias, out=out)


def gather(value: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """``out = value[index]``, by rows."""
    # Gathering rows whose elements are scattered costs more than this one copy.
    return torch.index_select(value if value.stride(-1) == 1 else value.contiguous(), 0, index, out=out)


@dataclass(frozen=True)
class Block:
    """Some consecutive experts' places in a walk: ``start:stop``, and (expert, i, j) with i:j counted from start."""

    start: int
    stop: int
    experts: list[tuple[int, int, int]]

    @property
    def places(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def multiply(self, a: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Each expert's rows of ``a`` times its matrix in ``weight`` (E, N, K_dim), plus its row of ``bias`` (E, N)."""
        for e, i, j in self.experts:
            matmul_nt(a[i:j], weight[e], out[i:j], None if bias is None else bias[e])

    def multiply_wide(
        self, a: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """:meth:`multiply` into ``rounded``, and the same in :func:`wide`: unrounded where that is to be had."""
        if exposes_accumulator(a):
            product = torch.empty(rounded.shape, dtype=wide(a.dtype), device=a.device)
            self.multiply(a, weight, product, bias)
            rounded.copy_(product)
            return product
        self.multiply(a, weight, rounded, bias)
        return rounded.to(wide(a.dtype))

    def weight_gradient(self, grad: Tensor, x: Tensor, d_weight: Tensor, transposed: bool) -> None:
        """Each expert's ``grad.T @ x`` into its matrix of ``d_weight`` (E, N, K_dim), or (E, K_dim, N) if transposed."""
        left, right = (x, grad) if transposed else (grad, x)
        for e, i, j in self.experts:
            matmul_nt(left[i:j].T, right[i:j].T, d_weight[e])

    def bias_gradient(self, grad: Tensor, d_bias: Tensor) -> None:
        """The sum of each expert's rows of ``grad`` into its row of ``d_bias`` (E, N)."""
        for e, i, j in self.experts:
            d_bias[e] = grad[i:j].sum(0, dtype=wide(grad.dtype))


class Scratch:
    """Memory that blocks use one after another, by name; allocated when first asked for."""

    def __init__(self, walk: Walk, like: Tensor) -> None:
        self.rows = max((block.size for block in walk.blocks), default=0)
        self.like = like
        self.held: dict[str, Tensor] = {}

    def __call__(self, name: str, block: Block, columns: int) -> Tensor:
        """(block.size, columns) of ``like``'s dtype."""
        if name not in self.held:
            self.held[name] = self.like.new_empty(self.rows, columns)
        return self.held[name][: block.size]


@dataclass(frozen=True)
class Walk:
    """The rows that have a slot, in expert order; a row's place is its number among them.

    Attributes:
        blocks: cut at experts.
        slots: (places,) slot of each.
        tokens: (places,) token of each.
        rows: (places,) row of each, or None where place and row are the same.
        slot_to_place: (T, K); the number of places where a slot is dropped.
        idle: experts without a row.
    """

    blocks: list[Block]
    slots: Tensor
    tokens: Tensor
    rows: Tensor | None
    slot_to_place: Tensor
    idle: list[int]

    @classmethod
    def of(cls, layout: ExpertLayout, width: int) -> Walk:
        """Through a layout, in blocks for ``width`` columns. Reads the offsets on the host."""
        assert layout.offsets is not None
        offsets, rows = layout.offsets.tolist(), None
        slots = layout.row_to_slot[: offsets[-1]]
        if bool((slots < 0).any()):
            rows = torch.nonzero(slots >= 0)[:, 0]
            slots, offsets = slots[rows], torch.searchsorted(rows, layout.offsets.long()).tolist()
        slots, places = slots.long(), offsets[-1]
        inverse = torch.full_like(layout.slot_to_row.reshape(-1), places)
        inverse[slots] = torch.arange(places, dtype=inverse.dtype, device=inverse.device)
        blocks = list(_blocks(offsets, max(1, BLOCK // max(1, width))))
        idle = [e for e, (start, stop) in enumerate(pairwise(offsets)) if start == stop]
        tokens = slots // max(1, layout.top_k)
        return cls(blocks, slots, tokens, rows, inverse.view(layout.slot_to_row.shape), idle)

    @property
    def places(self) -> int:
        """How many."""
        return self.slots.shape[0]

    def of_rows(self, value: Tensor, block: Block) -> Tensor:
        """A block of a matrix in row order: a view, unless some row has no slot."""
        return value[block.places if self.rows is None else self.rows[block.places]]

    def put_back(self, part: Tensor, value: Tensor, block: Block) -> None:
        """Writes to ``value`` what :meth:`of_rows` took, if that was no view."""
        if self.rows is not None:
            value[self.rows[block.places]] = part

    def zero_rest(self, value: Tensor) -> None:
        """Zeroes the rows without a slot of a matrix in row order."""
        if self.rows is not None:
            value.zero_()
        else:
            value[self.places :].zero_()

    def new_gradient(self, weight: Tensor) -> Tensor:
        """Contiguous memory for an expert weight's gradient, zero for those experts that no block will write."""
        grad = weight.new_empty(weight.shape)
        for expert in self.idle:
            grad[expert].zero_()
        return grad

    def new_places(self, like: Tensor, columns: int) -> Tensor:
        """(places + 1, columns) for :meth:`combine` and :meth:`to_slots`: the last row is of dropped slots, and zero."""
        value = like.new_empty(self.places + 1, columns)
        value[self.places].zero_()
        return value

    def to_slots(self, value: Tensor) -> Tensor:
        """(T, K) of the (places + 1, 1) numbers in ``value``."""
        return value.view(-1)[self.slot_to_place.long()]

    def combine(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """(T, H): each token's sum over its choices of ``y`` (places + 1, H), in slot order, in :func:`wide`, rounded once."""
        tokens, top_k = self.slot_to_place.shape
        acc = wide(y.dtype)
        if weights is not None:
            weights = torch.where(self.slot_to_place < self.places, weights.to(acc), 0)
        bag = y.device.type == "cpu" and (weights is None or y.dtype == acc)
        if bag and top_k and tokens and y.shape[1]:
            return torch.nn.functional.embedding_bag(self.slot_to_place, y, mode="sum", per_sample_weights=weights)
        total = y.new_zeros(tokens, y.shape[1], dtype=acc)
        for k in range(top_k):
            term = y.index_select(0, self.slot_to_place[:, k]).to(acc)
            total = total + term if weights is None else total.addcmul_(term, weights[:, k, None])
        return total.to(y.dtype)


def _blocks(offsets: list[int], rows: int) -> Iterator[Block]:
    """Consecutive experts that have at least ``rows`` places together; those without any do not appear."""
    first, experts = 0, []
    for expert, (start, stop) in enumerate(pairwise(offsets)):
        if stop > start:
            experts.append((expert, start - first, stop - first))
        if stop - first >= rows:
            yield Block(first, stop, experts)
            first, experts = stop, []
    if experts:
        yield Block(first, offsets[-1], experts)
