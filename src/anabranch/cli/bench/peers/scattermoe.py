"""ScatterMoE: Triton kernels that gather and scatter inside the products."""

import importlib

import torch.nn.functional as F
from torch import Tensor

from anabranch.cli.bench.variants import Variant


def load() -> Variant:
    """Its parallel linears with torch's activation between them."""
    ops = importlib.import_module("scattermoe.parallel_experts")

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        top_k, experts = ids.shape[1], down.shape[0]
        sorted_ids, sorted_slots, offsets = ops.flatten_sort_count(ids, num_experts=experts)
        routing = sorted_ids, sorted_slots, offsets
        h = ops.parallel_linear(x, gate_up.permute(0, 2, 1), top_k, *routing, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        return ops.parallel_linear(
            F.silu(gate) * up, down.permute(0, 2, 1), 1, *routing, grouped_in=True, gates=weights.to(x.dtype)
        )

    return Variant("ScatterMoE", run, tunes=True)
