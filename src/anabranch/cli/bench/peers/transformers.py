"""transformers' experts, with the implementation that calls torch's grouped product."""

import importlib

import torch
from torch import Tensor

from anabranch.cli.bench.variants import Variant


def load() -> Variant:
    """Qwen3-MoE's module around whatever weights it is called with."""
    model = importlib.import_module("transformers.models.qwen3_moe")
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    modules: dict[tuple[int, ...], torch.nn.Module] = {}

    def module(experts: int, hidden: int, inner: int, top_k: int) -> torch.nn.Module:
        sizes = experts, hidden, inner, top_k
        if sizes not in modules:
            config = model.Qwen3MoeConfig(
                hidden_size=hidden,
                moe_intermediate_size=inner,
                num_experts=experts,
                num_experts_per_tok=top_k,
            )
            config._experts_implementation = "grouped_mm"
            with torch.device("meta"):
                made = modeling.Qwen3MoeExperts(config)
            # Plain attributes take their place, so that gradients reach the caller's tensors.
            del made.gate_up_proj, made.down_proj
            modules[sizes] = made
        return modules[sizes]

    def run(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts = module(down.shape[0], down.shape[1], down.shape[2], ids.shape[1])
        experts.__dict__.update(gate_up_proj=gate_up, down_proj=down)
        return experts(x, ids, weights.to(x.dtype))

    return Variant("transformers grouped_mm", run)
