"""Router: values, precision of the logits, the selection bias."""

import copy

import pytest
import torch
from torch import nn

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.nn import MoE, Router, expert_counts
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import assert_same, randn

T, H, E, K = 20, 16, 8, 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_forward(dtype, bias):
    router = Router(H, E, K, score="sigmoid", renormalize=True, scaling=2.0, bias=bias, dtype=dtype)
    x = randn(2, T // 2, H, dtype=dtype).requires_grad_()
    routing = router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    flat = x.detach().view(-1, H).to(wide)
    linear = nn.functional.linear(flat, router.weight.to(wide), router.bias.to(wide) if bias else None)
    assert_same(routing.logits, linear)
    weights, ids = topk_router(linear, K, score="sigmoid", renormalize=True, scaling=2.0)
    assert_same(routing.weights, weights)
    assert_same(routing.ids, ids)
    (routing.weights * torch.arange(K)).sum().backward()
    assert x.grad.dtype == dtype
    for parameter in router.parameters():
        assert parameter.grad.dtype == dtype
        assert (parameter.grad != 0).any()


def test_gradients_are_those_of_plain_pytorch():
    router = Router(H, E, K, renormalize=True, bias=True, dtype=torch.float64)
    x = randn(5, H, dtype=torch.float64).requires_grad_()
    up = randn(5, K, dtype=torch.float64)
    routing = router(x)
    scores = (x @ router.weight.T + router.bias).softmax(-1)
    expected = scores.gather(1, routing.ids)
    expected = expected / expected.sum(-1, keepdim=True)
    inputs = (x, router.weight, router.bias)
    grads = torch.autograd.grad(routing.weights, inputs, up)
    for grad, other in zip(grads, torch.autograd.grad(expected, inputs, up), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tells_apart_logits_that_bf16_does_not(dtype, autocast):
    # Logits 1 and 1 + 2**-9 of experts 0 and 1; bf16 has nothing between 1 and 1 + 2**-7.
    router = Router(2, 2, 1, dtype=dtype)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2**-9]]))
    x = torch.ones(4, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = router(x)
    assert routing.logits.tolist() == [[1.0, 1.001953125]] * 4
    assert (routing.ids == 1).all()
    assert (x @ router.weight.T).bfloat16().argmax(-1).eq(0).all()


def test_equal_rows_of_equal_experts_go_to_the_lower_id():
    router = Router(H, E, 3)
    with torch.no_grad():
        router.weight.copy_(randn(1, H).expand(E, H))
    assert_same(router(randn(64, H)).ids, torch.arange(3).expand(64, 3))


class TestSelectionBias:
    def test_moves_towards_the_mean(self):
        router = Router(H, 4, 1, selection_bias=True)
        assert (router.selection_bias == 0).all()
        router.update_selection_bias(torch.tensor([10, 0, 5, 5], dtype=torch.int32), rate=0.5)
        assert router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
        router.update_selection_bias(torch.tensor([1.0, 1.0, 1.0, 0.0]))
        expected = torch.tensor([-0.501, 0.499, -0.001, 0.001])
        torch.testing.assert_close(router.selection_bias, expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float16], ids=str)
    def test_counts_as_large_as_their_dtype_holds(self, dtype):
        # Times E they no longer fit into int32, nor their sum into fp16.
        router = Router(H, E, 1, selection_bias=True)
        counts = torch.full((E,), 60_000 if dtype == torch.float16 else 2**29)
        counts[0] = 65_000 if dtype == torch.float16 else 2**30
        router.update_selection_bias(counts.to(dtype), rate=1.0)
        assert router.selection_bias.tolist() == [-1.0] + [1.0] * (E - 1)

    def test_changes_the_choice_alone(self):
        router = Router(H, E, K, score="sigmoid", selection_bias=True)
        router.selection_bias[3] = 10
        routing = router(randn(T, H))
        assert (routing.ids[:, 0] == 3).all()
        assert_same(routing.weights, routing.logits.sigmoid().gather(1, routing.ids))

    def test_balances_the_load(self):
        router = Router(H, E, K, score="sigmoid", selection_bias=True)
        x = randn(200, H)
        with torch.no_grad():
            router.weight[0] += 0.5 * x.mean(0) + 0.2  # a favourite

            def spread():
                return expert_counts(router(x)).float().std().item()

            before = spread()
            for _ in range(100):
                router.update_selection_bias(expert_counts(router(x)), rate=0.005)
            assert spread() < before / 3

    def test_works_in_inference_and_training(self):
        router = Router(H, E, K, selection_bias=True)
        assert not router.selection_bias.requires_grad
        router(randn(3, H)).weights.sum().backward()
        counts = torch.ones(E)
        with torch.inference_mode():
            router(randn(3, H))
        router.update_selection_bias(counts)

    @pytest.mark.parametrize("cast", ["to", "half", "bfloat16", "double"])
    def test_stays_fp32(self, cast):
        inner = Router(H, E, K, selection_bias=True)
        inner.selection_bias.copy_(torch.linspace(0, 1, E))
        kept = inner.selection_bias.clone()
        model = nn.Sequential(MoE(H, 8, E, K, router=inner))
        model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
        assert inner.weight.dtype != torch.float32
        assert_same(inner.selection_bias, kept)
        assert_same(dict(model.named_buffers())["0.router.selection_bias"], kept)
        assert_same(copy.deepcopy(inner).selection_bias, kept)
        assert inner.to("meta").selection_bias.device.type == "meta"

    def test_wrong_arguments(self):
        with pytest.raises(ArgumentError, match="Router: selection_bias: expected a router made with"):
            Router(H, E, K).update_selection_bias(torch.zeros(E))
        router = Router(H, E, K, selection_bias=True)
        with pytest.raises(ArgumentError, match=r"Router: counts: expected shape \(E,\) = \(8,\), got"):
            router.update_selection_bias(torch.zeros(E + 1))
        with pytest.raises(ArgumentTypeError, match="Router: counts: expected dtype"):
            router.update_selection_bias(torch.zeros(E, dtype=torch.bool))
        with pytest.raises(
            ArgumentError, match="Router: counts: expected selection_bias's device cpu, got meta"
        ):
            router.update_selection_bias(torch.zeros(E, device="meta"))
        with pytest.raises(ArgumentTypeError, match="Router: rate: expected a float, got str"):
            router.update_selection_bias(torch.zeros(E), "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(hidden_size=0), "hidden_size: expected at least 1, got 0"),
        (dict(num_experts=0), "num_experts: expected at least 1, got 0"),
        (dict(top_k=9), "top_k: expected at most E = 8 experts, got 9"),
        (dict(score="tanh"), "score: expected 'softmax' or 'sigmoid', got 'tanh'"),
        (dict(order="any"), "order: expected 'score_then_topk' or 'topk_then_score', got 'any'"),
        (dict(num_groups=3, top_groups=1), "num_groups: expected a divisor of E = 8, got 3"),
        (
            dict(num_groups=4, top_groups=1, top_k=3),
            "top_groups: expected groups of at least top_k = 3 experts",
        ),
    ],
)
def test_wrong_options(arguments, message):
    with pytest.raises(ArgumentError, match=f"Router: {message}"):
        Router(**(dict(hidden_size=H, num_experts=E, top_k=K) | arguments))


def test_wrong_input():
    with pytest.raises(ArgumentError, match=r"Router: x: expected shape \(..., H\) with H = 16, got"):
        Router(H, E, K)(torch.zeros(3, H + 1))


def test_repr():
    router = Router(
        4,
        8,
        2,
        score="sigmoid",
        renormalize=True,
        selection_bias=True,
        num_groups=4,
        top_groups=2,
        scaling=2.5,
    )
    assert repr(router) == (
        "Router(4, 8, top_k=2, score='sigmoid', renormalize=True, selection_bias=True, "
        "num_groups=4, top_groups=2, scaling=2.5)"
    )
    assert repr(Router(4, 8, 2, order="topk_then_score", bias=True)) == (
        "Router(4, 8, top_k=2, score='softmax', order='topk_then_score', bias=True)"
    )
