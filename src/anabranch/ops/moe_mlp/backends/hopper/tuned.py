"""What the tuner has to know of the gate's gradient: how it may be cut, and the truth about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch.epilogues import Epilogue
from anabranch.ops.grouped_gemm.backends.hopper import config as tiles
from anabranch.ops.grouped_gemm.backends.hopper.config import NARROW, WIDE, Config
from anabranch.ops.grouped_gemm.backends.hopper.launch import Rows
from anabranch.ops.grouped_gemm.backends.hopper.tuned import clear_unused
from anabranch.ops.grouped_gemm.backends.triton import tuned
from anabranch.ops.grouped_gemm.backends.triton.kernels import TOKEN
from anabranch.ops.grouped_gemm.backends.triton.truth import multiplied, some_rows, split
from anabranch.ops.grouped_gemm.backends.triton.tuned import like
from anabranch.tuning import Sample

PIECE, H_STAGES = 8, 2
"""Rows that are finished at once: as many as a block of shared memory has, whose addresses are swizzled; and how many
such pieces of the pre-activation are on their way or in use."""
FULL = replace(WIDE, num_stages=3, skew=1, group_m=8)
FEW = replace(NARROW, num_stages=5, skew=0)
"""For few columns. Beside the stages, shared memory holds a tile and the pieces."""
STEADY = 512
"""From so many rows an expert on blocks are kept in step: sooner than in a product, whose halves are soon finished."""
TOKENS = 1024
"""Of whose routing weights the gradients are compared with the truth."""


def heuristic(columns: int, rows: int) -> Config:
    """What is chosen without tuning for so many columns of the activation and so many rows an expert."""
    return replace(FULL if columns > FEW.block_n else FEW, steady=rows >= STEADY)


def shared_memory(config: Config, parts: int) -> int:
    """Most bytes of shared memory that the kernel takes, with so many columns of the pre-activation for each."""
    tile = tiles.ROWS * config.block_n * 2
    return tiles.stages(config) + tile + H_STAGES * parts * PIECE * config.block_n * 2 + tiles.SLACK


class Values(NamedTuple):
    """The results of some rows: (rows, columns of h), (rows, columns) and (rows,)."""

    d_h: Tensor
    a: Tensor
    dot: Tensor


@dataclass(eq=False)
class GateGradient(tuned.Product):
    """launch.pre_activation_gradient, whose d_rows is x here."""

    weight: Tensor
    h: Tensor
    scale: Tensor | None
    rows: Rows
    epilogue: Epilogue
    interleaved: bool
    need_h: bool
    need_a: bool
    need_dot: bool

    def refusal(self, config: Config) -> str | None:
        needed = shared_memory(config, self.epilogue.columns)
        return tiles.legal(config, needed, on.shared_memory_limit(self.device))

    def candidates(self, default: Config) -> Sequence[Config]:
        space = tiles.search_space(default, (FEW, replace(FEW, num_stages=4)), (0, 1, 2), halves=True)
        return [config for config in space if self.refusal(config) is None]

    def family(self, config: Config) -> tuple[int, ...]:
        return tiles.family(config)

    def outputs(self) -> Sequence[Tensor]:
        columns = self.weight.shape[1]
        found = [like(self.h)] if self.need_h else []
        found += [self.h.new_empty(self.h.shape[0], columns)] if self.need_a else []
        slots = self.layout.slot_to_row.shape
        return [*found, self.h.new_empty(slots, dtype=torch.float32)] if self.need_dot else found

    def run(self, config: Config, outputs: Sequence[Tensor]) -> None:
        from anabranch.ops.moe_mlp.backends.hopper import launch

        needs = self.need_h, self.need_a, self.need_dot
        given = iter(outputs)
        d_h, a_out, d_scale = (next(given) if need else None for need in needs)
        launch.pre_activation_gradient(
            self.x,
            self.weight,
            self.h,
            self.scale,
            self.rows,
            self.epilogue,
            interleaved=self.interleaved,
            d_h=d_h,
            a_out=a_out,
            d_scale=d_scale,
            gathered=self.x_rows is TOKEN,
            config=config,
        )
        clear_unused(self.rows, [value for value in (d_h, a_out) if value is not None])

    def samples(self) -> Sequence[Sample]:
        index, counts = some_rows(self.layout, self.h.shape[1])
        true, plain = self._values(index, counts, torch.float64), self._values(index, counts, None)
        terms = self.weight.shape[2]
        found = [Sample("d_h", index, true.d_h, plain.d_h, terms)] if self.need_h else []
        found += [Sample("a", index, true.a, plain.a)] if self.need_a else []
        return [*found, self._dots()] if self.need_dot else found

    def _values(self, rows: Tensor, counts: Sequence[int], wide: torch.dtype | None) -> Values:
        """Of rows, so many of each expert and then nobody's, in fp64 or as PyTorch computes in their precision."""
        fine = wide or torch.float32
        slots = self.layout.row_to_slot[rows].long()
        dead = (slots < 0)[:, None]
        factor = torch.ones_like(dead, dtype=fine)
        if self.scale is not None:
            factor = self.scale.reshape(-1, 1)[slots.clamp(min=0)].to(fine)
        x = self.x[slots.clamp(min=0) // self.layout.top_k if self.x_rows is TOKEN else rows]
        d = multiplied(x, self.weight, None, counts, wide or self.x.dtype).to(fine)
        # A row that is nobody's may hold anything.
        z = split(self.h[rows].masked_fill(dead, 0), self.epilogue, self.interleaved, fine)
        a = self.epilogue.forward(*z)
        grads = self.epilogue.backward(d * factor, *z)
        d_h = torch.stack(grads, -1).flatten(1) if self.interleaved else torch.cat(grads, -1)
        kind = wide or self.x.dtype
        d_h, scaled = d_h.masked_fill(dead, 0).to(kind), (a * factor).masked_fill(dead, 0).to(kind)
        return Values(d_h, scaled, (d * a).sum(-1))

    def _dots(self) -> Sample:
        """Of some tokens, whichever experts have them."""
        layout = self.layout
        assert layout.offsets is not None
        tokens = layout.slot_to_row.shape[0]
        index = torch.arange(0, tokens, max(1, tokens // TOKENS), device=self.device)
        places = layout.slot_to_row[index]
        live = places >= 0
        rows, order = places[live].long().sort()
        experts = torch.bucketize(rows, layout.offsets[1:].long(), right=True)
        counts = torch.bincount(experts, minlength=len(layout.offsets) - 1).tolist()

        def table(wide: torch.dtype | None) -> Tensor:
            dot = self._values(rows, counts, wide).dot
            found = dot.new_zeros(places.shape)
            found[live] = torch.empty_like(dot).index_copy_(0, order, dot)
            return found

        return Sample("d_scale", index, table(torch.float64), table(None), self.weight.shape[1])
