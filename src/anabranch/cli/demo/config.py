"""The demo's numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Model and training. The defaults were chosen for two CPU cores and two minutes."""

    width: int = 128
    depth: int = 4
    heads: int = 2
    intermediate: int = 256
    experts: int = 8
    top_k: int = 2
    context: int = 256
    buckets: int = 4096  # rows of each n-gram table, a power of two
    batch: int = 8
    adam_rate: float = 6e-3
    muon_rate: float = 0.018
    weight_decay: float = 0.1
    warmup: float = 0.05  # share of the steps
    final_rate: float = 0.05  # share of the peak
    balance: float = 0.1  # of the load-balance loss; 0.01 left an expert here and there with next to nothing
    max_steps: int = 4000  # a GPU would find time for more than the text is worth

    @property
    def tokens_per_step(self) -> int:
        """Bytes the model is trained on in a step."""
        return self.batch * self.context


SMALLEST = Config(width=16, depth=2, heads=2, intermediate=16, experts=4, context=32, buckets=64, batch=2)
"""For tests: everything the demo does, in no time."""
