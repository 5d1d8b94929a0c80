"""Named shapes for tests and benchmarks: real models, and the same scaled down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A moe_mlp's sizes and what varies about it. Tokens, hidden, intermediate, experts, top_k: T, H, I, E, K."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "swiglu"
    bias: bool = False
    transpose_weight: bool = False
    gate_layout: str = "concatenated"
    weight_on: str = "output"
    routing: str = "random"
    dropped: float = 0.0
    save: str = "activations"


BENCHMARKS = {
    "cpu": Case(1024, 512, 256, 32, 4),
    "qwen": Case(16384, 2048, 768, 128, 8),
    "sonic": Case(32768, 4096, 1024, 128, 8),
    "mixtral": Case(8192, 4096, 14336, 8, 2),
}
"""What benchmarks time: a small layer for a CPU, and Qwen3-30B-A3B, SonicMoE's and Mixtral-8x7B's layers."""

TESTS = {
    "qwen": Case(48, 32, 12, 16, 8),
    "mixtral": Case(40, 32, 56, 8, 2),
    "gpt_oss": Case(33, 24, 24, 8, 4, "gpt_oss", bias=True, transpose_weight=True, gate_layout="interleaved"),
    "llama4": Case(21, 16, 20, 4, 1, weight_on="input"),
    "nemotron": Case(17, 16, 24, 5, 3, "relu_squared"),
    "deepseek_dropped": Case(31, 24, 8, 12, 6, routing="zipf", dropped=0.4),
    "odd": Case(7, 5, 3, 3, 2, "geglu", bias=True),
    "one": Case(1, 1, 1, 1, 1),
    "duplicates": Case(19, 8, 6, 3, 4, "clamped_swiglu(limit=0.7)", routing="duplicates"),
    "one_expert": Case(24, 16, 8, 6, 2, "reglu", bias=True, weight_on="input", routing="one_expert"),
    "empty_first": Case(24, 16, 8, 6, 2, "gelu_tanh", transpose_weight=True, routing="empty_first"),
    "every_other": Case(24, 16, 8, 6, 2, "geglu_tanh", gate_layout="interleaved", routing="every_other"),
    "inputs": Case(23, 24, 12, 5, 3, transpose_weight=True, routing="zipf", dropped=0.2, save="inputs"),
    "inputs_on_input": Case(21, 16, 20, 4, 2, "gelu", True, weight_on="input", dropped=0.3, save="inputs"),
    "all_dropped": Case(6, 8, 4, 3, 2, bias=True, dropped=1.0),
    "no_tokens": Case(0, 8, 4, 3, 2, bias=True),
}
"""What the conformance suite runs: real models' features at a hundredth of the size, and odd corners."""
