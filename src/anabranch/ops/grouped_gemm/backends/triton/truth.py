"""The truth about some rows of a product, by which the tuner checks its candidates: plain PyTorch, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from anabranch.epilogues import Epilogue
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN
from anabranch.tuning import Sample

if TYPE_CHECKING:
    from anabranch.ops.grouped_gemm.backends.triton.tuned import Gemm, WeightGradient

SAMPLED = 2**25
"""Elements of a result that are compared with the truth, at most."""


def of_gemm(product: Gemm) -> list[Sample]:
    """The output and, if it is kept, the pre-activation: every expert's first and last rows and some between."""
    layout = product.layout
    index, counts = some_rows(layout, product.weight.shape[1])
    z, y = _values(product, index, counts, torch.float64)
    plain_z, plain_y = _values(product, index, counts, None)
    terms = product.weight.shape[2] + 1  # the bias
    if product.out_rows is ROW:
        out = Sample("out", index, y, plain_y, terms)
    else:
        slots = layout.row_to_slot[index].long()
        empty = torch.nonzero(layout.slot_to_row.reshape(-1) < 0)[:64, 0]
        zeros = y.new_zeros(len(empty), y.shape[1])
        live = slots >= 0
        places = torch.cat((slots[live], empty))
        truth, plain = torch.cat((y[live], zeros)), torch.cat((plain_y[live], zeros.to(plain_y)))
        out = Sample("out", places, truth, plain, terms)
    return [out] if product.h is None else [out, Sample("h", index, z, plain_z, terms)]


def some_rows(layout: ExpertLayout, columns: int) -> tuple[Tensor, list[int]]:
    """Rows of which so many columns are compared, sorted, and how many are each expert's: the last are nobody's."""
    starts = _starts(layout)
    rows = _spread(starts, max(1, SAMPLED // max(columns, 1)))
    # Rows that are nobody's are zero, and so are slots without a row.
    unused = list(range(starts[-1], layout.num_rows))[:: max(1, (layout.num_rows - starts[-1]) // 64)]
    index = torch.tensor([*itertools.chain(*rows), *unused], dtype=torch.int64, device=layout.device)
    return index, [len(some) for some in rows]


def multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``x @ weight[expert].T + bias[expert]`` of rows, so many of each expert; zeros in the others."""
    z = x.new_zeros(len(x), weight.shape[1], dtype=dtype)
    stop = 0
    for expert, count in enumerate(counts):
        start, stop = stop, stop + count
        if count:
            added = None if bias is None else bias[expert].to(dtype)
            z[start:stop] = F.linear(x[start:stop].to(dtype), weight[expert].to(dtype), added)
    return z


def split(z: Tensor, epilogue: Epilogue, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The operands of an epilogue."""
    parts = (z[:, 0::2], z[:, 1::2]) if interleaved else z.chunk(epilogue.columns, -1)
    return tuple(part.to(dtype) for part in parts)


def _values(
    product: Gemm, rows: Tensor, counts: Sequence[int], wide: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(pre-activation, output) of rows, so many of each expert, in fp64 or as PyTorch computes in their precision."""
    slots = product.layout.row_to_slot[rows].long()
    dead = (slots < 0)[:, None]
    slots = slots.clamp(min=0)
    x = product.x[_places(rows, slots, product.layout.top_k, product.x_rows)].masked_fill(dead, 0)
    dtype = wide or x.dtype
    z = multiplied(x, product.weight, product.bias, counts, dtype).masked_fill_(dead, 0)
    y = product.epilogue.forward(*split(z, product.epilogue, product.interleaved, wide or torch.float32))
    if product.scale is not None:
        y = y * product.scale.reshape(-1, 1)[slots].masked_fill(dead, 0).to(y.dtype)
    return z, y.masked_fill(dead, 0).to(dtype)


def of_weight_gradient(product: WeightGradient) -> list[Sample]:
    """Some rows of every expert's gradient."""
    layout = product.layout
    experts, n, k_dim = product.d_weight.shape
    (columns,) = _spread([0, n], max(1, min(32, SAMPLED // max(experts * k_dim, 1))))
    some = torch.tensor(columns, device=product.device)
    truth = torch.zeros(experts, len(columns), k_dim, dtype=torch.float64, device=product.device)
    plain = torch.zeros_like(truth, dtype=product.x.dtype)
    for expert, (start, stop) in enumerate(itertools.pairwise(_starts(layout))):
        rows = torch.arange(start, stop, device=product.device)
        slots = layout.row_to_slot[start:stop].long()
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        d_z = product.d_z[_places(rows, slots, layout.top_k, product.z_rows)][:, some]
        x = product.x[_places(rows, slots, layout.top_k, product.x_rows)]
        plain[expert] = d_z.T @ x
        for some_z, some_x in zip(d_z.split(8192), x.split(8192), strict=True):
            truth[expert] += some_z.double().T @ some_x.double()
    index = torch.arange(experts, device=product.device)[:, None] * n + some
    longest = max((stop - start for start, stop in itertools.pairwise(_starts(layout))), default=0)
    return [Sample("d_weight", index.reshape(-1), truth.flatten(0, 1), plain.flatten(0, 1), longest)]


def _starts(layout: ExpertLayout) -> list[int]:
    assert layout.offsets is not None
    return [min(start, layout.num_rows) for start in layout.offsets.tolist()]


def _places(rows: Tensor, slots: Tensor, top_k: int, how: tl.constexpr) -> Tensor:
    """Where an operand keeps rows."""
    return rows if how is ROW else slots // top_k if how is TOKEN else slots


def _spread(starts: Sequence[int], limit: int) -> list[list[int]]:
    """Some of each range: all of a short one, else from its first to its last alike; about ``limit`` in all."""
    lengths = [max(0, stop - start) for start, stop in itertools.pairwise(starts)]
    each = max(4, limit // max(1, sum(map(bool, lengths))))
    return [
        [start + i for i in range(length)]
        if length <= each
        else [start + i * (length - 1) // (each - 1) for i in range(each)]
        for start, length in zip(starts, lengths, strict=False)
    ]
