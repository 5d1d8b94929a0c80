"""Measured tiles: the search, its check and its timing, the file on disk, and the tables shipped with the package.

Nothing is searched unless ``ANABRANCH_AUTOTUNE=1`` asks for it. docs/tuning.md is the page for users.
"""

from anabranch.ops.grouped_gemm.config import GroupedGemmConfig, GroupedGemmConfigs
from anabranch.tuning.key import Key, bucket
from anabranch.tuning.lookup import HEURISTIC, Product, Settled, choose, standing
from anabranch.tuning.search import Outcome, Sample, Trial

__all__ = [
    "HEURISTIC",
    "GroupedGemmConfig",
    "GroupedGemmConfigs",
    "Key",
    "Outcome",
    "Product",
    "Sample",
    "Settled",
    "Trial",
    "bucket",
    "choose",
    "standing",
]
