"""The inputs of one moe_mlp, what is right for them, and a variant's own view of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.cli.bench.variants import Variant
from anabranch.ops.moe_mlp.cases import Case

DIFFERENTIABLE = ("x", "gate_up", "down", "weights")
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The output and the gradients of x, gate_up, down and weights."""


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
    def make(
        cls, case: Case, dtype: torch.dtype, device: torch.device, exponent: float = 0.0, seed: int = 0
    ) -> Problem:
        """Random ones of the sizes of a case, drawn on the device. See :func:`route` for the exponent."""
        T, H, I, E, K = case.tokens, case.hidden, case.intermediate, case.experts, case.top_k  # noqa: E741
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device, generator=generator).mul_(scale)

        weights, ids = route(T, E, K, exponent, device, generator)
        gate_up, down = draw(E, 2 * I, H, scale=H**-0.5), draw(E, H, I, scale=I**-0.5)
        return cls(draw(T, H), gate_up, down, ids, weights, draw(T, H))

    def view(self, variant: Variant) -> View:
        """The same as a variant wants it."""
        return View(self, variant)

    @property
    def active(self) -> int:
        """How many experts have rows. Waits for the device."""
        return len(self.ids.unique())

    def reference(self, dtype: torch.dtype) -> Results:
        """The output and the gradients by a loop over experts, written out by hand; products in ``dtype``."""
        out, d_x = (torch.zeros(self.x.shape, dtype=dtype, device=self.x.device) for _ in range(2))
        d_gate_up, d_down = (torch.zeros_like(w, dtype=dtype) for w in (self.gate_up, self.down))
        d_weights = torch.zeros_like(self.weights, dtype=torch.promote_types(dtype, torch.float32))
        for expert in range(self.gate_up.shape[0]):
            token, choice = torch.where(self.ids == expert)
            x, d_y = self.x[token].to(dtype), self.gradient[token].to(dtype)
            up, down = self.gate_up[expert].to(dtype), self.down[expert].to(dtype)
            scale = self.weights[token, choice, None]
            gate, value = (x @ up.T).chunk(2, dim=-1)
            sigmoid = gate.sigmoid()
            a = F.silu(gate) * value
            y = a @ down.T
            out.index_add_(0, token, (y * scale).to(dtype))
            d_weights[token, choice] = (y * d_y).sum(-1).to(d_weights.dtype)
            d_y = (d_y * scale).to(dtype)
            d_down[expert] = d_y.T @ a
            d_a = d_y @ down
            d_gate = d_a * value * sigmoid * (1 + gate * (1 - sigmoid))
            d_h = torch.cat((d_gate, d_a * gate * sigmoid), dim=-1)
            d_gate_up[expert] = d_h.T @ x
            d_x.index_add_(0, token, d_h @ up)
        return out, d_x, d_gate_up, d_down, d_weights


def route(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    exponent: float,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """(T, K) weights that add up to 1, and ids: the top-k of a softmax of random logits.

    With an exponent above 0 experts are chosen by Zipf's law, and the last one not at all, if K leaves one over.
    """
    logits = torch.randn(num_tokens, num_experts, device=device, generator=generator)
    if exponent:
        ranks = torch.arange(1, num_experts + 1, device=device, dtype=torch.float32)
        logits -= exponent * ranks.log()
        if top_k < num_experts:
            logits[:, -1] = -1e9
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


@dataclass(eq=False)
class View:
    """A problem with a variant: its weights as the variant stores them, and leaves for the gradients."""

    problem: Problem
    variant: Variant
    leaves: tuple[Tensor, ...] = field(init=False)
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        own, pack = self.problem, self.variant.pack
        gate_up, down = pack(own.gate_up, own.down) if pack else (own.gate_up, own.down)
        values = own.x, gate_up, down, own.weights
        self.leaves = tuple(value.detach().requires_grad_() for value in values)
        self.ids = own.ids.to(self.variant.ids_dtype)

    def run(self) -> Tensor:
        """The output, with what its gradient needs where gradients are on."""
        x, gate_up, down, weights = self.leaves
        return self.variant.run(x, gate_up, down, self.ids, weights)

    def forward(self) -> Tensor:
        """The output, without gradients."""
        with torch.no_grad():
            return self.run()

    def train(self) -> tuple[Tensor, ...]:
        """The output and the gradients, in the variant's layout."""
        out = self.run()
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.problem.gradient))

    def results(self) -> tuple[Tensor, ...]:
        """The output and the gradients, in the problem's layout."""
        out, d_x, d_gate_up, d_down, d_weights = self.train()
        if self.variant.unpack:
            d_gate_up, d_down = self.variant.unpack(d_gate_up, d_down)
        return out, d_x, d_gate_up, d_down, d_weights

    def saved_bytes(self) -> int:
        """What the forward keeps for the backward beyond its inputs; its output does not count.

        On CUDA what the allocator handed out during the forward and did not get back, else what autograd saved.
        """
        return _allocated(self) if self.ids.is_cuda else _hooked(self)


def _allocated(view: View) -> int:
    device = view.ids.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    out = view.run()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before - out.untyped_storage().nbytes())


def _hooked(view: View) -> int:
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (*view.leaves, view.ids)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Alive until the count is taken, or a freed storage's address could come twice.
        out = view.run()
    assert out.requires_grad
    return sum(kept.values())


def truth(problem: Problem) -> Results:
    """What is right: in fp64, or in fp32 where that would take too long or too much memory."""
    small = problem.gate_up.numel() <= 2**28 and problem.ids.numel() * problem.x.shape[1] <= 2**28
    with exact_products():
        return problem.reference(torch.float64 if small else torch.float32)


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of fp32 are in fp32 inside, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
