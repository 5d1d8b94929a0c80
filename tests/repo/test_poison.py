"""The poison of tests/conftest.py reaches what anabranch allocates, and nothing else."""

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

CODE = """
import torch

def allocations(like):
    yield torch.empty(like.shape, dtype=like.dtype)
    yield torch.empty_like(like)
    yield torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    yield like.new_empty(like.shape)
    yield like.new_empty_strided(like.shape, like.stride())

def forgets(x):
    y = torch.empty_like(x)
    y[1:] = x[1:]
    return y

class Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad)
"""


def module(name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    exec(CODE, vars(made))
    return made


INSIDE, OUTSIDE = module("anabranch.ops.planted"), module("elsewhere")


def poisoned(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor >= min(2**30, torch.iinfo(tensor.dtype).max)).all())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.int8,
        torch.int32,
        torch.int64,
    ],
)
def test_fills_what_anabranch_allocates(dtype):
    results = list(INSIDE.allocations(torch.zeros(2, 3, dtype=dtype)))
    assert len(results) == 5
    assert all(poisoned(result) for result in results)


def test_leaves_others_alone(monkeypatch):
    filled = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: filled.append(value))
    list(OUTSIDE.allocations(torch.zeros(2)))
    assert filled == []


@pytest.mark.no_poison
def test_can_be_turned_off(monkeypatch):
    filled = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: filled.append(value))
    list(INSIDE.allocations(torch.zeros(2)))
    assert filled == []


def test_reaches_operators_and_their_gradients():
    @torch.library.custom_op("anabranch_planted::forgets", mutates_args=())
    def forgets(x: torch.Tensor) -> torch.Tensor:
        return INSIDE.forgets(x)

    assert forgets(torch.ones(3)).isnan().tolist() == [True, False, False]

    x = torch.ones(3, requires_grad=True)
    INSIDE.Forgets.apply(x).sum().backward()
    assert poisoned(x.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_lets_the_compiler_through(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, INSIDE.__name__, INSIDE)  # the compiler of torch 2.11 imports it
    compiled = torch.compile(INSIDE.forgets, fullgraph=True, backend=backend)
    assert compiled(torch.ones(3))[1:].tolist() == [1, 1]


def test_lets_fake_tensors_through():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = INSIDE.forgets(torch.ones(3))
    assert fake.shape == (3,)


@given(st.integers(1, 4))
def test_holds_under_hypothesis(size):
    assert all(poisoned(result) for result in INSIDE.allocations(torch.zeros(size)))
