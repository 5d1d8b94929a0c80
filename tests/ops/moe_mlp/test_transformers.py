"""transformers as an independent witness: the eager experts of five model families, values and gradients."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from anabranch import moe_mlp
from anabranch.testing import routing

FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {"moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}


def experts(family: str, dtype: torch.dtype) -> torch.nn.Module:
    """The family's experts with random parameters and its plain implementation."""
    prefix, sizes = FAMILIES[family]
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, f"{prefix}Config")(hidden_size=32, intermediate_size=24, **sizes)
    config._experts_implementation = "eager"
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(modeling, f"{prefix}Experts")(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def ours(family: str, module: torch.nn.Module, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    if family != "gpt_oss":
        return moe_mlp(x, module.gate_up_proj, module.down_proj, ids, w)
    return moe_mlp(
        x,
        module.gate_up_proj,
        module.down_proj,
        ids,
        w,
        activation="gpt_oss",
        gate_up_bias=module.gate_up_proj_bias,
        down_bias=module.down_proj_bias,
        transpose_weight=True,
        gate_layout="interleaved",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_agree(family: str) -> None:
    module = experts(family, torch.float64)
    x = torch.randn(40, 32, dtype=torch.float64, requires_grad=True)
    ids = routing(40, 6, 2, "zipf")
    w = torch.rand(40, 2, dtype=torch.float64, requires_grad=True)
    leaves = (x, w, *module.parameters())
    out, expected = ours(family, module, x, ids, w), module(x, ids, w)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    grad = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, leaves, grad) for y in (out, expected))
    for a, b in zip(found, wanted, strict=True):
        assert bool((b != 0).any())
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_agree_in_bf16_as_the_routers_call_them(family: str) -> None:
    """DeepSeek-V3's router gives fp32 weights to a bf16 model, the others bf16."""
    module = experts(family, torch.bfloat16)
    x, ids = torch.randn(40, 32, dtype=torch.bfloat16), routing(40, 6, 2)
    w = torch.rand(40, 2, dtype=torch.float32 if family == "deepseek_v3" else torch.bfloat16)
    with torch.no_grad():
        out, theirs = ours(family, module, x, ids, w), module(x, ids, w)
        truth = module.double()(x.double(), ids, w.double())
    assert out.dtype == torch.bfloat16
    assert (out - truth).norm() <= 1.5 * (theirs - truth).norm() + 1e-3 * truth.norm()
