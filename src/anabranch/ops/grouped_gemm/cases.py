"""Named shapes of grouped_gemm: the two products of real models, and odd ones that find faults."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """T tokens of K experts each, of E; a weight (E, N, K_dim).

    ``gather`` says that x is in token order, ``scatter`` that the output is. The routing is of a kind that
    :func:`anabranch.testing.routing` makes, with a fraction of slots dropped.
    """

    name: str
    T: int
    E: int
    K: int
    N: int
    K_dim: int
    gather: bool = False
    scatter: bool = False
    activation: str | None = None
    routing: str = "random"
    dropped: float = 0.0

    def __str__(self) -> str:
        return self.name

    def scaled(self, divisor: int, most_experts: int = 16) -> Case:
        """A small case of the same character: sizes divided, never to a multiple of 16."""
        return replace(
            self,
            name=f"{self.name}_small",
            T=max(1, self.T // divisor // 4 - 1),
            E=min(self.E, most_experts),
            K=min(self.K, most_experts),
            N=2 * max(4, self.N // divisor // 2 + 1),
            K_dim=max(8, self.K_dim // divisor + 1),
        )


def _model(
    name: str,
    H: int,
    intermediate: int,
    E: int,
    K: int,
    activation: str = "swiglu",
    T: int = 4096,
) -> tuple[Case, Case]:
    up = Case(
        f"{name}_up",
        T,
        E,
        K,
        2 * intermediate,
        H,
        gather=True,
        activation=activation,
        routing="zipf",
    )
    down = Case(f"{name}_down", T, E, K, H, intermediate, scatter=True, routing="zipf")
    return up, down


MODELS: tuple[Case, ...] = (
    *_model("qwen3_30b_a3b", 2048, 768, 128, 8),
    *_model("gpt_oss_20b", 2880, 2880, 32, 4, "gpt_oss"),
    *_model("mixtral_8x7b", 4096, 14336, 8, 2),
    *_model("deepseek_v3", 7168, 2048, 256, 8),
    *_model("olmoe_1b_7b", 2048, 1024, 64, 8),
    *_model("llama4_scout", 5120, 8192, 16, 1),
)
"""The up and the down projection of models as they are published."""


def _odd(name: str, T: int, E: int, K: int, N: int, K_dim: int, routing: str, dropped: float = 0.0) -> Case:
    return Case(name, T, E, K, N, K_dim, routing=routing, dropped=dropped)


ODD: tuple[Case, ...] = (
    _odd("one_of_everything", 1, 1, 1, 2, 1, "even"),
    _odd("no_tokens", 0, 4, 2, 6, 5, "random"),
    _odd("all_dropped", 5, 3, 2, 4, 7, "random", 1.0),
    _odd("half_dropped", 33, 5, 2, 10, 17, "random", 0.5),
    _odd("one_expert", 19, 7, 2, 6, 33, "one_expert"),
    _odd("every_other", 40, 9, 3, 14, 15, "every_other"),
    _odd("duplicates", 30, 3, 4, 12, 16, "duplicates", 0.1),
    _odd("more_experts_than_rows", 3, 37, 1, 18, 31, "zipf"),
    _odd("narrow", 37, 2, 1, 6, 65, "empty_first"),
    _odd("tile_edge", 64, 4, 2, 32, 32, "even"),
)
"""Shapes that no model has and every kernel must take."""

SMALL: tuple[Case, ...] = (*(case.scaled(128) for case in MODELS), *ODD)
"""What a test can afford on a CPU."""
