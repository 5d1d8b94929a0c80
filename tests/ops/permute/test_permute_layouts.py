"""permute and unpermute on maps alone, with other numbers of rows, and with maps that do not fit."""

from __future__ import annotations

import pytest
import torch

from anabranch.errors import ArgumentError
from anabranch.layout import ExpertLayout
from anabranch.ops.permute.api import permute, unpermute
from anabranch.testing import randn

pytestmark = pytest.mark.op("permute")


def adjoint(layout: ExpertLayout, backend: str) -> None:
    """``<permute(x), y> == <x, unpermute(y)>``, and each is the other's gradient: exact on small integers."""
    x = torch.randint(-9, 9, (layout.num_tokens, 3)).double().requires_grad_()
    y = torch.randint(-9, 9, (layout.num_rows, 3)).double().requires_grad_()
    rows, tokens = permute(x, layout, backend=backend), unpermute(y, layout, backend=backend)
    assert (rows * y).sum().item() == (x * tokens).sum().item()
    assert torch.equal(torch.autograd.grad(rows, x, y.detach())[0], tokens)
    assert torch.equal(torch.autograd.grad(tokens, y, x.detach())[0], rows)
    for function, value in ((permute, x), (unpermute, y)):
        assert torch.autograd.gradcheck(lambda v, f=function: f(v, layout, backend=backend), value)


@pytest.mark.fp64
@pytest.mark.parametrize("num_rows", [0, 1, 11, 12, 20, 25])
def test_rows_of_a_capacity(backend, num_rows):
    """20 slots in expert order with room for some: rows from num_rows on are dropped, spare rows are zero."""
    slot_to_row = torch.randperm(20).view(10, 2)
    layout = ExpertLayout.from_slot_to_row(slot_to_row, num_rows)
    x = randn(10, 4)
    rows = permute(x, layout, backend=backend)
    assert rows.shape == (num_rows, 4)
    expected = torch.zeros(max(num_rows, 20), 4)
    expected[slot_to_row.reshape(-1)] = x.repeat_interleave(2, 0)
    assert torch.equal(rows, expected[:num_rows])
    kept = (slot_to_row < num_rows).sum(1, keepdim=True)
    assert torch.equal(unpermute(rows.double(), layout, backend=backend), kept * x.double())
    adjoint(layout, backend)


@pytest.mark.fp64
@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (3, 0)])
def test_no_slots(backend, shape, num_rows):
    layout = ExpertLayout.from_slot_to_row(torch.zeros(shape, dtype=torch.int32), num_rows)
    adjoint(layout, backend)
    assert torch.equal(permute(torch.ones(shape[0], 2), layout, backend=backend), torch.zeros(num_rows, 2))
    out = unpermute(torch.full((num_rows, 2), torch.nan), layout, torch.ones(shape), backend=backend)
    assert torch.equal(out, torch.zeros(shape[0], 2))


@pytest.mark.fp64
def test_every_constructor(backend):
    ids = torch.tensor([[1, 0], [2, -1], [1, 1]])
    sort = ExpertLayout.from_topk(ids, 3)
    for layout in (
        sort,
        ExpertLayout.from_counts(torch.tensor([2, 0, 3]), 7),
        ExpertLayout.from_counts(torch.tensor([9, 9]), 4),  # claims more rows than there are
        ExpertLayout.from_sorted(torch.tensor([1, 2]), torch.tensor([3, 0, 5, 1]), 2),
        ExpertLayout.from_slot_to_row(sort.slot_to_row, 6),
        ExpertLayout.from_slot_to_row(torch.tensor([[4, -1, 99], [-7, 0, 2]]), 5),
    ):
        adjoint(layout, backend)


@pytest.mark.fp64
@pytest.mark.parametrize(
    "layout",
    [
        lambda: ExpertLayout.from_slot_to_row(torch.tensor([[2, 0], [2, 1], [0, 2]]), 4),
        lambda: ExpertLayout.from_sorted(torch.tensor([2, 2]), torch.tensor([1, 3, 1, 0]), 2),
    ],
    ids=["slots_share_a_row", "rows_share_a_slot"],
)
def test_duplicates_in_a_given_map(backend, layout):
    """A row belongs to one slot at most and a slot has one row at most, so the two functions stay adjoint."""
    adjoint(layout(), backend)


@pytest.mark.parametrize("backend", ["eager"])
@pytest.mark.parametrize(
    ("row_to_slot", "slot_to_row", "got"),
    [
        ([0, 9], [[0], [1]], "row 1 with slot 9, which does not name it back"),
        ([0, 0], [[0], [-1]], "row 1 with slot 0, which does not name it back"),
        ([0, -1], [[0], [0]], "slot 1 with row 0, which does not name it back"),
        ([0, -2], [[0], [-1]], "row 1 with slot -2, which does not name it back"),
    ],
)
def test_maps_that_do_not_fit(backend, row_to_slot, slot_to_row, got, monkeypatch):
    """Found when values are checked; never an access out of bounds when they are not."""
    maps = (torch.tensor(m, dtype=torch.int32) for m in (row_to_slot, slot_to_row))
    layout = ExpertLayout(None, None, *maps)
    x, weights = torch.ones(2, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    for function, arguments in ((permute, ()), (unpermute, ()), (unpermute, (weights,))):
        function(x, layout, *arguments, backend=backend).sum().backward()
    monkeypatch.setenv("ANABRANCH_CHECK_VALUES", "1")
    message = "layout: expected maps that are each other's inverse, -1 where there is no partner, got " + got
    for function in (permute, unpermute):
        with pytest.raises(ArgumentError) as error:
            function(x, layout, backend=backend)
        assert str(error.value) == f"{function.__name__}: {message}"


def test_good_maps_pass_the_check_of_values(monkeypatch):
    monkeypatch.setenv("ANABRANCH_CHECK_VALUES", "1")
    adjoint(ExpertLayout.from_topk(torch.tensor([[0, -1], [3, 1]]), 4), "eager")
    adjoint(ExpertLayout.from_slot_to_row(torch.tensor([[1, -1], [0, 9]]), 3), "eager")
