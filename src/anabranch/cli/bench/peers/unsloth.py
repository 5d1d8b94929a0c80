"""unsloth's grouped GEMM, which a checkout of unsloth has in ``unsloth.kernels.moe``."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.cli.bench.variants import Variant

TILES = ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 3))
"""Rows, columns, depth, warps and stages. It would try some hundred, for tens of minutes on one shape."""


def shorten(kernel: Any) -> None:
    """Leaves a kernel's search those of its configurations that have one of the tiles."""

    def tile(config: Any) -> tuple[int, ...]:
        sizes = (config.kwargs[f"BLOCK_SIZE_{letter}"] for letter in "MNK")
        return (*sizes, config.num_warps, config.num_stages)

    kernel.configs = [config for config in kernel.configs if tile(config) in TILES] or kernel.configs


def load() -> Variant:
    """Its two fused products with torch's activation between them; it searches for tiles by itself."""
    module = importlib.import_module("unsloth.kernels.moe.grouped_gemm.interface")
    gemm = module.grouped_gemm
    for name in dir(module):
        if name.startswith("_autotuned_") and hasattr(getattr(module, name), "configs"):
            shorten(getattr(module, name))

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (tokens, top_k), flat = ids.shape, ids.reshape(-1)
        counts = torch.zeros(down.shape[0], dtype=torch.int32, device=x.device)
        counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        gather = flat.argsort(stable=True).to(torch.int32)
        routing = counts, top_k, gather
        h = gemm(x, gate_up, *routing, permute_x=True, autotune=True, is_first_gemm=True)
        gate, up = h.chunk(2, dim=-1)
        y = gemm(F.silu(gate) * up, down, *routing, permute_y=True, autotune=True, is_first_gemm=False)
        return (y.view(tokens, top_k, -1) * weights.to(y.dtype)[..., None]).sum(1)

    return Variant("unsloth", run, tunes=True)
