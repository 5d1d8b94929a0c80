"""The problem that the benchmark times, and the ways to compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import anabranch
from anabranch.cli import peers
from anabranch.ops.moe_mlp.cases import Case
from anabranch.testing.inputs import randn, routing

Variant = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
OURS = "anabranch"
LOOP = "torch loop"
DIFFERENTIABLE = ("x", "gate_up", "down", "weights")


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs of one moe_mlp and the gradient of its output."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    gradient: Tensor

    @classmethod
    def make(cls, case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
        """Random ones of the sizes of a case."""
        T, H, I, E, K = case.tokens, case.hidden, case.intermediate, case.experts, case.top_k  # noqa: E741
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return randn(*shape, dtype=dtype, scale=scale, device=device, generator=generator)

        ids = routing(T, E, K, case.routing, device=device, generator=generator)
        weights = torch.rand(T, K, generator=generator).add(0.1).to(device)
        return cls(
            draw(T, H),
            draw(E, 2 * I, H, scale=H**-0.5),
            draw(E, H, I, scale=I**-0.5),
            ids,
            weights / weights.sum(-1, keepdim=True),
            draw(T, H),
        )

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in another dtype."""
        return Problem(
            self.x.to(dtype),
            self.gate_up.to(dtype),
            self.down.to(dtype),
            self.ids,
            self.weights.to(torch.promote_types(dtype, torch.float32)),
            self.gradient.to(dtype),
        )

    def forward(self, variant: Variant) -> Tensor:
        """The output, without gradients."""
        with torch.no_grad():
            return variant(self.x, self.gate_up, self.down, self.ids, self.weights)

    def train(self, variant: Variant) -> tuple[Tensor, ...]:
        """The output and the gradients of x, gate_up, down and weights."""
        leaves = [getattr(self, name).detach().requires_grad_() for name in DIFFERENTIABLE]
        x, gate_up, down, weights = leaves
        out = variant(x, gate_up, down, self.ids, weights)
        return (out.detach(), *torch.autograd.grad(out, leaves, self.gradient))

    def saved_bytes(self, variant: Variant) -> int:
        """What the forward keeps for the backward beyond its inputs."""
        leaves = [getattr(self, name).detach().requires_grad_() for name in DIFFERENTIABLE]
        x, gate_up, down, weights = leaves
        inputs = {tensor.untyped_storage().data_ptr() for tensor in (*leaves, self.ids)}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in inputs:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            # Alive until the count is taken, or a freed storage's address could come twice.
            out = variant(x, gate_up, down, self.ids, weights)
        assert out.requires_grad
        return sum(kept.values())


def ours(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """anabranch.moe_mlp."""
    return anabranch.moe_mlp(x, gate_up, down, ids, weights)


def variants() -> dict[str, Variant]:
    """Ours first, then the peers that this torch has."""
    found: dict[str, Variant] = {OURS: ours}
    if peers.has_grouped_mm():
        found["torch grouped_mm"] = peers.moe_grouped_mm
    found[LOOP] = peers.moe_loop
    return found


def dense(problem: Problem) -> Callable[[], object]:
    """The two plain products of the same sizes: what a forward could take if routing cost nothing."""
    rows, (_, width, hidden) = problem.ids.numel(), problem.gate_up.shape
    x = problem.x.new_ones(rows, hidden)
    a = problem.x.new_ones(rows, problem.down.shape[2])
    up, down = problem.gate_up[0].contiguous(), problem.down[0].contiguous()
    assert up.shape == (width, hidden)

    def run() -> None:
        torch.mm(x, up.T)
        torch.mm(a, down.T)

    return run
