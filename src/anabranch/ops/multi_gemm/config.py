"""Tiles of the multi_gemm kernel: what is legal, and what is chosen without tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

Sizes = Sequence[tuple[int, int, int]]
"""(m, n, k) of each product."""
ELEMENTWISE, COPIED, TMA = 0, 1, 2
"""How the tiles of a launch are loaded: element by element through registers, because of odd strides or
addresses; by asynchronous copies of 16 bytes; by the tensor memory accelerator."""


@dataclass(frozen=True)
class MultiGemmConfig:
    """One choice of tiles, for all products of a launch. Sizes are powers of two.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: depth of one step of the reduction.
        num_warps: warps of a program.
        num_stages: steps of the reduction in flight.
        group_m: row tiles that share columns before the schedule moves on.
        flatten: whether the loop over tiles is flattened into the reduction, so that loads run ahead across
            tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    flatten: bool = False


class Table(NamedTuple):
    """Tiles to choose from.

    Attributes:
        shares: of the peak that tiles reach on a full device: smaller ones read their operands more often.
        start: what a tile takes beside its steps, to wait for its first operands and to store its result, in
            products of two numbers that the peak would be in that time: a bit more than a microsecond.
    """

    shares: Mapping[MultiGemmConfig, float]
    start: float


# Measured on an H200, as are the shares' ratios.
HALF = Table(
    {
        MultiGemmConfig(128, 256, 64, 8, 3, group_m=16): 1.0,
        MultiGemmConfig(128, 128, 64, 4, 4): 0.85,
        MultiGemmConfig(64, 128, 64, 4, 4): 0.6,
        MultiGemmConfig(64, 64, 64, 4, 4): 0.4,
        MultiGemmConfig(16, 128, 128, 4, 4): 0.2,
        MultiGemmConfig(16, 64, 128, 4, 4): 0.15,
    },
    4.5e6,
)
HALF_COPIED = Table(
    {
        MultiGemmConfig(128, 128, 64, 8, 3): 1.0,
        MultiGemmConfig(64, 128, 64, 4, 3): 0.7,
        MultiGemmConfig(64, 64, 64, 4, 3): 0.5,
        MultiGemmConfig(16, 64, 64, 4, 3): 0.2,
    },
    1.7e6,
)
TF32 = Table(
    {
        MultiGemmConfig(128, 128, 32, 8, 3): 1.0,
        MultiGemmConfig(64, 64, 32, 4, 3): 0.6,
        MultiGemmConfig(16, 64, 32, 4, 3): 0.2,
    },
    2e6,
)
# Full fp32 is multiplied outside the tensor cores, with operands in registers.
IEEE = Table(
    {
        MultiGemmConfig(64, 128, 16, 8, 3): 1.0,
        MultiGemmConfig(64, 64, 16, 8, 3): 0.8,
        MultiGemmConfig(16, 32, 16, 4, 3): 0.4,
    },
    3e5,
)
# For loads element by element, each with a pointer in registers.
SMALL = Table({MultiGemmConfig(64, 64, 32, 8, 2): 1.0, MultiGemmConfig(16, 64, 32, 4, 2): 0.5}, 3e5)

ALONE = {MultiGemmConfig(128, 128, 64, 4, 4): MultiGemmConfig(64, 256, 64, 4, 4)}
"""Better tiles where each program has one at most: they read more, but nothing waits for the memory then."""
MANY = 4
"""Tiles of a program from which on loads that run ahead across tiles pay for the registers that they take."""


def shared_memory(config: MultiGemmConfig, dtype: torch.dtype, loads: int = TMA) -> int:
    """Bytes of shared memory for the operands in flight and the result that the accelerator takes from there."""
    operands = config.num_stages * config.block_k * (config.block_m + config.block_n)
    result = config.block_m * config.block_n
    return (operands + result if loads == TMA else max(operands, result)) * dtype.itemsize


def legal(config: MultiGemmConfig, dtype: torch.dtype, limit: int, loads: int = TMA) -> str | None:
    """Why ``config`` cannot run with ``limit`` bytes of shared memory, or None if it can."""
    for field in ("block_m", "block_n", "block_k"):
        value = getattr(config, field)
        if value < 16 or value & (value - 1):
            return f"{field} = {value} is not a power of two of at least 16"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps = {config.num_warps} is not a power of two up to 16"
    if config.num_stages < 1:
        return f"num_stages = {config.num_stages} is below 1"
    needed = shared_memory(config, dtype, loads)
    if needed > limit:
        return f"its tiles need {needed} bytes of shared memory, the device has {limit}"
    registers = config.block_m * config.block_n // (config.num_warps * 32)
    if registers > 128:
        return (
            f"its accumulator needs {registers} registers a thread of {config.num_warps} warps, more than 128"
        )
    return None


def tiles(config: MultiGemmConfig, sizes: Sizes) -> list[int]:
    """Tiles of each product."""
    return [-(-m // config.block_m) * -(-n // config.block_n) for m, n, _ in sizes]


def table(dtype: torch.dtype, precision: str, loads: int) -> Table:
    """The tiles to choose from."""
    if dtype == torch.float32 and precision == "ieee":
        return IEEE
    if loads == ELEMENTWISE:
        return SMALL
    if dtype == torch.float32:
        return TF32
    return HALF if loads == TMA else HALF_COPIED


def heuristic(
    sizes: Sizes, dtype: torch.dtype, limit: int, num_sms: int, *, precision: str = "ieee", loads: int = TMA
) -> MultiGemmConfig:
    """The tiles with which the last multiprocessor should finish first, shrunk to the shared memory there is."""
    choices = table(dtype, precision, loads)
    config = min(choices.shares, key=lambda c: duration(c, choices, sizes, num_sms))
    waves = sum(tiles(config, sizes)) / num_sms
    if waves <= 1:
        config = ALONE.get(config, config)
    elif waves >= MANY and config.block_n == 256:
        config = replace(config, flatten=True)
    return shrink(config, dtype, limit, loads)


def duration(config: MultiGemmConfig, choices: Table, sizes: Sizes, programs: int) -> float:
    """When the last program is through with its tiles. All take them in turn, product after product."""
    busy = [0.0] * programs
    first = 0
    for count, (_, _, k) in zip(tiles(config, sizes), sizes, strict=True):
        depth = -(-k // config.block_k) * config.block_k
        one = depth * config.block_m * config.block_n / choices.shares[config] + choices.start
        each, more = divmod(count, programs)
        for i in range(programs):
            busy[(first + i) % programs] += one * (each + (i < more))
        first = (first + more) % programs
    return max(busy)


def shrink(config: MultiGemmConfig, dtype: torch.dtype, limit: int, loads: int = TMA) -> MultiGemmConfig:
    """Fewer stages, then a shallower step, until the shared memory suffices; a little is the compiler's own."""
    while shared_memory(config, dtype, loads) > limit - 8192:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > 32:
            config = replace(config, block_k=config.block_k // 2)
        else:
            config = replace(config, block_n=config.block_n // 2)
    return config
