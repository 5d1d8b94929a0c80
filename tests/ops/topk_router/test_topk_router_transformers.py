"""topk_router against the routers of transformers: values, ids and gradients, on data without ties."""

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import randn

T, H, E, K = 64, 16, 32, 4


def routers():
    small = dict(hidden_size=H, num_experts_per_tok=K)
    yield "mixtral", MixtralTopKRouter(MixtralConfig(num_local_experts=E, **small)), dict(renormalize=True)
    yield (
        "gpt_oss",
        GptOssTopKRouter(GptOssConfig(num_local_experts=E, **small)),
        dict(order="topk_then_score"),
    )
    for norm in (False, True):
        for name, router, config in (
            ("qwen3", Qwen3MoeTopKRouter, Qwen3MoeConfig),
            ("olmoe", OlmoeTopKRouter, OlmoeConfig),
        ):
            made = router(config(num_experts=E, norm_topk_prob=norm, **small))
            yield f"{name}-{norm}", made, dict(renormalize=norm)
        for groups, top in ((1, 1), (8, 3), (4, 4)):
            made = DeepseekV3TopkRouter(
                DeepseekV3Config(
                    n_routed_experts=E,
                    num_local_experts=E,
                    n_group=groups,
                    topk_group=top,
                    norm_topk_prob=norm,
                    routed_scaling_factor=2.5,
                    **small,
                )
            )
            options = dict(
                score="sigmoid", renormalize=norm, num_groups=groups, top_groups=top, scaling=2.5, bias=True
            )
            yield f"deepseek_v3-{norm}-{groups}-{top}", made, options


CASES = {name: (router, options) for name, router, options in routers()}


@pytest.mark.parametrize("name", CASES)
def test_same_as_transformers(name):
    router, options = CASES[name]
    options = dict(options)
    with torch.no_grad():
        for value in router.parameters():
            value.copy_(randn(*value.shape))
        if options.get("bias"):
            router.e_score_correction_bias.copy_(randn(E, scale=0.2))
            options["bias"] = router.e_score_correction_bias
    x, up = randn(T, H), randn(T, E)

    logits, weights, ids = router(x)
    logits.retain_grad()
    torch.zeros(T, E).scatter(1, ids, weights).backward(up)

    mine = logits.detach().clone().requires_grad_()
    my_weights, my_ids = topk_router(mine, K, **options)
    torch.zeros(T, E).scatter(1, my_ids, my_weights).backward(up)
    torch.testing.assert_close(my_ids.sort().values, ids.sort().values, rtol=0, atol=0)
    if "deepseek" not in name:  # which sorts by nothing
        torch.testing.assert_close(my_ids, ids, rtol=0, atol=0)
    torch.testing.assert_close(
        torch.zeros(T, E).scatter(1, my_ids, my_weights),
        torch.zeros(T, E).scatter(1, ids, weights.detach()),
        rtol=1e-6,
        atol=0,
    )
    torch.testing.assert_close(mine.grad, logits.grad, rtol=1e-5, atol=1e-7 * logits.grad.abs().max().item())
