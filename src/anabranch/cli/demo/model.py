"""A byte-level transformer whose MLPs are :class:`anabranch.nn.MoE`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.cli.demo.config import Config
from anabranch.nn import Experts, MoE, Rotary, Router, Routing, expert_counts, load_balance_loss

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(self.head_dim, base=10_000.0)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to the same."""
        B, S, width = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = F.rms_norm(q, (self.head_dim,)), F.rms_norm(k, (self.head_dim,))
        q, k = self.rotary(q, k, torch.arange(S, device=x.device).expand(B, S))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, width))


class Block(nn.Module):
    """Attention, then experts, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width)
        self.moe = MoE(
            config.width,
            config.intermediate,
            config.experts,
            config.top_k,
            router=Router(config.width, config.experts, config.top_k, renormalize=True),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """(B, S, width) to the same, and where the experts' tokens went."""
        x = x + self.attention(self.attention_norm(x))
        y, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + y, routing


class Embedding(nn.Module):
    """What a byte means after those before it: the sum of a byte's, a pair's and a triple's vector.

    Pairs and triples share the rows of hashed tables. They tell the first layer at once what it would take
    many steps to learn through attention, and cost next to nothing.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.buckets = config.buckets
        self.byte = nn.Embedding(BYTES, config.width)
        self.pair = nn.Embedding(config.buckets, config.width)
        self.triple = nn.Embedding(config.buckets, config.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, S) bytes to (B, S, width); zeros stand before the first byte."""
        one, two = F.pad(inputs, (1, 0))[:, :-1], F.pad(inputs, (2, 0))[:, :-2]
        pair = inputs + BYTES * one
        triple = pair + BYTES**2 * two
        return self.byte(inputs) + self.pair(self._bucket(pair)) + self.triple(self._bucket(triple))

    def _bucket(self, code: Tensor) -> Tensor:
        # Multiplicative hashing: the top bits, modulo 2**32, of the product with an odd number.
        return (code * 2654435761 % 2**32) // (2**32 // self.buckets)


class Transformer(nn.Module):
    """Logits of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: Config) -> None:
        # What writes to the residual stream starts smaller, as 2 * depth such terms add up; the head starts
        # at zero, so that the first loss is that of equal odds.
        for name, parameter in self.named_parameters():
            if name.startswith("embed."):
                parameter.normal_(std=0.5 if name == "embed.byte.weight" else 0.2)
            elif name.endswith("router.weight"):
                parameter.normal_(std=0.02)
            elif name == "head.weight":
                parameter.zero_()
            elif parameter.ndim >= 2:
                last = name.endswith(("out.weight", "down"))
                parameter.normal_(std=(parameter.shape[-1] * (2 * config.depth if last else 1)) ** -0.5)

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Routing]]:
        """(B, S) bytes to (B, S, 256) logits, and each block's routing."""
        x = self.embed(inputs)
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.head(self.norm(x)), routings


def shares(routings: list[Routing]) -> Tensor:
    """(layers, E) share of the slots that each expert got."""
    return torch.stack([expert_counts(routing) / max(routing.ids.numel(), 1) for routing in routings])


def imbalance(routings: list[Routing]) -> Tensor:
    """1 where the experts are used alike, more where not; the mean over layers."""
    losses = [load_balance_loss(routing) / routing.ids.shape[1] for routing in routings]
    return torch.stack(losses).mean()


def layers_of(model: Transformer) -> list[MoE]:
    """Each block's MoE layer."""
    return [block.moe for block in model.blocks if isinstance(block, Block)]


def experts_of(model: Transformer) -> list[Experts]:
    """Each block's experts."""
    return [layer.experts for layer in layers_of(model)]


def count_parameters(model: Transformer, config: Config) -> tuple[int, int]:
    """(all, those a token passes through: not the experts and the embeddings' rows that others use)."""
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(parameter.numel() for part in experts_of(model) for parameter in part.parameters())
    rows = sum(parameter.numel() for parameter in model.embed.parameters()) - 3 * config.width
    return total, total - rows - experts + experts * config.top_k // config.experts
