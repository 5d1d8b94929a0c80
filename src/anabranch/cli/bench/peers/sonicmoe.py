"""SonicMoE: CuTe DSL kernels for Hopper and Blackwell."""

import importlib

import torch
from torch import Tensor

from anabranch.cli.bench.variants import Pair, Variant


def interleave(gate_up: Tensor, down: Tensor) -> Pair:
    """Rows of gate and up in turn, as its kernels read them."""
    experts, width, hidden = gate_up.shape
    return gate_up.view(experts, 2, width // 2, hidden).transpose(1, 2).reshape(gate_up.shape), down


def separate(gate_up: Tensor, down: Tensor) -> Pair:
    """Back again."""
    experts, width, hidden = gate_up.shape
    return gate_up.reshape(experts, width // 2, 2, hidden).transpose(1, 2).reshape(gate_up.shape), down


def load() -> Variant:
    """Its two projections and their gradients, after its own routing."""
    functional = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (tokens, top_k), experts = ids.shape, down.shape[0]

        def new(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=x.device)

        slots = tokens * top_k
        counts, offsets, gather, scatter, back = (
            new(experts),
            new(experts + 1),
            *(new(slots) for _ in range(3)),
        )
        functional.TC_topk_router_metadata_triton(ids, experts, counts, offsets, gather, scatter, back)
        routing = gather, scatter, back, None, False
        a, h = functional._UpProjection.apply(
            x, gate_up.permute(1, 2, 0), None, offsets, slots, top_k, *routing, swiglu,
            not torch.is_grad_enabled(), False,
        )  # fmt: skip
        return functional._DownProjection.apply(
            a, h, down.permute(1, 2, 0), None, weights, offsets, tokens, top_k, *routing, swiglu
        )

    return Variant("SonicMoE", run, interleave, separate, torch.int32, tunes=True)
