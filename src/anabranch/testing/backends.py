"""Where a test can run here: the devices, and the backends there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from anabranch.dispatch import ORDER, unavailable

__all__ = ["here", "on", "usable_backends"]

_HERE = ContextVar("device", default="cpu")


def here() -> torch.device:
    """Where the functions of this package make tensors if they are not told: the CPU, or as :func:`on` says."""
    return torch.device(_HERE.get())


@contextmanager
def on(device: torch.device | str) -> Iterator[None]:
    """Makes tensors on a device unless another is asked for."""
    token = _HERE.set(str(device))
    try:
        yield
    finally:
        _HERE.reset(token)


def usable_backends(op: str, device: torch.device | str | None = None) -> list[str]:
    """The backends of an op that run on a device here, the reference last. For parametrizing tests."""
    device = here() if device is None else torch.device(device)
    return [name for name in ORDER if unavailable(op, name, device) is None] + ["reference"]
