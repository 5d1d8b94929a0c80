"""A product with faulty tiles among its candidates, on a GPU that is not there."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from anabranch.tuning import Key, Sample, Trial, bucket, key, lookup, search
from anabranch.tuning.cache import Cache
from anabranch.tuning.key import Place

PLACE = Place("NVIDIA Imaginary 1", "sm_90", "3.6.0", "580.1")
CPU = torch.device("cpu")
FAULTS = (
    "none",
    "zeros",
    "one element",
    "scaled",
    "rows swapped",
    "not written",
    "adds",
    "raises",
    "past the end",
)


@dataclass(frozen=True)
class Tiles:
    """A configuration: the larger the faster."""

    size: int
    fault: int = 0
    deep: bool = False


@dataclass(eq=False)
class Product:
    """``x @ w.T`` of the first rows, zeros in the others."""

    x: torch.Tensor
    w: torch.Tensor
    candidates: tuple[Tiles, ...] = (Tiles(2), Tiles(4))
    op: str = "multiply"
    device: torch.device = CPU
    launched: list[Tiles] = field(default_factory=list)
    searched: int = 0

    @classmethod
    def make(cls, rows=40, size=1.0, dtype=torch.float32, **options):
        x, w = size * torch.randn(rows, 24, dtype=torch.float64), torch.randn(12, 24, dtype=torch.float64) / 5
        return cls(x.to(dtype), w.to(dtype), **options)

    @property
    def used(self):
        return self.x.shape[0] - 3

    def key(self):
        rows = bucket(self.x.shape[0], 1)
        return Key(self.op, "forward", str(self.x.dtype), *self.w.shape, 1, rows)

    def refusal(self, config):
        return "it is too large" if config.size > 100 else None

    def run(self, config, outputs):
        (out,) = outputs
        fault = FAULTS[config.fault]
        if fault == "raises":
            raise RuntimeError("out of resource:\nshared memory")
        self.launched.append(config)
        y = self.x @ self.w.T
        y[self.used :] = 0
        if fault == "zeros":
            y = y * 0
        elif fault == "one element":
            y[7, 3] += y[7].abs().max() / 4
        elif fault == "scaled":
            y = y * 1.05
        elif fault == "rows swapped":
            y = y.flip(0)
        elif fault == "not written":
            y[11] = out[11]
        elif fault == "adds":
            y = y + out
        elif fault == "past the end":
            y[self.used + 1] = 1e-6
        out.copy_(y)

    def samples(self):
        rows = torch.arange(0, self.x.shape[0], 5)
        unused = (rows >= self.used)[:, None]
        truth = (self.x[rows].double() @ self.w.double().T).masked_fill(unused, 0)
        return [Sample("y", rows, truth, (self.x[rows] @ self.w.T).masked_fill(unused, 0))]

    def trial(self, default):
        self.searched += 1

        def outputs():
            return [torch.full((self.x.shape[0], self.w.shape[0]), 7.0, dtype=self.x.dtype)]

        return Trial(
            self.key(), default, self.candidates, lambda c: (c.size, c.fault), outputs, self.run, self.samples
        )


def timer(runs, rounds, device=None):
    """Runs each, and says that larger tiles are faster."""
    for run in runs.values():
        run()
    return {config: 1e-3 / config.size for config in runs}


@pytest.fixture
def product():
    return Product.make


@pytest.fixture
def tiles():
    return Tiles


@pytest.fixture
def clock():
    return timer


@pytest.fixture
def place():
    return PLACE


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A process on that GPU, with a cache of its own; returns how to start it afresh."""
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ANABRANCH_AUTOTUNE", raising=False)
    monkeypatch.setattr(key, "place", lambda device: PLACE)
    monkeypatch.setattr(search, "medians", timer)

    def restart():
        monkeypatch.setattr(lookup, "_cache", Cache(poll=0))

    restart()
    return restart
