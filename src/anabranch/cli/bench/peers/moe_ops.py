"""moe-ops: separate Triton operators for permutation and grouped products."""

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.cli.bench.variants import Variant


def load() -> Variant:
    """Its operators with torch's activation between them."""
    ops = importlib.import_module("moe_ops")

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = ids.shape
        rows, back, offsets = ops.permute(x, ids, E=down.shape[0])
        gate, up = ops.grouped_gemm(rows, gate_up, offsets, trans_b=True).chunk(2, dim=-1)
        y = ops.grouped_gemm(F.silu(gate) * up, down, offsets, trans_b=True)
        return ops.unpermute(y, back, weights, num_tokens=tokens, num_topK=top_k)

    return Variant("moe-ops", run, ids_dtype=torch.int32, tunes=True)
