"""The schedule of a grouped GEMM: which expert and which rows each tile of rows belongs to."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Most tiles of rows there can be, whatever the routing: every expert may leave one ragged."""
    return min(triton.cdiv(num_rows, block_m) + num_experts, max(num_rows, 1))


@triton.jit
def _tiles(start, stop, num_rows, BLOCK_M: tl.constexpr):
    """Where rows from start on end, within num_rows, and how many tiles they are."""
    stop = tl.minimum(tl.maximum(stop, start), num_rows)
    return stop, (stop - start + BLOCK_M - 1).to(tl.int64) // BLOCK_M


@triton.jit(do_not_specialize=["num_experts", "num_rows", "size"])
def _schedule_kernel(
    offsets, tiles, num_experts, num_rows, size, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Program e lists the tiles of expert e; the last one, how many there are and how many rows have a slot."""
    expert = tl.program_id(0)
    all_experts = tl.arange(0, EXPERTS)
    before = all_experts < expert
    # Those of a layout put together by hand may be anything: then tiles overlap, or some are left out.
    starts = tl.load(offsets + all_experts, mask=before, other=0)
    stops = tl.load(offsets + all_experts + 1, mask=before, other=0)
    first = tl.sum(_tiles(tl.minimum(tl.maximum(starts, 0), num_rows), stops, num_rows, BLOCK_M)[1])
    start = tl.minimum(tl.maximum(tl.load(offsets + expert), 0), num_rows)
    stop, mine = _tiles(start, tl.load(offsets + expert + 1), num_rows, BLOCK_M)
    first = tl.minimum(first, size).to(tl.int32)
    mine = tl.minimum(mine, size - first).to(tl.int32)
    stop = tl.minimum(stop, start + mine * BLOCK_M)
    for i in range(0, mine, STEP):
        tile = i + tl.arange(0, STEP)
        keep = tile < mine
        p = tiles + first + tile
        tl.store(p, expert + tile * 0, mask=keep)
        tl.store(p + size, start + tile * BLOCK_M, mask=keep)
        tl.store(p + 2 * size, stop + tile * 0, mask=keep)
        tl.store(p + 3 * size, first + tile * 0, mask=keep)
    if expert == num_experts - 1:
        tl.store(tiles + 4 * size, first + mine)
        tl.store(tiles + 4 * size + 1, stop)


class Schedule(NamedTuple):
    """How the table of one layout's tiles is made: how many there can be, and the launch that lists them."""

    size: int
    launch: Launch

    def of(self, offsets: Tensor) -> Tensor:
        """Built on the device, int32: each tile's expert, first row, expert's end and expert's first tile; then how
        many tiles, and how many rows are used.

        All that a kernel asks of a tile lies side by side in it, so that it waits for memory once.
        """
        tiles = offsets.new_empty(4 * self.size + 2, dtype=torch.int32)
        self.launch(offsets, tiles)
        return tiles


def schedule(offsets: Tensor, num_rows: int, block_m: int) -> Tensor:
    """The table of a layout's tiles, see :meth:`Schedule.of`."""
    return of_layout(offsets.device, operand.of(offsets), num_rows, block_m).of(offsets)


@lru_cache(REMEMBERED)
def of_layout(device: torch.device, offsets: Operand, num_rows: int, block_m: int) -> Schedule:
    """How the tiles of such a layout are listed."""
    num_experts = offsets.shape[0] - 1
    size = max_tiles(num_rows, num_experts, block_m)
    launch = Launch(
        device, _schedule_kernel, (num_experts,), num_experts, num_rows, size,
        BLOCK_M=block_m, EXPERTS=triton.next_power_of_2(num_experts), STEP=64,
        num_warps=1 if num_experts <= 512 else 4,
    )  # fmt: skip
    return Schedule(size, launch)


@triton.jit
def tile_of_expert(tile, m, row, end, first, num_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(first row, column tile) of a tile, where m = tile // num_n is some row tile of its expert.

    What the table says of m: its row, the expert's end and first tile. An expert's tiles follow one another in groups
    of about GROUP_M row tiles, all as high as one another, so that those at work together share operands in the L2
    cache and no group reaches over two experts' weights.
    """
    start = row - (m - first) * BLOCK_M
    num_m = (end - start + BLOCK_M - 1) // BLOCK_M
    groups = tl.maximum((num_m + GROUP_M // 2) // GROUP_M, 1)
    most = tl.maximum((num_m + groups - 1) // groups, 1)
    inner = tile - first * num_n
    above = inner // (most * num_n) * most
    height = tl.maximum(tl.minimum(num_m - above, most), 1)
    inner -= above * num_n
    return start + (above + inner % height) * BLOCK_M, inner // height


@triton.jit
def tile_coordinates(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of a tile, in groups of GROUP_M row tiles so that neighbours share operands in the L2 cache."""
    per_group = GROUP_M * num_n
    group = tile // per_group
    first = group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    inner = tile - group * per_group
    return first + inner % height, inner // height
