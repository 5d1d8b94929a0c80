"""How Hopper's products are cut and staged: what is legal, what is chosen without tuning, and what a tuner may try.

tests/aot holds :func:`shared_memory` to what the compiler takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from anabranch.ops.grouped_gemm.config import MOST_GROUPED

ROWS = 128
"""Rows of a tile: two warpgroups' halves."""
FORWARD, GATED, INTERLEAVED = "hopper_forward", "hopper_forward_gated", "hopper_forward_interleaved"
"""The product with a weight, which the gradient of x is too: plain, or behind a gate, whose columns may alternate."""
WEIGHT_GRADIENT, GATE_GRADIENT = "hopper_weight_gradient", "hopper_gate_gradient"
STEADY = 1536
"""From so many rows an expert on blocks are kept in step: what they multiply in vain is little then."""
GROUPS = (4, 8, 16, 32)
"""What is tried for group_m."""
SLACK = 1024
"""Bytes beside tiles: barriers, what the compiler hands warpgroups, and what tiles skip to start at a multiple."""


@dataclass(frozen=True)
class Config:
    """How a product is cut and staged. A kernel passes over what it has no use for.

    Attributes:
        block_n: columns of the accumulator, a gate and its up-projection together.
        block_k: of the reduction, columns of a stage.
        num_stages: stages on their way or in use.
        store_n: columns that are stored at once.
        num_buffers: buffers of each half that stores go through.
        group_m: row tiles that share a column tile one after another.
        skew: stages by which the first half leads the second.
        steady: halves of tiles past an expert's end are multiplied too, so that blocks stay in step.
        lag: stages that gathered rows are announced after; 0 lets the copies announce themselves.
    """

    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    store_n: int = 64
    num_buffers: int = 2
    group_m: int = 16
    skew: int = 2
    steady: bool = False
    lag: int = 0


WIDE = Config()
NARROW = Config(block_n=128, store_n=32, num_stages=6)
"""For results of few columns."""
# As much of shared memory is stages or buffers; stores in smaller pieces begin sooner, more buffers let them end later.
VARIANTS = (
    Config(store_n=32, num_buffers=2),
    Config(store_n=32, num_buffers=4),
    Config(num_stages=3, num_buffers=4),
    NARROW,
    Config(block_n=128, num_stages=6),
)


def heuristic(columns: int, rows: int = 0) -> Config:
    """What is chosen without tuning for so many columns of the accumulator and so many rows an expert."""
    found = WIDE if columns > NARROW.block_n else NARROW
    return replace(found, steady=rows >= STEADY)


def filled(config: Config) -> int:
    """Up to a multiple of how many rows an expert's are filled up and multiplied."""
    return ROWS if config.steady else ROWS // 2


def stages(config: Config) -> int:
    """Bytes of the operands' stages."""
    return config.num_stages * (ROWS + config.block_n) * config.block_k * 2


def shared_memory(config: Config) -> int:
    """Most bytes of shared memory that a product or a weight's gradient takes."""
    return stages(config) + config.num_buffers * ROWS * config.store_n * 2 + SLACK


def legal(config: Config, needed: int, limit: int) -> str | None:
    """Why ``config`` cannot run, or None if it can.

    Args:
        config: what is to run.
        needed: bytes of shared memory that its kernel takes.
        limit: bytes that the device has.
    """
    if config.block_n not in (WIDE.block_n, NARROW.block_n) or config.block_k != WIDE.block_k:
        return (
            f"its tiles are of {NARROW.block_n} or {WIDE.block_n} columns and {WIDE.block_k} of the reduction"
        )
    if config.store_n not in (32, 64):
        return f"store_n = {config.store_n} is not 32 or 64"
    if config.num_stages < 2 or config.num_buffers < 1 or config.group_m < 1:
        return "it has fewer than 2 stages, or no buffer, or no rows to a group"
    if config.group_m > MOST_GROUPED:
        return f"group_m = {config.group_m} is above {MOST_GROUPED}"
    # Where the halves wait for one another, every stage that one waits for has to be on its way.
    skew, lag, num_stages = config.skew, config.lag, config.num_stages
    if min(skew, lag) < 0 or lag >= num_stages - 1 or skew + lag >= num_stages:
        return f"skew = {skew} and lag = {lag} do not go with {num_stages} stages"
    return f"it needs {needed} bytes of shared memory, the device has {limit}" if needed > limit else None


def search_space(
    default: Config,
    variants: Iterable[Config],
    skews: Iterable[int] = (),
    lags: Iterable[int] = (),
    halves: bool = False,
) -> list[Config]:
    """What a tuner may try: the default and its variants in every grouping, and the default with another skew or lag.

    With ``halves`` also the default kept in step or not. Variants have the default's skew, and keep in step as it does.
    """
    found = [
        replace(config, group_m=group, steady=default.steady, skew=min(default.skew, config.num_stages - 1))
        for config in (default, *variants)
        for group in GROUPS
        if config.block_n <= default.block_n
    ]
    found += [replace(default, skew=skew) for skew in skews]
    found += [replace(default, steady=not default.steady)] if halves else []
    found += [replace(default, lag=lag, skew=min(default.skew, default.num_stages - lag - 1)) for lag in lags]
    return [config for config in dict.fromkeys(found) if config != default]


def family(config: Config) -> tuple[int, ...]:
    """What is likely to decide: all but how tiles follow one another, which half leads and whether blocks keep step."""
    follows = ("group_m", "skew", "steady")
    return tuple(getattr(config, f.name) for f in fields(config) if f.name not in follows)
