"""What permute and unpermute refuse, and in which words."""

from __future__ import annotations

import pytest
import torch

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.layout import ExpertLayout
from anabranch.ops.permute.api import permute, unpermute

LAYOUT = ExpertLayout.from_slot_to_row(torch.tensor([[0, 2], [1, -1], [3, 4]]), 5)
X, Y, WEIGHTS = torch.ones(3, 4), torch.ones(5, 4), torch.ones(3, 2)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"x": [1]}, ArgumentTypeError, "x: expected a tensor (T, H), got list"),
        (
            {"x": X.int()},
            ArgumentTypeError,
            "x: expected dtype float16 or bfloat16 or float32 or float64, got int32",
        ),
        ({"x": X[None]}, ArgumentError, "x: expected shape (T, H), got shape (1, 3, 4)"),
        ({"x": Y}, ArgumentError, "x: expected shape (layout's T, H) = (3, 4), got shape (5, 4)"),
        ({"layout": None}, ArgumentTypeError, "layout: expected an ExpertLayout, got NoneType"),
        ({"x": X.to(META)}, ArgumentError, "layout: expected x's device meta, got cpu"),
        (
            {"backend": "fast"},
            ArgumentError,
            "backend: expected None or one of hopper, triton, eager, reference, got 'fast'",
        ),
    ],
)
def test_permute(arguments, kind, message):
    with pytest.raises(kind) as error:
        permute(**{"x": X, "layout": LAYOUT, **arguments})
    assert str(error.value) == f"permute: {message}"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"y": None}, ArgumentTypeError, "y: expected a tensor (R, H), got NoneType"),
        (
            {"y": Y.bool()},
            ArgumentTypeError,
            "y: expected dtype float16 or bfloat16 or float32 or float64, got bool",
        ),
        ({"y": Y[0]}, ArgumentError, "y: expected shape (R, H), got shape (4,)"),
        ({"y": X}, ArgumentError, "y: expected shape (layout's R, H) = (5, 4), got shape (3, 4)"),
        ({"layout": {}}, ArgumentTypeError, "layout: expected an ExpertLayout, got dict"),
        ({"weights": 1.0}, ArgumentTypeError, "weights: expected a tensor (T, K), got float"),
        (
            {"weights": WEIGHTS.long()},
            ArgumentTypeError,
            "weights: expected dtype float16 or bfloat16 or float32 or float64, got int64",
        ),
        ({"weights": WEIGHTS.view(-1)}, ArgumentError, "weights: expected shape (T, K), got shape (6,)"),
        (
            {"weights": WEIGHTS.T},
            ArgumentError,
            "weights: expected shape layout's (T, K) = (3, 2), got shape (2, 3)",
        ),
        ({"weights": WEIGHTS.to(META)}, ArgumentError, "weights: expected y's device cpu, got meta"),
        (
            {"backend": 3},
            ArgumentError,
            "backend: expected None or one of hopper, triton, eager, reference, got 3",
        ),
    ],
)
def test_unpermute(arguments, kind, message):
    with pytest.raises(kind) as error:
        unpermute(**{"y": Y, "layout": LAYOUT, **arguments})
    assert str(error.value) == f"unpermute: {message}"


@pytest.mark.parametrize(("function", "value"), [(permute, X), (unpermute, Y)])
def test_a_backend_that_cannot(function, value):
    expected = r"permute: backend: expected a backend that can serve this call, got hopper: "
    with pytest.raises(UnsupportedError, match=expected):
        function(value, LAYOUT, backend="hopper")
