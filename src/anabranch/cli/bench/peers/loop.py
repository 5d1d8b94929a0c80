"""A loop over experts in plain torch."""

from anabranch.cli import peers
from anabranch.cli.bench.variants import Variant


def load() -> Variant:
    """Always there."""
    return Variant("torch loop", peers.moe_loop, waits=True)
