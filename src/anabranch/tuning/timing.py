"""Medians of interleaved runs, each with a cold L2 cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

FLUSHED = 256 * 2**20
"""Bytes written before each run: more than any GPU's L2 cache."""
FLUSHES = 4
"""How often: the device is busy with that while the host launches, so launching is not what is timed."""

Name = TypeVar("Name", bound=Hashable)


def medians(
    runs: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device
) -> dict[Name, float]:
    """Seconds of each run: the median over rounds, in each of which every one runs once, another one first."""
    names = list(runs)
    times: dict[Name, list[float]] = {name: [] for name in names}
    one_round = _cuda_round if device.type == "cuda" else _host_round
    for index in range(1 + rounds):
        shift = index % len(names)
        for name, seconds in one_round(runs, names[shift:] + names[:shift], device).items():
            if index:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def _cuda_round(
    runs: Mapping[Name, Callable[[], object]], order: list[Name], device: torch.device
) -> dict[Name, float]:
    with torch.cuda.device(device):
        flushed = torch.empty(FLUSHED, dtype=torch.int8, device=device)
        events = {}
        for name in order:
            for _ in range(FLUSHES):
                flushed.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[name]()
            stop.record()
            events[name] = start, stop
        torch.cuda.synchronize(device)
    return {name: start.elapsed_time(stop) / 1e3 for name, (start, stop) in events.items()}


def _host_round(
    runs: Mapping[Name, Callable[[], object]], order: list[Name], device: torch.device
) -> dict[Name, float]:
    times = {}
    for name in order:
        start = time.perf_counter()
        runs[name]()
        times[name] = time.perf_counter() - start
    return times
