"""Medians of interleaved runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

WARMUP = 3


def medians(runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Seconds of each run: the median over rounds, in each of which every one has its turn.

    Whatever else the machine does meets all alike, so their ratios mean something where their times do not. In a
    turn it runs twice and the second time counts: as in a loop, it finds its own data in the cache, not another's.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(WARMUP + rounds):
        # Another one first each round: none always follows the same neighbour with the same cache.
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            runs[name]()
            start = _now(device)
            runs[name]()
            elapsed = _now(device) - start
            if index >= WARMUP:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
