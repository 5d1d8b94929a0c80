"""Values, ids and gradients of topk_router against its oracle and against plain PyTorch."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import STRIDES, assert_same, assert_within_budget, in_any_order, randn, strided

pytestmark = pytest.mark.op("topk_router")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
T, E, K = 70, 12, 3

OPTIONS = {
    "softmax": {},
    "renormalized": dict(renormalize=True, scaling=2.5),
    "sigmoid": dict(score="sigmoid"),
    "biased": dict(bias=torch.linspace(-0.3, 0.3, E)),
    "biased_sigmoid": dict(score="sigmoid", bias=torch.linspace(0.4, -0.4, E), renormalize=True),
    "late_softmax": dict(order="topk_then_score"),
    "late_sigmoid": dict(order="topk_then_score", score="sigmoid", renormalize=True, scaling=0.5),
    "late_biased": dict(order="topk_then_score", bias=torch.linspace(-2, 2, E)),
    "groups": dict(num_groups=4, top_groups=2),
    "late_groups": dict(order="topk_then_score", num_groups=3, top_groups=1),
    "groups_of_one": dict(num_groups=12, top_groups=5, score="sigmoid"),
    "deepseek": dict(
        score="sigmoid",
        bias=torch.linspace(-1, 1, E),
        num_groups=4,
        top_groups=2,
        renormalize=True,
        scaling=2.5,
    ),
}


def plain(logits, ids, score="softmax", order="score_then_topk", renormalize=False, scaling=1.0, **_):
    """The weights of given ids in the dtype of the logits, written independently."""
    late = order == "topk_then_score"
    logits = torch.stack([logits[:, i] for i in range(E)], 1)  # autograd of its own
    picked = torch.take_along_dim(logits, ids, 1)
    if score == "sigmoid":
        weights = 1 / (1 + torch.exp(-picked))
    else:
        weights = torch.exp(picked - torch.logsumexp(picked if late else logits, 1, keepdim=True))
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * scaling


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_matches_the_reference(name, dtype):
    options = OPTIONS[name]
    logits = randn(T, E, dtype=dtype, scale=2)
    mine = logits.clone().requires_grad_()
    weights, ids = topk_router(mine, K, **options)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.is_contiguous()
    assert ids.is_contiguous()

    oracle, baseline, truth = (
        logits.detach().to(d, copy=True).requires_grad_() for d in (dtype, torch.float32, torch.float64)
    )
    expected, expected_ids = topk_router(oracle, K, backend="reference", **options)
    assert_same(ids, expected_ids)
    rough, exact = plain(baseline, ids, **options), plain(truth, ids, **options)
    near = in_any_order(rough, exact, 4 * E)  # exponentials and their sum
    assert_within_budget(weights, exact, near)
    assert_within_budget(expected, exact, near)

    up = randn(T, K, dtype=torch.float32)
    for result in (weights, expected, rough, exact):
        result.backward(up.to(result.dtype))
    assert mine.grad.dtype == dtype
    near = in_any_order(baseline.grad, truth.grad, 4 * E)
    assert_within_budget(mine.grad, truth.grad, near, rows=False)
    assert_within_budget(oracle.grad, truth.grad, near, rows=False)


@pytest.mark.cpu
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    logits = randn(3, E, dtype=torch.float64).requires_grad_()
    weights, ids = topk_router(logits, K, **OPTIONS[name])
    torch.testing.assert_close(weights, plain(logits, ids, **OPTIONS[name]), rtol=1e-14, atol=0)
    assert gradcheck(lambda x: topk_router(x, K, **OPTIONS[name])[0], logits)


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("name", ["renormalized", "deepseek", "late_softmax"])
def test_any_strides(name, layout):
    logits = strided(randn(T, E), layout).requires_grad_()
    up = strided(randn(T, K), layout)
    weights, ids = topk_router(logits, K, **OPTIONS[name])
    (grad,) = torch.autograd.grad(weights, logits, up)
    copy = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    expected, expected_ids = topk_router(copy, K, **OPTIONS[name])
    (expected_grad,) = torch.autograd.grad(expected, copy, up.contiguous())
    # On a GPU the order of a sum follows how its terms were loaded.
    same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7) if logits.is_cuda else assert_same
    same(weights, expected)
    assert_same(ids, expected_ids)
    same(grad, expected_grad)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_tokens(name):
    logits = torch.zeros(0, E, requires_grad=True)
    weights, ids = topk_router(logits, K, **OPTIONS[name])
    assert weights.shape == ids.shape == (0, K)
    weights.sum().backward()
    assert logits.grad.shape == (0, E)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_all_experts(score):
    weights, ids = topk_router(randn(T, E), E, score=score)
    assert_same(ids.sort(-1).values, torch.arange(E).expand(T, E))
    assert (weights.diff(dim=-1) <= 0).all()


def test_one_expert():
    logits = randn(T, 1).requires_grad_()
    weights, ids = topk_router(logits, 1)
    assert (weights == 1).all()
    assert (ids == 0).all()


def test_bias_does_not_reach_the_weights():
    logits = randn(T, E)
    bias = torch.zeros(E)
    bias[5] = 100
    weights, ids = topk_router(logits, 1, bias=bias)
    assert (ids == 5).all()
    assert_within_budget(weights, logits.double().softmax(-1)[:, 5:6], logits.softmax(-1)[:, 5:6])


def test_inputs_are_left_alone():
    logits, bias = randn(T, E), randn(E)
    kept = logits.clone(), bias.clone()
    topk_router(logits, K, bias=bias, num_groups=4, top_groups=2)
    assert_same(logits, kept[0])
    assert_same(bias, kept[1])


def test_scores_of_zero_renormalize_to_zero():
    logits = torch.full((1, E), -1000.0, requires_grad=True)
    weights, _ = topk_router(logits, K, score="sigmoid", renormalize=True)
    weights.sum().backward()
    assert (weights == 0).all()
    assert (logits.grad == 0).all()


@pytest.mark.cpu
def test_unneeded_gradient_is_not_computed(monkeypatch):
    from anabranch.ops.topk_router.backends import eager

    monkeypatch.setattr(eager, "backward", None)
    logits = randn(T, E).requires_grad_()
    weights, ids = topk_router(logits.detach(), K)
    assert not weights.requires_grad
    weights, ids = topk_router(logits, K)
    assert not ids.requires_grad
    (logits.sum() + ids.sum()).backward()
    with torch.no_grad():
        assert not topk_router(logits, K)[0].requires_grad
