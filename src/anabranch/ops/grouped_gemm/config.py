"""Tiles of the grouped GEMM kernels: what is legal, what is chosen without tuning, and what a tuner may try.

tests/aot compiles every choice made here for every architecture, and holds :func:`shared_memory` to what the
compiler takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from anabranch.epilogues import Epilogue, Identity, Relu, ReluSquared

FORWARD, GATED, INTERLEAVED = "forward", "forward_gated", "forward_interleaved"
"""The forward kernel, which the gradient of x uses too: plain, or with two accumulators behind a gate, or with one
in which gate and up alternate."""
WEIGHT_GRADIENT = "weight_gradient"
ELEMENTWISE, COPIED, TMA = 0, 1, 2
"""How tiles are loaded and stored: element by element, because of odd strides or addresses, with an address in
registers for each; in vectors of 16 bytes; by the tensor memory accelerator (but for a gathered x)."""
HOPPER = (9, 0)
MOST_GROUPED = 4096
"""Row tiles of a group: times the tiles of the widest result they are still an int32, as kernels number tiles."""
_IDENTITY = Identity()
DEPTH = 32
"""The shallowest step that a shortage of shared memory leads to: a matrix instruction or two."""


@dataclass(frozen=True)
class GroupedGemmConfig:
    """One choice of tiles. Sizes are powers of two.

    Attributes:
        block_m: rows of a tile (of the reduction, in the weight's gradient).
        block_n: columns of the accumulator; gate and up together behind a gate.
        block_k: depth of one step of the reduction (columns of the accumulator, in the weight's gradient, whose
            rows are block_n).
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


@dataclass(frozen=True)
class GroupedGemmConfigs:
    """One for each product of a training step: a configuration, ``"heuristic"``, or None for the best known.

    Attributes:
        forward: of the output.
        d_x: of x's gradient, whose columns are K_dim and whose reduction is N.
        d_weight: of weight's gradient.
    """

    forward: GroupedGemmConfig | str | None = None
    d_x: GroupedGemmConfig | str | None = None
    d_weight: GroupedGemmConfig | str | None = None


Config = GroupedGemmConfig
Tiles = Mapping[float, GroupedGemmConfig]
"""A configuration for up to so many rows an expert."""
INF = float("inf")

# Measured on an H200 but for what compiles with spills: 128 x 256 is the largest accumulator that 8 warps can hold
# with an epilogue, and takes the fewest loads for its products. Experts of few rows waste less in flat tiles, but a
# second tile costs more than a high one: routing spreads rows by their square root, so tiles change below their height.
HALF: Tiles = {
    12: Config(16, 128, 128, 4, 4),
    56: Config(64, 128, 128, 4, 3),
    INF: Config(128, 256, 64, 8, 3),
}
HALF_GATED: Tiles = {
    16: Config(16, 128, 128, 4, 4),
    28: Config(32, 128, 128, 4, 3),
    56: Config(64, 256, 64, 8, 3),
    INF: Config(128, 256, 64, 8, 3),
}
# What else needs registers, see _crowded, gets those of half the columns.
HALF_NARROW: Tiles = {
    **HALF,
    INF: Config(128, 128, 64, 8, 4),
}
# Before Hopper, accumulators and addresses share the registers, and 99 KiB of shared memory is all that 8.6 has.
HALF_COPIED: Tiles = {
    16: Config(16, 128, 64, 4, 4),
    48: Config(32, 128, 64, 4, 3),
    96: Config(64, 128, 64, 8, 3),
    INF: Config(128, 128, 64, 8, 3),
}
TF32: Tiles = {16: Config(16, 64, 32, 4, 3), 96: Config(64, 64, 32, 4, 3), INF: Config(128, 128, 32, 8, 3)}
# Full fp32 is multiplied outside the tensor cores, with both operands in registers.
IEEE: Tiles = {16: Config(16, 64, 32, 4, 3), 96: Config(32, 64, 32, 8, 3), INF: Config(64, 128, 16, 8, 3)}
IEEE_NARROW: Tiles = {16: Config(16, 64, 16, 4, 3), INF: Config(32, 64, 32, 8, 3)}
ODD: Tiles = {16: Config(16, 64, 32, 4, 2), INF: Config(64, 64, 32, 8, 2)}

# A step over few rows ends soon after an expert's last.
GRADIENT_HALF: Tiles = {32: Config(32, 128, 256, 8, 4), INF: Config(64, 128, 256, 8, 3)}
GRADIENT_COPIED: Tiles = {32: Config(32, 128, 128, 8, 4), INF: Config(64, 128, 128, 8, 3)}
GRADIENT_TF32: Tiles = {INF: Config(32, 128, 128, 8, 3)}
GRADIENT_IEEE: Tiles = {INF: Config(16, 64, 128, 8, 3)}
GRADIENT_ODD: Tiles = {INF: Config(32, 64, 64, 8, 2)}
GRADIENT_ODD_IEEE: Tiles = {INF: Config(16, 64, 64, 8, 2)}


def shared_memory(
    config: GroupedGemmConfig,
    dtype: torch.dtype,
    kind: str = FORWARD,
    capability: tuple[int, int] = HOPPER,
) -> int:
    """Most bytes of shared memory that a kernel takes: operands in flight, and results on their way out.

    From Hopper on the tensor memory accelerator stores tiles from memory of their own. Before it results only
    pass through that of the operands, of which one step less is kept.
    """
    weight = kind == WEIGHT_GRADIENT
    depth, rows, columns = _roles(config, weight)
    step = depth * (rows + columns) * dtype.itemsize
    own = 4 * config.block_m * config.num_stages + 32 * config.num_stages  # slots of rows, and barriers
    result = rows * columns * dtype.itemsize
    flatten = config.flatten and not weight  # then operands are in flight while results go out
    if capability < HOPPER:
        operands = max(config.num_stages - 1, 1) * step
        return (operands + result if flatten else max(operands, result)) + own
    # Wide tiles are stored in halves. What differs in width has memory of its own, as the output behind an
    # interleaved gate has beside h; and in a flattened loop so has what goes out through registers, which is all
    # of it where warps share rows and their columns have to be parted.
    if weight:
        return config.num_stages * step + result + own
    wide = columns > 128
    width = {FORWARD: columns, GATED: columns // 2, INTERLEAVED: columns if wide else columns * 3 // 2}[kind]
    width = min(width, 128) if wide else width
    if flatten:
        width += columns if wide and rows < 16 * config.num_warps else width
    return config.num_stages * step + rows * width * dtype.itemsize + own


def _roles(config: GroupedGemmConfig, weight: bool) -> tuple[int, int, int]:
    """(depth of a step, rows and columns of the accumulator)."""
    if weight:
        return config.block_m, config.block_n, config.block_k
    return config.block_k, config.block_m, config.block_n


def legal(
    config: GroupedGemmConfig,
    dtype: torch.dtype,
    limit: int,
    kind: str = FORWARD,
    capability: tuple[int, int] = HOPPER,
) -> str | None:
    """Why ``config`` cannot run with ``limit`` bytes of shared memory, or None if it can."""
    for field in ("block_m", "block_n", "block_k"):
        value = getattr(config, field)
        if value < 16 or value & (value - 1):
            return f"{field} = {value} is not a power of two of at least 16"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps = {config.num_warps} is not a power of two up to 16"
    for field in ("num_stages", "group_m"):
        if getattr(config, field) < 1:
            return f"{field} = {getattr(config, field)} is below 1"
    if config.group_m > MOST_GROUPED:
        return f"group_m = {config.group_m} is above {MOST_GROUPED}"
    needed = shared_memory(config, dtype, kind, capability)
    if needed > limit:
        return f"it needs {needed} bytes of shared memory, the device has {limit}"
    # A multiprocessor has 65536 registers, a thread 255 at most, and the accumulator may take half of them.
    _, rows, columns = _roles(config, kind == WEIGHT_GRADIENT)
    registers, most = rows * columns // (config.num_warps * 32), min(128, 1024 // config.num_warps)
    if registers > most:
        return (
            f"its accumulator needs {registers} registers a thread of {config.num_warps} warps, "
            f"more than {most}"
        )
    return None


def heuristic(
    rows_per_expert: float,
    dtype: torch.dtype,
    limit: int,
    kind: str = FORWARD,
    *,
    epilogue: Epilogue = _IDENTITY,
    pointers: int = 0,
    capability: tuple[int, int] = HOPPER,
    precision: str = "ieee",
    loads: int = TMA,
) -> GroupedGemmConfig:
    """Tiles for the forward kernel, good without tuning.

    Args:
        rows_per_expert: on average.
        dtype: of the operands.
        limit: bytes of shared memory that a program may have.
        kind: FORWARD, GATED or INTERLEAVED.
        epilogue: what follows the accumulator.
        pointers: how many of x and the output are read and written through pointers, as gathered and scattered
            ones are.
        capability: the GPU's compute capability.
        precision: how fp32 is multiplied, "ieee" or "tf32".
        loads: the worst way in which an operand is loaded or a result is stored.
    """
    if dtype == torch.float32 and precision == "ieee":
        crowded = loads == ELEMENTWISE or kind == INTERLEAVED or (kind == FORWARD and pointers > 0)
        crowded |= kind == GATED and capability < HOPPER  # all by pointers
        tiles = IEEE_NARROW if crowded else IEEE
    elif loads == ELEMENTWISE:
        tiles = ODD
    elif dtype == torch.float32:
        tiles = TF32
        if capability < HOPPER and pointers > 1:
            rows_per_expert = min(rows_per_expert, 96)  # the tiles in between: they spill nothing
    elif loads == COPIED or capability[0] not in (9, 10):
        tiles = HALF_COPIED
    else:
        tiles = HALF_GATED if kind == GATED else HALF
        if _crowded(kind, epilogue, pointers, capability):
            tiles = HALF_NARROW
    config = _pick(tiles, rows_per_expert)
    if kind == INTERLEAVED and config.block_n == 256:
        # The loop over tiles keeps no registers of its own, which here are the ones too many.
        config = replace(config, flatten=True)
    return shrink(config, dtype, limit, kind, capability)


def _crowded(kind: str, epilogue: Epilogue, pointers: int, capability: tuple[int, int]) -> bool:
    """Whether an accumulator of 128 x 256 would leave what follows it too few registers."""
    if isinstance(epilogue, Identity):
        return False
    if capability[0] == 10:  # it comes from tensor memory all at once
        return True
    # Behind a gate the columns that are left are half as many.
    return pointers > 1 or (kind == FORWARD and not isinstance(epilogue, (Relu, ReluSquared)))


def heuristic_weight_gradient(
    rows_per_expert: float,
    dtype: torch.dtype,
    limit: int,
    *,
    capability: tuple[int, int] = HOPPER,
    precision: str = "ieee",
    loads: int = TMA,
) -> GroupedGemmConfig:
    """Tiles for the gradient of the weight: block_m is the step over rows, block_n x block_k the tile of the weight."""
    ieee = dtype == torch.float32 and precision == "ieee"
    if loads == ELEMENTWISE:
        tiles = GRADIENT_ODD_IEEE if ieee else GRADIENT_ODD
    elif dtype == torch.float32:
        tiles = GRADIENT_IEEE if ieee else GRADIENT_TF32
    else:
        wide = loads == TMA and capability[0] in (9, 10)
        tiles = GRADIENT_HALF if wide else GRADIENT_COPIED
    return shrink(_pick(tiles, rows_per_expert), dtype, limit, WEIGHT_GRADIENT, capability)


def _pick(tiles: Tiles, rows_per_expert: float) -> GroupedGemmConfig:
    return tiles[min(most for most in tiles if rows_per_expert <= most)]


@cache
def shrink(
    config: GroupedGemmConfig,
    dtype: torch.dtype,
    limit: int,
    kind: str = FORWARD,
    capability: tuple[int, int] = HOPPER,
) -> GroupedGemmConfig:
    """The same, with as much of the reduction in flight as fits; if little does, smaller tiles."""
    field = "block_m" if kind == WEIGHT_GRADIENT else "block_k"
    while True:
        most = getattr(config, field)
        depths = [most >> i for i in range(8) if most >> i >= min(most, DEPTH)]
        options = [
            replace(config, num_stages=stages, **{field: depth})
            for depth in depths
            for stages in range(config.num_stages, min(config.num_stages, 2) - 1, -1)
        ]
        fitting = [c for c in options if shared_memory(c, dtype, kind, capability) <= limit]
        if fitting:
            return max(fitting, key=lambda c: c.num_stages * getattr(c, field))
        names = [name for name in ("block_n", "block_k", "block_m") if getattr(config, name) > 16]
        if not names:
            return config
        widest = max(names, key=lambda name: getattr(config, name))
        config = replace(config, **{widest: getattr(config, widest) // 2})


def search_space(
    dtype: torch.dtype,
    limit: int,
    kind: str = FORWARD,
    *,
    capability: tuple[int, int] = HOPPER,
    precision: str = "ieee",
) -> list[GroupedGemmConfig]:
    """What a tuner may try: legal, and neither the accumulator nor the steps in flight too small to be fast."""
    tiles: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int], ...]
    if dtype == torch.float32 and precision == "ieee":
        tiles = ((16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 64, 8))
        steps = ((16, 2), (16, 3), (32, 2), (32, 3))
    else:
        tiles = (
            (16, 64, 4), (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8),
            (64, 256, 8), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8),
        )  # fmt: skip
        # Steps of as many bytes, whatever the dtype.
        steps = ((32, 3), (32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
        steps = tuple((depth * 2 // dtype.itemsize, stages) for depth, stages in steps)
    found = []
    for rows, columns, warps in tiles:
        for depth, stages in steps:
            for flatten in (False, True):
                if kind == WEIGHT_GRADIENT:
                    # One program a tile, or programs that stay; experts of few rows want flat steps.
                    config = Config(depth, rows, columns, warps, stages, flatten=flatten)
                else:
                    config = Config(rows, columns, depth, warps, stages, flatten=flatten)
                if (kind != WEIGHT_GRADIENT or rows >= 64) and legal(
                    config, dtype, limit, kind, capability
                ) is None:
                    found.append(config)
    return found
