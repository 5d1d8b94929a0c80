"""permute and unpermute over all backends and named cases: values, gradients, memory layouts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from anabranch.layout import ExpertLayout
from anabranch.ops.permute.api import permute, unpermute
from anabranch.testing import (
    STRIDES,
    assert_component_wise,
    assert_same,
    randn,
    routing,
    strided,
)

pytestmark = pytest.mark.op("permute")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    tokens: int
    top_k: int
    experts: int
    columns: int
    kind: str = "random"
    dropped: float = 0.0


CASES = {
    "plain": Case(7, 2, 4, 5),
    "top_1": Case(9, 1, 3, 8),
    "top_8": Case(6, 8, 16, 33),
    "one_token": Case(1, 2, 4, 3),
    "no_tokens": Case(0, 2, 4, 3),
    "no_columns": Case(4, 2, 3, 0),
    "dropped": Case(8, 3, 4, 6, dropped=0.4),
    "all_dropped": Case(4, 2, 3, 5, dropped=1.0),
    "one_column_and_duplicates": Case(10, 4, 3, 1, "duplicates"),
    "empty_experts": Case(13, 2, 6, 17, "every_other"),
    "one_expert": Case(5, 2, 3, 7, "one_expert"),
}


def places(ids: Tensor, experts: int) -> Tensor:
    """(T, K, R) fp64, one where slot (t, k) has row r: by a sort of Python numbers."""
    flat = ids.reshape(-1).tolist()
    order = sorted((expert, slot) for slot, expert in enumerate(flat) if 0 <= expert < experts)
    one_hot = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for row, (_, slot) in enumerate(order):
        one_hot[slot, row] = 1
    return one_hot.view(*ids.shape, len(flat))


def dense_permute(x: Tensor, at: Tensor) -> Tensor:
    return torch.einsum("tkr,th->rh", at, x)


def dense_unpermute(y: Tensor, weights: Tensor, at: Tensor) -> Tensor:
    return torch.einsum("tkr,tk,rh->th", at, weights, y)


def with_gradients(out: Tensor, grad: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def exact_and_magnitude(
    function, at: Tensor, grad: Tensor, *inputs: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """A function's result and gradients in fp64, and those that it has for absolute values."""
    wide = [v.detach().double().requires_grad_() for v in inputs]
    sizes = [v.detach().double().abs().requires_grad_() for v in inputs]
    return (
        with_gradients(function(*wide, at), grad, *wide),
        with_gradients(function(*sizes, at), grad.abs(), *sizes),
    )


