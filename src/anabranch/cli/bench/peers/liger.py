"""Liger's fused MoE: Triton kernels with a tile of 64 rows."""

import importlib

import torch
from torch import Tensor

from anabranch.cli.bench.variants import Variant


def load() -> Variant:
    """Its autograd function."""
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return function.apply(x, gate_up, down, ids, weights)

    return Variant("Liger", run, ids_dtype=torch.int32, tunes=True, waits=True)
