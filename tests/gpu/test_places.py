"""Tensors on different devices are refused, each by its name; a test has two of them where there is one GPU."""

import re

import pytest
import torch

from anabranch import ExpertLayout, dual_gemm, grouped_gemm, moe_mlp, multi_gemm, permute, unpermute
from anabranch.errors import ArgumentError
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import routing

pytestmark = pytest.mark.gpu
T, E, K, H, WIDTH = 6, 4, 2, 16, 8


def layout(device="cpu"):
    return ExpertLayout.from_topk(routing(T, E, K, "even", device=device), E)


def ones(*shape):
    return torch.ones(shape)


def ids():
    return torch.zeros(T, K, dtype=torch.int64)


CALLS = {
    "grouped_gemm": (
        grouped_gemm,
        lambda: {"x": ones(T * K, H), "weight": ones(E, WIDTH, H), "layout": layout(), "bias": ones(E, WIDTH),
                 "scale": ones(T, K)},
    ),
    "grouped_gemm, out": (
        grouped_gemm,
        lambda: {"x": ones(T * K, H), "weight": ones(E, WIDTH, H), "layout": layout(), "out": ones(T * K, WIDTH)},
    ),
    "moe_mlp": (
        moe_mlp,
        lambda: {"x": ones(T, H), "gate_up": ones(E, 2 * WIDTH, H), "down": ones(E, H, WIDTH), "expert_ids": ids(),
                 "expert_weights": ones(T, K), "gate_up_bias": ones(E, 2 * WIDTH), "down_bias": ones(E, H)},
    ),
    "permute": (permute, lambda: {"x": ones(T, H), "layout": layout()}),
    "unpermute": (unpermute, lambda: {"y": ones(T * K, H), "layout": layout(), "weights": ones(T, K)}),
    "dual_gemm": (dual_gemm, lambda: {"x0": ones(4, 5), "x1": ones(3, 7), "w0": ones(6, 5), "w1": ones(2, 7)}),
    "rope": (
        rope,
        lambda: {"q": ones(1, 2, 3, 8), "k": ones(1, 1, 3, 8), "cos": ones(9, 8), "sin": ones(9, 8),
                 "positions": torch.zeros(1, 3, dtype=torch.int64)},
    ),
    "mrope": (
        mrope,
        lambda: {"q": ones(1, 2, 3, 8), "k": ones(1, 1, 3, 8), "cos": ones(3, 1, 3, 8), "sin": ones(3, 1, 3, 8)},
    ),
    "topk_router": (topk_router, lambda: {"logits": ones(T, E), "bias": ones(E)}),
    "from_sorted": (
        ExpertLayout.from_sorted,
        lambda: {"counts": torch.ones(E, dtype=torch.int64), "row_to_slot": torch.arange(T * K), "top_k": K},
    ),
}  # fmt: skip
OPTIONS = {"mrope": {"sections": [1, 2, 1]}, "topk_router": {"k": K}}
# What decides where a call runs: its first tensor. All others can be elsewhere.
CASES = [(name, other) for name, (_, make) in CALLS.items() for other in list(make())[1:] if other != "top_k"]


def moved(value, device):
    if isinstance(value, ExpertLayout):
        return layout(device)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def refused(function, given, argument, here, there):
    with pytest.raises(ArgumentError) as error:
        function(**given)
    message = rf"\S+: {re.escape(argument)}: expected \S+ device {here}, got {there}"
    assert re.fullmatch(message, str(error.value)), str(error.value)


@pytest.mark.parametrize(("name", "other"), CASES, ids=[f"{name}-{other}" for name, other in CASES])
@pytest.mark.parametrize("there", ["cpu", "cuda:1"])
def test_a_tensor_elsewhere_is_refused_by_name(name, other, there):
    if there == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    function, make = CALLS[name]
    given = {key: moved(value, "cuda:0") for key, value in make().items()} | OPTIONS.get(name, {})
    function(**given)
    refused(function, given | {other: moved(given[other], there)}, other, "cuda:0", there)


@pytest.mark.parametrize("name", ["xs", "weights", "out"])
def test_one_of_a_list_elsewhere(name):
    given = {
        "xs": [ones(4, 5), ones(3, 7)],
        "weights": [ones(6, 5), ones(2, 7)],
        "out": [ones(4, 6), ones(3, 2)],
    }
    given = {key: [value.cuda() for value in values] for key, values in given.items()}
    multi_gemm(**given)
    given[name][1] = given[name][1].cpu()
    refused(multi_gemm, given, f"{name}[1]", "cuda:0", "cpu")
