"""Tiles of the grouped GEMM kernels: what is legal, and what is chosen without tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupedGemmConfig:
    """One choice of tiles. Sizes are powers of two.

    Attributes:
        block_m: rows of a tile (of the reduction, in the weight's gradient).
        block_n: columns of the accumulator; gate and up together behind a gate.
        block_k: depth of one step of the reduction.
        num_warps: warps of a program.
        num_stages: steps of the reduction in flight.
        group_m: row tiles that share columns before the schedule moves on.
        flatten: whether the loop over tiles is flattened into the reduction, so that loads run ahead across tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 16
    flatten: bool = False


def shared_memory(config: GroupedGemmConfig, dtype: torch.dtype) -> int:
    """Bytes of shared memory that the operands in flight need."""
    return config.num_stages * config.block_k * (config.block_m + config.block_n) * dtype.itemsize


def legal(config: GroupedGemmConfig, dtype: torch.dtype, limit: int) -> str | None:
    """Why ``config`` cannot run with ``limit`` bytes of shared memory, or None if it can."""
    for field in ("block_m", "block_n", "block_k"):
        value = getattr(config, field)
        if value < 16 or value & (value - 1):
            return f"{field} = {value} is not a power of two of at least 16"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps = {config.num_warps} is not a power of two up to 16"
    if config.num_stages < 1:
        return f"num_stages = {config.num_stages} is below 1"
    needed = shared_memory(config, dtype)
    if needed > limit:
        return f"its operands need {needed} bytes of shared memory, the device has {limit}"
    registers = config.block_m * config.block_n // (config.num_warps * 32)
    if registers > 128:
        return (
            f"its accumulator needs {registers} registers a thread of {config.num_warps} warps, more than 128"
        )
    return None


def heuristic(
    rows_per_expert: float, columns: int, dtype: torch.dtype, limit: int, *, gather: bool, gated: bool
) -> GroupedGemmConfig:
    """Tiles for the forward kernel (and for the gradient of x), good without tuning."""
    wide = dtype.itemsize < 4
    if rows_per_expert <= 16:
        preferred = GroupedGemmConfig(16, 128, 128 if wide else 32, 4, 4)
    elif rows_per_expert <= 48:
        preferred = GroupedGemmConfig(32, 128, 64 if wide else 32, 4, 4)
    elif rows_per_expert <= 96:
        preferred = GroupedGemmConfig(64, 128, 64 if wide else 32, 4, 4)
    else:
        preferred = GroupedGemmConfig(128, 256 if wide else 128, 64 if wide else 32, 8, 3)
    return shrink(preferred, dtype, limit)


def heuristic_weight_gradient(rows_per_expert: float, dtype: torch.dtype, limit: int) -> GroupedGemmConfig:
    """Tiles for the gradient of the weight: block_m is the step over rows, block_n x block_k the tile of the weight."""
    wide = dtype.itemsize < 4
    return shrink(
        GroupedGemmConfig(64 if wide else 32, 128, 256 if wide else 128, 8, 3), dtype, limit, weight=True
    )


def shrink(
    config: GroupedGemmConfig, dtype: torch.dtype, limit: int, weight: bool = False
) -> GroupedGemmConfig:
    """Fewer stages, then smaller tiles, until the shared memory suffices."""
    values = dict(config.__dict__)

    def needed() -> int:
        depth, across = ("block_m", "block_k") if weight else ("block_k", "block_m")
        return values["num_stages"] * values[depth] * (values[across] + values["block_n"]) * dtype.itemsize

    while needed() > limit - 8192:
        if values["num_stages"] > 2:
            values["num_stages"] -= 1
        else:
            widest = max(("block_n", "block_k", "block_m"), key=values.__getitem__)
            values[widest] //= 2
    return GroupedGemmConfig(**values)