def make(case: Case, dtype: torch.dtype, weights_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """ids, x, y, weights and a gradient for each of the two results."""
    rows = case.tokens * case.top_k
    ids = routing(case.tokens, case.experts, case.top_k, case.kind, dropped=case.dropped)
    x, d_x = (randn(case.tokens, case.columns, dtype=dtype) for _ in range(2))
    y, d_y = (randn(rows, case.columns, dtype=dtype) for _ in range(2))
    weights = torch.rand(case.tokens, case.top_k, dtype=torch.float64).add(0.1).to(weights_dtype or dtype)
    return ids, x, y, weights, d_x, d_y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_permute(backend, name, dtype):
    case = CASES[name]
    ids, x, _, _, _, grad = make(case, dtype)
    layout, at = ExpertLayout.from_topk(ids, case.experts), places(ids, case.experts)
    x.requires_grad_()
    out = permute(x, layout, backend=backend)
    truth, bound = exact_and_magnitude(dense_permute, at, grad, x)
    assert_same(out, truth[0].to(dtype))  # copies are exact
    d_x = with_gradients(out, grad, x)[1]
    assert_component_wise(d_x, truth[1], bound[1], case.top_k, name="d_x")


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "unit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_unpermute(backend, name, dtype, weighted):
    case = CASES[name]
    ids, _, y, weights, grad, _ = make(case, dtype, torch.promote_types(dtype, torch.float32))
    layout, at = ExpertLayout.from_topk(ids, case.experts), places(ids, case.experts)
    y.requires_grad_(), weights.requires_grad_()
    leaves = (y, weights) if weighted else (y,)
    found = with_gradients(unpermute(y, layout, *leaves[1:], backend=backend), grad, *leaves)
    truth, bound = exact_and_magnitude(
        dense_unpermute, at, grad, y, weights if weighted else torch.ones_like(weights)
    )
    lengths = {"out": case.top_k, "d_y": 1, "d_weights": case.columns}
    assert [v.dtype for v in found] == [y.dtype, *(v.dtype for v in leaves)]
    for (what, length), actual, *expected in zip(lengths.items(), found, truth, bound, strict=False):
        assert_component_wise(actual, *expected, length, name=what)


@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_keep_their_dtype(backend, dtype, weights_dtype):
    """fp32 weights are not rounded to y's dtype: 1 + 2**-20 times 3 is not 3 before the last rounding."""
    layout = ExpertLayout.from_topk(torch.tensor([[0, 1]]), 2)
    y = torch.tensor([[3.0], [-3.0]], dtype=dtype, requires_grad=True)
    weights = torch.tensor([[1 + 2**-20, 1.0]], dtype=weights_dtype, requires_grad=True)
    out = unpermute(y, layout, weights, backend=backend)
    expected = 3 * (weights[0, 0].double() - 1)
    assert out.item() == expected.to(dtype).item()
    d_y, d_weights = torch.autograd.grad(out.sum(), (y, weights))
    assert (d_y.dtype, d_weights.dtype) == (dtype, weights_dtype)
    assert d_weights.tolist() == [[3.0, -3.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("values", [[256, 1, 1, 1, 1, 1, 1, 0], [1, 2**-9, -1]], ids=["many", "cancelling"])
def test_sums_are_rounded_once(backend, values, dtype):
    """A running sum in bf16 would lose every 1 after 256, and 2**-9 beside 1."""
    K = len(values)
    layout = ExpertLayout.from_topk(torch.arange(K)[None], K)
    y = torch.tensor(values, dtype=dtype)[:, None]
    assert unpermute(y, layout, backend=backend).item() == sum(values)
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    permute(x, layout, backend=backend).backward(y)
    assert x.grad.item() == sum(values)


def test_dropped_ids_by_hand(backend):
    """Ids of -1 have no row; what they would weigh and what rows without a slot hold does not matter."""
    ids = torch.tensor([[0, -1], [-1, -1], [2, 1], [-1, 2], [1, 0], [3, -1]])
    layout = ExpertLayout.from_topk(ids, 4)
    x = torch.arange(1.0, 7.0)[:, None].requires_grad_()
    rows = permute(x, layout, backend=backend)
    assert rows[:, 0].tolist() == [1, 5, 3, 5, 3, 4, 6, 0, 0, 0, 0, 0]
    weights = torch.where(ids < 0, torch.nan, 2.0).requires_grad_()
    y = torch.cat([rows[:7].detach(), torch.full((5, 1), torch.nan)]).requires_grad_()
    out = unpermute(y, layout, weights, backend=backend)
    assert out[:, 0].tolist() == [2, 0, 12, 8, 20, 12]
    d_y, d_weights = torch.autograd.grad(out.sum(), (y, weights))
    assert d_y[:, 0].tolist() == [2] * 7 + [0] * 5
    assert d_weights.tolist() == [[1, 0], [0, 0], [3, 3], [0, 4], [5, 5], [6, 0]]
    # NaN in the gradient of a row without a slot stays there as well.
    (d_x,) = torch.autograd.grad(rows, x, torch.where(torch.arange(12) < 7, 1.0, torch.nan)[:, None])
    assert d_x[:, 0].tolist() == [1, 0, 2, 1, 2, 1]


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("columns", [1, 6])
def test_any_strides(backend, device, columns, strides):
    """Every input and every incoming gradient in turn, against the same numbers in one piece."""
    case = Case(6, 2, 4, columns, dropped=0.2)
    ids, *values = make(case, torch.float32)
    layout = ExpertLayout.from_topk(ids, case.experts)

    def run(x, y, weights, d_x, d_y):
        x, y, weights = (v.detach().requires_grad_() for v in (x, y, weights))
        return [
            *with_gradients(permute(x, layout, backend=backend), d_y, x),
            *with_gradients(unpermute(y, layout, weights, backend=backend), d_x, y, weights),
            *with_gradients(unpermute(y, layout, backend=backend), d_x, y),
        ]

    for place in range(len(values)):
        given = list(values)
        given[place] = strided(values[place], strides)
        expected = run(*given[:place], given[place].contiguous(), *given[place + 1 :])
        for actual, wanted in zip(run(*given), expected, strict=True):
            if device == "cpu":
                assert_same(actual, wanted)
            else:  # a sum over columns may go in another order where they lie otherwise
                torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.fp64
def test_gradients_of_any_order(backend):
    ids = torch.tensor([[0, 2, 2], [-1, 1, 0], [3, -1, 4], [-1, -1, -1]])
    layout = ExpertLayout.from_topk(ids, 4)
    x = randn(4, 2, dtype=torch.float64).requires_grad_()
    y = randn(12, 2, dtype=torch.float64).requires_grad_()
    weights = randn(4, 3, dtype=torch.float64).requires_grad_()
    for function, inputs in (
        (lambda x: permute(x, layout, backend=backend), (x,)),
        (lambda y: unpermute(y, layout, backend=backend), (y,)),
        (lambda y, w: unpermute(y, layout, w, backend=backend), (y, weights)),
        (lambda y: unpermute(y, layout, weights.detach(), backend=backend), (y,)),
        (lambda w: unpermute(y.detach(), layout, w, backend=backend), (weights,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_slices_do_not_show(backend, monkeypatch):
    """However the eager backend cuts tokens and rows, the result is the same to the bit."""
    from anabranch.ops.permute.backends import eager

    case = Case(9, 3, 5, 4, dropped=0.3)
    ids, _, y, weights, grad, _ = make(case, torch.bfloat16, torch.float32)
    layout = ExpertLayout.from_topk(ids, case.experts)
    y.requires_grad_(), weights.requires_grad_()
    results = []
    for size in (eager.SLICE, 1, 8, 20):
        monkeypatch.setattr(eager, "SLICE", size)
        results.append(with_gradients(unpermute(y, layout, weights, backend=backend), grad, y, weights))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_same(actual, expected)
