"""What is remembered of calls: that checks passed, and no more than that; and variables of the environment."""

import dataclasses
import os

import pytest
import torch

from anabranch import ArgumentError, ArgumentTypeError, moe_mlp
from anabranch.ops import checks
from anabranch.ops.frozen import frozen
from anabranch.ops.moe_mlp import call as moe_mlp_call
from anabranch.testing import randn
from anabranch.tuning.environment import variable


def arguments(tokens=3, dtype=torch.float32):
    return dict(
        x=randn(tokens, 8, dtype=dtype),
        gate_up=randn(2, 12, 8, dtype=dtype),
        down=randn(2, 8, 6, dtype=dtype),
        expert_ids=torch.zeros(tokens, 2, dtype=torch.int64),
        expert_weights=torch.rand(tokens, 2),
    )


@pytest.fixture
def checked(monkeypatch):
    """How often arguments are checked."""
    found, original = [], moe_mlp_call._check_types
    monkeypatch.setattr(
        moe_mlp_call, "_check_types", lambda *given: found.append(None) or original(*given), raising=True
    )
    checks.known.cache_clear()
    return found


def test_calls_that_look_alike_are_checked_once(checked):
    for count, given in enumerate(
        (
            arguments(),
            arguments(4),
            arguments(dtype=torch.float64),
            {**arguments(), "down_bias": randn(2, 8)},
        ),
        1,
    ):
        for _ in range(3):
            moe_mlp(**given)
        assert len(checked) == count
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe_mlp(**arguments()).dtype == torch.bfloat16
    assert len(checked) == 5
    assert moe_mlp(**arguments()).dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        dict(x=torch.zeros(3, 9)),
        dict(x=torch.zeros(3, 8, dtype=torch.float16)),
        dict(x=torch.zeros(3, 8, dtype=torch.int32)),
        dict(x=torch.zeros(3, 8).to_sparse()),
        dict(x=None),
        dict(expert_ids=torch.zeros(3, 2)),
        dict(expert_ids=torch.zeros(2, 3, dtype=torch.int64)),
        dict(expert_weights=torch.zeros(6)),
        dict(down=torch.zeros(2, 8, 6, device="meta")),
        dict(down_bias=torch.zeros(8)),
        dict(transpose_weight=True),
        dict(transpose_weight=0),
        dict(activation="relu"),
        dict(gate_layout="stacked"),
        dict(weight_on=["output"]),
    ],
    ids=str,
)
def test_a_call_that_looks_otherwise_is_checked_again(change, checked):
    given = arguments()
    for _ in range(2):
        moe_mlp(**given)
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            moe_mlp(**{**given, **change})


def test_only_plain_tensors_are_known(checked):
    class Mine(torch.Tensor):
        pass

    x = torch.zeros(2, 3)
    assert checks.facts(x, None) == (x.shape, x.dtype, x.layout, x.device, None)
    assert checks.facts(torch.nn.Parameter(x)) == checks.facts(x)
    assert checks.facts(x, x.as_subclass(Mine)) is None
    assert checks.facts(x, "x") is None
    for value in (3, None):
        with pytest.raises(ArgumentTypeError):
            moe_mlp(**{**arguments(), "down": value})


def test_frozen():
    @dataclasses.dataclass(frozen=True)
    class Two:
        a: int
        b: str = "b"

    made = frozen(Two, a=1)
    assert made == Two(1)
    assert dataclasses.replace(made, b="c") == Two(1, "c")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.a = 2


@pytest.mark.parametrize("plain", [False, True])
def test_variable(plain, monkeypatch):
    if plain:
        monkeypatch.setattr(os, "environ", dict(os.environ))
    name = "ANABRANCH_TEST_VARIABLE"
    assert variable(name) is None
    for value in ("1", "", "ä"):
        monkeypatch.setitem(os.environ, name, value)
        assert variable(name) == value
    monkeypatch.delitem(os.environ, name)
    assert variable(name) is None
