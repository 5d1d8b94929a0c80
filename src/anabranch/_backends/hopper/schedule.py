"""The tiles of a layout's rows, with all that a kernel asks of one side by side, so that it waits for memory once."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import operand
from anabranch._backends.triton.combine import power_of_2
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.schedule import max_tiles


@triton.jit(do_not_specialize=["num_experts", "num_rows", "size"])
def _schedule_kernel(
    offsets, tiles, num_experts, num_rows, size, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Program e lists the tiles of expert e; the last one, how many there are and how many rows have a slot."""
    expert = tl.program_id(0)
    all_experts = tl.arange(0, EXPERTS)
    inside = all_experts < num_experts
    # Those of a layout put together by hand may be anything: then tiles overlap, or some are left out.
    starts = tl.load(offsets + all_experts, mask=inside, other=0)
    stops = tl.load(offsets + all_experts + 1, mask=inside, other=0)
    starts = tl.minimum(tl.maximum(starts, 0), num_rows)
    stops = tl.minimum(tl.maximum(stops, starts), num_rows)
    counts = (stops - starts + BLOCK_M - 1).to(tl.int64) // BLOCK_M
    first = tl.sum(tl.where(all_experts < expert, counts, 0))
    mine = tl.sum(tl.where(all_experts == expert, counts, 0))
    start = tl.sum(tl.where(all_experts == expert, starts, 0))
    stop = tl.sum(tl.where(all_experts == expert, stops, 0))
    mine = tl.minimum(mine, tl.maximum(size - first, 0)).to(tl.int32)
    for i in range(0, mine, STEP):
        tile = i + tl.arange(0, STEP)
        keep = tile < mine
        p = tiles + first + tile
        tl.store(p, expert + tile * 0, mask=keep)
        tl.store(p + size, start + tile * BLOCK_M, mask=keep)
        tl.store(p + 2 * size, stop + tile * 0, mask=keep)
    if expert == num_experts - 1:
        tl.store(tiles + 3 * size, tl.minimum(first + mine, size).to(tl.int32))
        tl.store(tiles + 3 * size + 1, stop)


def schedule(offsets: Tensor, num_rows: int, block_m: int) -> Tensor:
    """Built on the device, int32: each tile's expert, first row and expert's end; then how many, and the rows used."""
    size, launch = _prepare(offsets.device, operand.of(offsets), num_rows, block_m)
    tiles = torch.empty(3 * size + 2, dtype=torch.int32, device=offsets.device)
    launch(offsets, tiles)
    return tiles


@lru_cache(REMEMBERED)
def _prepare(device: torch.device, offsets: Operand, num_rows: int, block_m: int) -> tuple[int, Launch]:
    """The most tiles there can be, and the launch that lists them."""
    num_experts = offsets.shape[0] - 1
    size = max_tiles(num_rows, num_experts, block_m)
    launch = Launch(
        device, _schedule_kernel, (num_experts,), num_experts, num_rows, size,
        BLOCK_M=block_m, EXPERTS=power_of_2(num_experts), STEP=64,
    )  # fmt: skip
    return size, launch
