"""The schedule of a grouped GEMM: which expert and which rows each tile of rows belongs to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton.device import current


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Most tiles of rows there can be, whatever the routing: every expert may leave one ragged."""
    return min(triton.cdiv(num_rows, block_m) + num_experts, max(num_rows, 1))


@triton.jit(do_not_specialize=["num_experts", "size"])
def _schedule_kernel(
    offsets, tiles, num_experts, size, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr
):
    """Program e lists the tiles of expert e: tiles[0, i] = e, tiles[1, i] = first row; tiles[2, 0] = how many."""
    expert = tl.program_id(0)
    all_experts = tl.arange(0, EXPERTS)
    inside = all_experts < num_experts
    starts = tl.load(offsets + all_experts, mask=inside, other=0)
    stops = tl.load(offsets + all_experts + 1, mask=inside, other=0)
    counts = (stops - starts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(all_experts < expert, counts, 0))
    mine = tl.sum(tl.where(all_experts == expert, counts, 0))
    row = tl.sum(tl.where(all_experts == expert, starts, 0))
    for i in range(0, mine, STEP):
        tile = i + tl.arange(0, STEP)
        keep = (tile < mine) & (first + tile < size)
        tl.store(tiles + first + tile, expert + tile * 0, mask=keep)
        tl.store(tiles + size + first + tile, row + tile * BLOCK_M, mask=keep)
    if expert == num_experts - 1:
        tl.store(tiles + 2 * size, first + mine)


def schedule(offsets: Tensor, num_rows: int, block_m: int) -> Tensor:
    """(3, max_tiles) int32, built on the device: expert of each tile, its first row, and [2, 0] the number of tiles."""
    num_experts = offsets.shape[0] - 1
    size = max_tiles(num_rows, num_experts, block_m)
    tiles = torch.empty(3, size, dtype=torch.int32, device=offsets.device)
    with current(offsets.device):
        _schedule_kernel[(num_experts,)](
            offsets,
            tiles,
            num_experts,
            size,
            BLOCK_M=block_m,
            EXPERTS=triton.next_power_of_2(num_experts),
            STEP=64,
        )
    return tiles


@triton.jit
def tile_coordinates(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of a tile, in groups of GROUP_M row tiles so that neighbours share operands in the L2 cache."""
    per_group = GROUP_M * num_n
    group = tile // per_group
    first = group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    inner = tile - group * per_group
    return first + inner % height, inner // height
