"""Which expert is chosen: ties, NaN and infinities, groups; each against Python's own stable sort."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("topk_router")


def stable(row, k):
    """Indices of the k largest; NaN first, equal ones in order."""
    nans = [i for i, v in enumerate(row) if math.isnan(v)]
    numbers = [i for i, v in enumerate(row) if not math.isnan(v)]
    return (nans + sorted(numbers, key=lambda i: row[i], reverse=True))[:k]


def expected_ids(logits, k):
    return torch.tensor([stable(row, k) for row in logits.tolist()])


@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (8, 2), (60, 4), (512, 10), (5, 5)])
def test_equal_logits_go_to_the_lower_id(experts, k, score, order):
    logits = randn(200, experts, dtype=torch.bfloat16)  # coarse enough for ties in most rows
    _, ids = topk_router(logits, k, score=score, order=order)
    assert_same(ids, expected_ids(logits, k))


@pytest.mark.parametrize("k", [1, 3, 16])
def test_all_equal(k):
    _, ids = topk_router(torch.ones(4, 16), k)
    assert_same(ids, torch.arange(k).expand(4, k))


def test_negative_zero_equals_zero():
    _, ids = topk_router(torch.tensor([[-0.0, 0.0, -1.0, 0.0]]), 3)
    assert ids.tolist() == [[0, 1, 3]]


def test_fp32_logits_tell_apart_what_bf16_does_not():
    fine = torch.tensor([[0.0, 1.0, 1.0 + 2**-9, 0.5]])
    assert topk_router(fine, 1)[1].item() == 2
    assert topk_router(fine.bfloat16(), 1)[1].item() == 1


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_round_to_equal_keep_the_order_of_logits(score):
    # Far apart, yet both have probability 0 and both a sigmoid of 1.
    low = torch.tensor([[200.0, -300.0, -200.0, -250.0]])
    assert topk_router(low, 4, score=score)[1].tolist() == [[0, 2, 3, 1]]
    high = torch.tensor([[100.0, 120.0, 110.0, 130.0]])
    assert topk_router(high, 4, score=score)[1].tolist() == [[3, 1, 2, 0]]


def test_nan_and_infinities():
    logits = torch.tensor([[1.0, math.nan, math.inf, math.nan], [-math.inf, 2.0, -math.inf, -math.inf]])
    assert topk_router(logits, 4)[1].tolist() == [[1, 3, 2, 0], [1, 0, 2, 3]]
    assert topk_router(logits, 2, num_groups=2, top_groups=1)[1].tolist() == [[1, 0], [1, 0]]
    weights, _ = topk_router(logits[1:], 2)
    assert weights.tolist() == [[1.0, 0.0]]


VALUES = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0 + 2**-9, 40.0, math.inf, -math.inf, math.nan])


@pytest.mark.cpu  # each choice of options would be another kernel
@given(st.data())
def test_any_choice_matches_the_reference(data):
    groups = data.draw(st.sampled_from([1, 2, 3, 4]))
    experts = groups * data.draw(st.integers(1, 4))
    top_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, experts // groups * top_groups))
    row = st.lists(VALUES, min_size=experts, max_size=experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    finite = VALUES.filter(math.isfinite)
    bias = data.draw(st.none() | st.lists(finite, min_size=experts, max_size=experts))
    bias = None if bias is None else torch.tensor(bias)
    options = dict(
        score=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        order=data.draw(st.sampled_from(["score_then_topk", "topk_then_score"])),
        renormalize=data.draw(st.booleans()),
        num_groups=groups,
        top_groups=top_groups,
        bias=bias,
    )
    weights, ids = topk_router(logits, k, **options)
    expected, expected_ids = topk_router(logits, k, backend="reference", **options)
    assert_same(ids, expected_ids)
    assert_same(weights, expected)
    assert ((ids >= 0) & (ids < experts)).all()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()


def test_equal_groups_go_to_the_lower_one():
    logits = torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]])
    for order in ("score_then_topk", "topk_then_score"):
        _, ids = topk_router(logits, 3, order=order, num_groups=4, top_groups=2)
        assert ids.tolist() == [[0, 3, 1]]


def test_a_group_counts_by_its_two_best():
    # Group 0 has the best expert, group 1 the best pair.
    logits = torch.tensor([[5.0, 0.0, 0.0, 4.0, 4.0, 0.0]])
    _, ids = topk_router(logits, 2, order="topk_then_score", num_groups=2, top_groups=1)
    assert ids.tolist() == [[3, 4]]


def test_other_groups_are_never_chosen():
    # Every value within the best group is below anything a mask could put in place of the others.
    logits = torch.zeros(1, 6)
    bias = torch.tensor([-5.0, -5.0, -math.inf, -9.0, -9.0, -9.0])
    _, ids = topk_router(logits, 3, score="sigmoid", bias=bias, num_groups=2, top_groups=1)
    assert ids.tolist() == [[0, 1, 2]]
