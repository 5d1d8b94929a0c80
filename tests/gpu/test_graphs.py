"""One graph of a whole layer, from the router's logits to the last gradient, replayed for every kind of routing."""

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm, moe_mlp
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import ROUTINGS, assert_same, randn, routing

pytestmark = pytest.mark.gpu
T, E, K, H, WIDTH = 96, 8, 2, 64, 48
KINDS = [*((kind, 0.0) for kind in ROUTINGS), ("random", 0.4), ("random", 1.0)]


def tensors(dtype):
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return randn(*shape, dtype=dtype, device="cuda", generator=generator)

    return {
        "x": draw(T, H),
        "gate_up": draw(E, 2 * WIDTH, H),
        "down": draw(E, H, WIDTH),
        "logits": draw(T, E),
        "weights": draw(T, K).float(),
        "ids": routing(T, E, K, device="cuda", generator=generator),
        "grad": draw(T, H),
    }


def routed_mlp(x, gate_up, down, logits, weights, ids, grad):
    chosen, found = topk_router(logits, K, renormalize=True)
    return moe_mlp(x, gate_up, down, found, chosen), (x, gate_up, down, logits), grad


def mlp(x, gate_up, down, logits, weights, ids, grad):
    return moe_mlp(x, gate_up, down, ids, weights), (x, gate_up, down, weights), grad


def product(x, gate_up, down, logits, weights, ids, grad):
    layout = ExpertLayout.from_topk(ids, E)
    out = grouped_gemm(x, gate_up, layout, gather=True, scatter=True, scale=weights, activation="swiglu")
    return out, (x, gate_up, weights), grad.repeat(K, 1)[:, :WIDTH]


def step(function, given):
    leaves = {n: v.detach().requires_grad_(v.is_floating_point() and n != "grad") for n, v in given.items()}
    out, wanted, grad = function(**leaves)
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("function", [routed_mlp, mlp, product])
def test_one_graph_for_every_routing(function, dtype):
    static = tensors(dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(function, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(function, static)
    for kind, dropped in KINDS:
        ids = routing(T, E, K, kind, dropped=dropped)
        # Logits whose best are the ids, as far as distinct experts go: empty experts stay empty.
        inside = (ids >= 0) & (ids < E)
        logits = torch.full((T, E), -9.0).scatter(1, ids.clamp(0, E - 1), inside.float() * 5)
        fresh = {"ids": ids, "logits": logits, "x": randn(T, H), "weights": torch.rand(T, K)}
        for name, value in fresh.items():
            static[name].copy_(value)
        graph.replay()
        names = ("out", "first", "second", "third", "fourth")
        for name, actual, expected in zip(names, captured, step(function, static), strict=False):
            assert_same(actual, expected, name=f"{kind}, {dropped} dropped: {name}")
