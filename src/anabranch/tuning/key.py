"""What a tuned result holds for: a kind of product of a certain size, on a certain GPU with certain software."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

FEWEST, MOST = 16, 4096
"""Buckets of rows end here: a smaller tile than 16 rows there is not, and past 4096 the ragged ends do not show."""


@dataclass(frozen=True)
class Key:
    """A product as the tuner tells it from others. No count of tokens is in it, only a bucket.

    Attributes:
        op: whose tiles these are, and what its shipped table is called.
        kind: which of the op's kernels.
        dtype: of the operands; ``tf32`` for fp32 that may be rounded to it.
        N: columns of the weight's product, gate and up together.
        K_dim: depth of the reduction (a dimension of the result, in a weight's gradient).
        E: experts.
        rows: the bucket of rows per expert, see :func:`bucket`.
        traits: what else decides speed, such as ``gather``, or which operands come through TMA.
    """

    op: str
    kind: str
    dtype: str
    N: int
    K_dim: int
    E: int
    rows: int
    traits: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = f"N={self.N} K={self.K_dim} E={self.E} rows<={self.rows}"
        return " ".join((f"{self.op}.{self.kind}", self.dtype, sizes, *self.traits))


@dataclass(frozen=True)
class Place:
    """Where a measurement was made, as far as it decides what is fastest."""

    device: str
    capability: str
    triton: str
    driver: str

    @property
    def file(self) -> Path:
        """Of its results, below the cache's folder."""
        folder = f"{slug(self.device)}-{self.capability}"
        return Path("tuning", folder, f"{slug(self.triton)}-{slug(self.driver)}.json")


def bucket(rows: int, experts: int) -> int:
    """The power of two from :data:`FEWEST` to :data:`MOST` that the mean of rows per expert is rounded up to."""
    mean = -(-rows // max(experts, 1))
    return min(MOST, max(FEWEST, 1 << max(mean - 1, 0).bit_length()))


@cache
def place(device: torch.device) -> Place | None:
    """Where a device's measurements are made; None where kernels are interpreted, whose speed is nobody's."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    triton = importlib.import_module("triton").__version__
    return Place(torch.cuda.get_device_name(device), f"sm_{major}{minor}", triton, driver_version())


def driver_version(path: str = "/proc/driver/nvidia/version") -> str:
    """The driver's version, or at least that of the newest CUDA it serves."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path(path).read_text())
    except OSError:
        found = None
    return found[1] if found else f"cuda{torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


def slug(text: str) -> str:
    """A file's name of a device's or a version's."""
    return re.sub(r"[^a-z0-9.+]+", "_", text.lower()).strip("_.") or "unknown"
