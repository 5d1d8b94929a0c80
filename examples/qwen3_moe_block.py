"""A Qwen3-MoE block on the drop-in for unsloth's grouped GEMM, trained beside the same block in plain PyTorch.

    python examples/qwen3_moe_block.py

The block is the sparse half of a decoder layer: norm, router, experts, residual. Both blocks start alike and take the
same steps; the example stops if their outputs or gradients part.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.interop.unsloth import grouped_gemm

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 48, 32, 24, 8, 2


class Block(nn.Module):
    """Parameters and routing of Qwen3-MoE; subclasses run the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = F.softmax(self.router(h), dim=-1, dtype=torch.float32)
        weights, ids = scores.topk(TOPK, dim=-1)
        return x + self.experts(h, weights / weights.sum(-1, keepdim=True), ids)

    def experts(self, h: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Grouped(Block):
    """Two grouped products: the first gathers tokens, the second puts weighted rows back into token order."""

    def experts(self, h: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen = ids.flatten()
        slots = chosen.argsort(stable=True)
        sizes = torch.zeros(EXPERTS, dtype=torch.int32, device=h.device)
        sizes = sizes.index_add(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        gate, up = grouped_gemm(h, self.gate_up, sizes, TOPK, slots, permute_x=True).chunk(2, dim=-1)
        y = grouped_gemm(
            F.silu(gate) * up,
            self.down,
            sizes,
            TOPK,
            slots,
            permute_y=True,
            topk_weights=weights,
            fuse_mul_post=True,
            is_first_gemm=False,
        )
        return y.view(*ids.shape, -1).sum(1)


class Plain(Block):
    """A loop over experts."""

    def experts(self, h: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for expert in range(EXPERTS):
            tokens, choice = torch.where(ids == expert)
            gate, up = F.linear(h[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            out = out.index_add(0, tokens, y * weights[tokens, choice, None])
        return out


def main(steps: int = 20, device: str = "cuda" if torch.cuda.is_available() else "cpu") -> list[float]:
    """Trains both; the losses."""
    torch.manual_seed(0)
    plain = Plain().to(device)
    grouped = Grouped().to(device)
    grouped.load_state_dict(copy.deepcopy(plain.state_dict()))
    x, wanted = torch.randn(2, TOKENS, HIDDEN, device=device)
    losses = []
    for step in range(steps):
        outputs = []
        for block in (plain, grouped):
            block.zero_grad()
            outputs.append(block(x))
            F.mse_loss(outputs[-1], wanted).backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
        losses.append(F.mse_loss(outputs[1], wanted).item())
        with torch.no_grad():
            for (name, ours), theirs in zip(grouped.named_parameters(), plain.parameters(), strict=True):
                assert theirs.grad is not None
                assert ours.grad is not None, name
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
                # One step for both, so that rounding cannot lead them to other experts.
                ours -= theirs.grad
                theirs -= theirs.grad
        print(f"step {step:2}  loss {losses[-1]:.4f}  the two blocks agree")
    return losses


if __name__ == "__main__":
    main()
