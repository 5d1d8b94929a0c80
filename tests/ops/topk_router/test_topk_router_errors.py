"""Messages of topk_router's errors."""

import pytest
import torch

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.ops.topk_router.api import topk_router

LOGITS = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(logits=torch.zeros(8)), r"logits: expected shape \(T, E\), got shape \(8,\)"),
        (dict(k=0), "k: expected at least 1, got 0"),
        (dict(k=9), "k: expected at most E = 8 experts, got 9"),
        (dict(score="tanh"), "score: expected 'softmax' or 'sigmoid', got 'tanh'"),
        (dict(order="top"), "order: expected 'score_then_topk' or 'topk_then_score', got 'top'"),
        (dict(bias=torch.zeros(7)), r"bias: expected shape \(E,\) of logits = \(8,\), got shape \(7,\)"),
        (dict(bias=torch.zeros(8, device="meta")), "bias: expected logits's device cpu, got meta"),
        (
            dict(bias=torch.zeros(8, requires_grad=True)),
            r"bias: expected no gradient to be needed \(the bias selects, and is updated by a rule\), "
            "got a tensor that requires grad",
        ),
        (dict(num_groups=2), "num_groups: expected num_groups and top_groups, or neither, got one alone"),
        (dict(top_groups=2), "top_groups: expected num_groups and top_groups, or neither, got one alone"),
        (dict(num_groups=3, top_groups=1), "num_groups: expected a divisor of E = 8, got 3"),
        (dict(num_groups=0, top_groups=1), "num_groups: expected at least 1, got 0"),
        (dict(num_groups=2, top_groups=3), "top_groups: expected at most num_groups = 2, got 3"),
        (
            dict(num_groups=4, top_groups=1, k=3),
            "top_groups: expected groups of at least k = 3 experts together, got 1 groups of 2 experts",
        ),
        (dict(backend="fastest"), "backend: expected None or one of hopper, triton, eager, reference"),
    ],
)
def test_wrong_value(arguments, message):
    with pytest.raises(ArgumentError, match="topk_router: " + message):
        topk_router(**(dict(logits=LOGITS, k=2) | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(logits=[[1.0]]), r"logits: expected a tensor \(T, E\), got list"),
        (dict(logits=LOGITS.long()), "logits: expected dtype float16 or .* or float64, got int64"),
        (dict(k=2.0), "k: expected an int, got float"),
        (dict(bias=LOGITS[0].long()), "bias: expected dtype .*, got int64"),
        (dict(scaling="1"), "scaling: expected a float, got str"),
        (dict(num_groups=True, top_groups=1), "num_groups: expected an int, got bool"),
    ],
)
def test_wrong_type(arguments, message):
    with pytest.raises(ArgumentTypeError, match="topk_router: " + message):
        topk_router(**(dict(logits=LOGITS, k=2) | arguments))


def test_a_bias_that_requires_grad_is_fine_where_nobody_wants_one():
    with torch.no_grad():
        topk_router(LOGITS, 2, bias=torch.zeros(8, requires_grad=True))


def test_a_backend_that_is_not_there():
    with pytest.raises(UnsupportedError, match="topk_router: backend: expected a backend that can serve"):
        topk_router(LOGITS, 2, backend="hopper")
