"""Which backends a test can run here."""

from __future__ import annotations

import torch

from anabranch.dispatch import ORDER, unavailable

__all__ = ["usable_backends"]


def usable_backends(op: str, device: torch.device | str = "cpu") -> list[str]:
    """The backends of an op that run on a device here, the reference last. For parametrizing tests."""
    device = torch.device(device)
    return [name for name in ORDER if unavailable(op, name, device) is None] + ["reference"]
