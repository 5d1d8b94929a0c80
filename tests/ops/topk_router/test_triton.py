"""The Triton backend of topk_router, interpreted or on a GPU: eager's ids, its values but for rounding."""

import itertools
import math
import os
from unittest import mock

import pytest
import torch

from anabranch import dispatch
from anabranch.errors import UnsupportedError
from anabranch.ops.topk_router import autograd
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import STRIDES, assert_same, assert_within_budget, randn, strided

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.op("topk_router", "triton")
compiled = pytest.mark.skipif(INTERPRETS, reason="the interpreter has taken the compiler's place")
pytestmark = [
    # NumPy's remarks on infinities, which a GPU does not make
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

# the interpreter cannot make bf16
LOW = [torch.float16, *[torch.bfloat16] * (torch.cuda.is_available() and not INTERPRETS)]
T, E, K = 9, 12, 3
GROUPS = {"all": {}, "groups": dict(num_groups=4, top_groups=2), "odd": dict(num_groups=3, top_groups=2)}
CASES = list(
    itertools.product(
        ("softmax", "sigmoid"), ("score_then_topk", "topk_then_score"), (False, True), (False, True), GROUPS
    )
)


def run(logits, k, grad=None, backend="triton", **options):
    """weights, ids and the gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    weights, ids = topk_router(leaf, k, backend=backend, **options)
    weights.backward(torch.ones_like(weights) if grad is None else grad.to(weights.dtype))
    assert leaf.grad.dtype == logits.dtype
    return weights.detach(), ids, leaf.grad


def check(logits, k, grad=None, **options):
    """Against eager: the same ids, and errors that are not twice its own and more than a rounding."""
    weights, ids, d_logits = run(logits, k, grad, **options)
    rough, expected_ids, d_rough = run(logits, k, grad, "eager", **options)
    assert_same(ids, expected_ids)
    truth, same_ids, d_truth = run(logits.double(), k, grad, "eager", **options)
    assert_same(ids, same_ids)
    assert weights.dtype == torch.float32
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    # Eager may be lucky, as in a score of 1; what it computes in fp32 has a rounding of its own.
    luck = torch.finfo(torch.float32).eps
    assert_within_budget(weights, truth, truth + (rough - truth).abs() + luck * truth.abs())
    wrong = (d_rough.double() - d_truth).abs() + luck * d_truth.abs().max()
    assert_within_budget(d_logits, d_truth, d_truth + wrong, rows=False)


@runs
@pytest.mark.parametrize(("score", "order", "renormalize", "biased", "groups"), CASES)
def test_every_option(score, order, renormalize, biased, groups):
    options = dict(score=score, order=order, renormalize=renormalize, scaling=2.5, **GROUPS[groups])
    bias = strided(torch.linspace(-0.3, 0.4, E), "every_second") if biased else None
    check(randn(T, E, scale=2), K, randn(T, K), bias=bias, **options)


@runs
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("T", "E", "K"), [(0, 8, 2), (1, 1, 1), (3, 60, 4), (70, 128, 8), (2, 300, 17), (2, 64, 64), (1030, 4, 1)]
)
def test_sizes(T, E, K, score):
    if T:
        check(randn(T, E), K, randn(T, K), score=score)
    else:
        weights, ids, grad = run(randn(T, E), K, score=score)
        assert (weights.shape, ids.shape, grad.shape) == ((0, K), (0, K), (0, E))


@runs
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
def test_half_precision(order, dtype):
    logits = randn(T, E, dtype=dtype, scale=2)
    check(logits, K, randn(T, K), order=order, renormalize=True)


@runs
@pytest.mark.parametrize("layout", STRIDES)
def test_any_memory_layout(layout):
    check(strided(randn(T, E), layout), K, strided(randn(T, K), layout))


@runs
@pytest.mark.parametrize("k", [1, 8, 20])
@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
def test_equal_logits_go_to_the_lower_id(k, order):
    logits = randn(20, 40).round()
    logits[0] = 1.0
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    assert_same(topk_router(logits, k, order=order, backend="triton")[1], expected)


@runs
@pytest.mark.parametrize("k", [4, 17])
def test_nan_infinities_and_zeros(k):
    first = [1.0, math.nan, math.inf, math.nan, -0.0, 0.0, -1.0, 0.0, -math.inf, -math.inf]
    logits = torch.tensor([first + [-2.0] * 10, [-math.inf] * 20, [-math.nan] * 20, [math.inf, -0.0] * 10])
    for options in ({}, dict(num_groups=2, top_groups=2), dict(num_groups=5, top_groups=5)):
        weights, ids = topk_router(logits, k, backend="triton", **options)
        expected, expected_ids = topk_router(logits, k, backend="eager", **options)
        assert_same(ids, expected_ids)
        assert_same(weights.isnan(), expected.isnan())
    _, ids = topk_router(logits, 2, num_groups=2, top_groups=1, backend="triton")
    assert_same(ids, topk_router(logits, 2, num_groups=2, top_groups=1, backend="eager")[1])


@runs
def test_scores_that_round_to_equal_keep_the_order_of_logits():
    logits = torch.tensor([[200.0, -300.0, -200.0, -250.0], [100.0, 120.0, 110.0, 130.0]])
    for score in ("softmax", "sigmoid"):
        _, ids = topk_router(logits, 4, score=score, backend="triton")
        assert ids.tolist() == [[0, 2, 3, 1], [3, 1, 2, 0]]


@runs
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_small_scores_keep_their_digits(score):
    """The rounding of a large exponent would show in the result."""
    logits = torch.tensor([[0.0, -20.3, -41.7, -80.1]])
    weights, _ = topk_router(logits, 4, score=score, backend="triton")
    exact = logits.double().softmax(-1) if score == "softmax" else logits.double().sigmoid()
    assert ((weights - exact).abs() <= 2e-6 * exact).all()
    assert (weights > 0).all()


@runs
def test_all_scores_zero_renormalize_to_zero():
    logits = torch.full((2, 4), -200.0)
    weights, _, grad = run(logits, 2, score="sigmoid", renormalize=True)
    assert_same(weights, torch.zeros(2, 2))
    assert grad.isfinite().all()


@runs
def test_other_groups_are_never_chosen():
    bias = torch.tensor([-5.0, -5.0, -math.inf, -9.0, -9.0, -9.0])
    options = dict(score="sigmoid", bias=bias, num_groups=2, top_groups=1, backend="triton")
    assert topk_router(torch.zeros(1, 6), 3, **options)[1].tolist() == [[0, 1, 2]]


@runs
def test_ids_of_any_strides_in_the_gradient():
    logits, grad, ids = randn(5, E), randn(5, K), torch.tensor([[0, 4, 7]]).expand(5, K)
    options = (K, "softmax", "score_then_topk", True, 1, 1, 2.5)
    found, expected = (
        autograd.topk_router_backward(grad, logits, ids, *options, backend) for backend in ("triton", "eager")
    )
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@runs
def test_what_it_refuses():
    with pytest.raises(UnsupportedError, match="triton: it computes in fp32, too coarse for float64"):
        topk_router(randn(2, 4, dtype=torch.float64), 1, backend="triton")
    with pytest.raises(
        UnsupportedError, match="triton: it holds 4096 experts of a token, not 1 groups of 8192"
    ):
        topk_router(randn(1, 5000), 1, backend="triton")


DEEPSEEK = dict(score="sigmoid", renormalize=True, num_groups=8, top_groups=4, scaling=2.5)


@compiled
@pytest.mark.no_poison
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_without_spills(arch):
    from anabranch.testing.aot import compiling

    with mock.patch.object(dispatch, "probe", return_value=None), compiling(arch) as found:
        for tokens, experts, k, options in (
            (4096, 256, 8, dict(DEEPSEEK, bias=torch.zeros(256))),
            (4096, 60, 4, {}),
            (1, 512, 20, dict(order="topk_then_score")),
        ):
            logits = torch.empty(tokens, experts, dtype=torch.bfloat16, requires_grad=True)
            weights, _ = topk_router(logits, k, backend="triton", **options)
            weights.backward(torch.empty_like(weights))
    assert len(found) == 6
    for kernel in found:
        assert not kernel.spilled_bytes, kernel
