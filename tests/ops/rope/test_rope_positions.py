"""Tables that positions index: which row a token reads, and what happens outside the table."""

import pytest
import torch

from anabranch.errors import ArgumentError
from anabranch.ops.rope.api import mrope, rope
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("rope")
RESTARTING = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
EVERYWHERE_ELSE = (-1, 6, 7, 2**31 - 1, -(2**31))


def tables(width=8, rows=6):
    return randn(rows, width), randn(rows, width)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("head_axis", [1, 2])
def test_rows_of_a_table(backend, dtype, head_axis, width, pairing):
    cos, sin = tables(width)
    q, k = (randn(*((3, h, 5) if head_axis == 1 else (3, 5, h)), 8) for h in (2, 1))
    options = dict(head_axis=head_axis, pairing=pairing, backend=backend)
    for index in (RESTARTING, RESTARTING[:1], RESTARTING[2], RESTARTING.T.contiguous().T):
        outs = rope(q, k, cos, sin, positions=index.to(dtype), **options)
        for a, b in zip(outs, rope(q, k, cos[index], sin[index], **options), strict=True):
            assert_same(a, b)


def test_packed(backend):
    cos, sin = tables()
    q = randn(5, 2, 8)
    index = RESTARTING[0]
    y, _ = rope(q, None, cos, sin, positions=index, backend=backend)
    assert_same(y, rope(q, None, cos[index], sin[index], backend=backend)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("outside", EVERYWHERE_ELSE)
def test_outside_is_not_rotated(backend, dtype, outside, pairing):
    cos, sin = tables(width=8)
    q = randn(3, 2, 5, 16)
    # What a rotation by no angle would lose.
    q[0, 0, 1] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -0.0, 1.0, -1.0] * 2)
    index = RESTARTING.clone()
    index[0, 1] = index[2, 4] = outside
    leaf = q.clone().requires_grad_()
    options = dict(pairing=pairing, backend=backend)
    y, _ = rope(leaf, None, cos, sin, positions=index.to(dtype), **options)
    dy = randn(*q.shape)
    (grad,) = torch.autograd.grad(y, leaf, dy)
    expected, _ = rope(q, None, cos, sin, positions=RESTARTING, **options)
    outside_rows = torch.zeros(3, 5, dtype=torch.bool)
    outside_rows[0, 1] = outside_rows[2, 4] = True
    for result, untouched in ((y.detach(), q), (grad, dy)):
        kept, given = (x.transpose(1, 2)[outside_rows].contiguous() for x in (result, untouched))
        assert torch.equal(kept.view(torch.int32), given.view(torch.int32))
    assert_same(y.detach().transpose(1, 2)[~outside_rows], expected.transpose(1, 2)[~outside_rows])
    assert not torch.equal(grad, dy)


def test_empty_table(backend):
    q = randn(3, 2, 5, 8)
    y, _ = rope(q, None, *tables(rows=0), positions=RESTARTING, backend=backend)
    assert_same(y, q)
    y, _ = mrope(q, None, *tables(rows=0), [1, 2, 1], positions=RESTARTING.expand(3, 3, 5), backend=backend)
    assert_same(y, q)


@pytest.mark.parametrize("order", ["blocked", "interleaved"])
@pytest.mark.parametrize("width", [8, 4])
def test_three_rows(backend, width, order):
    cos, sin = tables(width)
    q, k = randn(3, 2, 5, 8), randn(3, 1, 5, 8)
    rows = torch.stack((RESTARTING, RESTARTING.flip(1), 5 - RESTARTING))
    options = dict(sections=[2, 1, 1], order=order, backend=backend)
    for index in (rows, rows[:, :1]):
        outs = mrope(q, k, cos, sin, positions=index, **options)
        for a, b in zip(outs, mrope(q, k, cos[index], sin[index], **options), strict=True):
            assert_same(a, b)
    for index in (RESTARTING, RESTARTING[:1], RESTARTING[0]):
        y, _ = mrope(q, None, cos, sin, positions=index, **options)
        assert_same(y, rope(q, None, cos, sin, positions=index, backend=backend)[0])
    y, _ = mrope(q[0].transpose(0, 1), None, cos, sin, positions=rows[:, 0], **options)
    assert_same(y, mrope(q[:1], None, cos, sin, positions=rows[:, :1], **options)[0][0].transpose(0, 1))


def test_pairs_outside_are_not_rotated(backend):
    cos, sin = tables(4)
    q = randn(3, 2, 5, 8)
    rows = torch.stack((RESTARTING, RESTARTING, RESTARTING))
    expected, _ = mrope(q, None, cos, sin, [1, 2, 1], positions=rows, backend=backend)
    rows[1, 0, 2] = 6
    y, _ = mrope(q, None, cos, sin, [1, 2, 1], positions=rows, backend=backend)
    for channel in (1, 2, 5, 6):
        expected[0, :, 2, channel] = q[0, :, 2, channel]
    assert_same(y, expected)


@pytest.mark.parametrize("inplace", [False, True])
def test_checked_on_request(backend, inplace, monkeypatch):
    if backend == "reference":
        return  # no operator, no checks
    monkeypatch.setenv("ANABRANCH_CHECK_VALUES", "1")
    cos, sin = tables()
    q = randn(3, 2, 5, 8)
    kept = q.clone()
    rope(q.clone(), None, cos, sin, positions=RESTARTING, inplace=inplace, backend=backend)
    for outside in (6, -1):
        index = RESTARTING.clone()
        index[1, 2] = outside
        with pytest.raises(ArgumentError) as error:
            rope(q, None, cos, sin, positions=index, inplace=inplace, backend=backend)
        assert str(error.value) == f"rope: positions: expected rows of cos, from 0 to 5, got {outside}"
        with pytest.raises(ArgumentError, match="mrope: positions: expected rows of cos"):
            mrope(
                q,
                None,
                cos,
                sin,
                [1, 2, 1],
                positions=index.expand(3, 3, 5),
                inplace=inplace,
                backend=backend,
            )
    assert_same(q, kept)
