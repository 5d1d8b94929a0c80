"""What the machine could do at best, by its own measure: a copy, and dense products of the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.cli.bench.problem import Problem

COPY = "device copy"
DENSE_FORWARD, DENSE_TRAINING = "dense products, forward", "dense products, training"
COPIED = {"cpu": 2**26, "cuda": 2**30}
"""Bytes that a copy reads, and writes."""


@dataclass(frozen=True)
class Sizes:
    """Of one problem: tokens, hidden, intermediate, experts, experts with rows, routed rows, bytes an element."""

    T: int
    H: int
    I: int  # noqa: E741
    E: int
    active: int
    R: int
    bytes: int

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """Waits for the device."""
        (T, H), (E, _, inner) = problem.x.shape, problem.down.shape
        return cls(T, H, inner, E, problem.active, problem.ids.numel(), problem.x.element_size())

    @property
    def flops(self) -> int:
        """Of a forward's two products; forward and backward have three times as many."""
        return 6 * self.R * self.H * self.I

    @property
    def forward_bytes(self) -> int:
        """The least that a forward moves: the weights of experts with rows, tokens in and tokens out."""
        return self.bytes * (3 * self.active * self.I * self.H + 2 * self.T * self.H)

    @property
    def training_bytes(self) -> int:
        """The least for both: a backward reads those again, writes all gradients, and h goes out and comes back."""
        backward = 3 * (self.active + self.E) * self.I * self.H + 3 * self.T * self.H
        return self.forward_bytes + self.bytes * (backward + 4 * self.R * self.I)


@dataclass(frozen=True)
class Limits:
    """Seconds that nothing on this machine can beat, if a dense product and a copy are the best it does."""

    dense_forward: float
    dense_training: float
    copy_bandwidth: float
    forward: float
    training: float

    @classmethod
    def of(cls, sizes: Sizes, times: dict[str, float], copied: int) -> Limits:
        """From the medians of the ceilings' runs, and the bytes that the copy read."""
        bandwidth = 2 * copied / times[COPY]
        forward, training = times[DENSE_FORWARD], times[DENSE_TRAINING]
        return cls(
            forward,
            training,
            bandwidth,
            max(forward, sizes.forward_bytes / bandwidth),
            max(training, sizes.training_bytes / bandwidth),
        )


def dense(problem: Problem) -> dict[str, Callable[[], object]]:
    """One plain product for each of the layer's, of as many rows as all experts have together.

    In the order of the layer: up, down, then d_a, d_down, d_x, d_gate_up.
    """
    rows, inner = problem.ids.numel(), problem.down.shape[2]
    hidden = problem.x.shape[1]

    generator = torch.Generator(problem.x.device).manual_seed(1)

    def new(*shape: int) -> Tensor:
        return problem.x.new_empty(shape).normal_(generator=generator)

    x, a, h = new(rows, hidden), new(rows, inner), new(rows, 2 * inner)
    up, down = problem.gate_up[0].contiguous(), problem.down[0].contiguous()
    return {
        "up": lambda: torch.mm(x, up.T),
        "down": lambda: torch.mm(a, down.T),
        "d_a": lambda: torch.mm(x, down),
        "d_down": lambda: torch.mm(x.T, a),
        "d_x": lambda: torch.mm(h, up),
        "d_gate_up": lambda: torch.mm(h.T, x),
    }


def ceilings(problem: Problem) -> tuple[dict[str, Callable[[], object]], int]:
    """The runs that :class:`Limits` are made of, and the bytes that the copy reads."""
    products = dense(problem)
    size = COPIED[problem.x.device.type]
    source = torch.ones(size, dtype=torch.int8, device=problem.x.device)
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {
        DENSE_FORWARD: lambda: (products["up"](), products["down"]()),
        DENSE_TRAINING: lambda: all(run() is not None for run in products.values()),
        COPY: lambda: target.copy_(source),
    }
    return runs, size
