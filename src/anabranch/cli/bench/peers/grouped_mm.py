"""torch's grouped product on sorted rows."""

from anabranch.cli import peers
from anabranch.cli.bench.variants import Variant


def load() -> Variant:
    """Where this torch has it."""
    if not peers.has_grouped_mm():
        raise ImportError("this torch has no torch.nn.functional.grouped_mm")
    return Variant("torch grouped_mm", peers.moe_grouped_mm)
