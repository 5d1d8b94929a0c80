"""Times of interleaved runs, on the host's clock or by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from anabranch.cli.bench.peers import reason

Runs = Mapping[str, Callable[[], object]]
WARMUP = {"cpu": 3, "cuda": 2}
PATIENCE = 5
"""Rounds after which a run that takes much longer than the others sits out."""


class Clock:
    """How much of the time that everything may take is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; below zero when it is used up."""
        return self.end - time.monotonic()


def interleaved(
    runs: Runs, rounds: int, device: torch.device, seconds: float = float("inf")
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each run in each round, and why some failed.

    Whatever else the machine does meets all alike, so their ratios mean something where their times do not. In a
    turn it runs twice and the second time counts: as in a loop, it finds its own data in the cache, not another's,
    and on CUDA the host is ahead of the device if it can be. On CUDA the L2 cache is flushed in between.

    After five rounds a run that takes more than five times as long as the middle one sits out; after three, all end
    if ``seconds`` are over.
    """
    turn = _Turn(device)
    warmup = WARMUP[device.type]
    times: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    names, clock = list(runs), Clock(seconds)
    for index in range(warmup + rounds):
        done = index - warmup
        if done >= 3 and clock.left() < 0:
            break
        if done == PATIENCE:
            names = [name for name in names if name not in slow(times)]
        # Another one first each round: none always follows the same neighbour with the same cache.
        shift = index % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            try:
                elapsed = turn(runs[name])
            except Exception as error:  # it worked when it was checked; whatever it is, the others go on
                failed[name] = reason(error)
                continue
            if done >= 0:
                times[name].append(elapsed)
        names = [name for name in names if name not in failed]
    return {name: found for name, found in times.items() if found and name not in failed}, failed


def slow(times: Mapping[str, list[float]]) -> set[str]:
    """Those that take more than five times as long as the middle one."""
    typical = {name: statistics.median(found) for name, found in times.items() if found}
    middle = statistics.median(typical.values()) if typical else 0.0
    return {name for name, value in typical.items() if value > 5 * middle}


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(found) for name, found in times.items()}


class _Turn:
    """Runs something twice and returns the second time, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size or 2**28
            self.other = torch.empty(size, dtype=torch.int8, device=device)
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            run()
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first, last = self.events
        torch.cuda.synchronize(self.device)
        run()
        self.other.zero_()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize(self.device)
        return first.elapsed_time(last) / 1e3


def replay(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Captures a run in a CUDA graph; returns what replays it.

    Raises:
        RuntimeError: it cannot be captured, for instance because it waits for the device.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def host_seconds(run: Callable[[], object], device: torch.device, times: int = 25) -> float:
    """How long a call keeps the host, the device being idle when it starts: the median."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize(device)
    return statistics.median(found)
