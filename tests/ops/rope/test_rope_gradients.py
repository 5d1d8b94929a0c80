"""Gradients of rope: which are computed, of what order, and what they leave alone."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from anabranch.ops.rope import autograd
from anabranch.ops.rope.api import mrope, rope
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("rope")


def leaves(*heads, dtype=torch.float32, channels=8):
    return [randn(2, h, 3, channels, dtype=dtype).requires_grad_() for h in heads]


def tables(*rows, width=8, dtype=torch.float32):
    return randn(*rows, 2, 3, width, dtype=dtype), randn(*rows, 2, 3, width, dtype=dtype)


TABLES = {
    name: torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).unbind()
    for name, shape in {"full": (2, 3, 8), "rows": (3, 2, 3, 8), "indexed": (4, 8)}.items()
}
INDEX = torch.tensor([[0, 2, -1], [3, 1, 9]])
CALLS = {
    "half": lambda q, k, **b: rope(q, k, *TABLES["full"], **b),
    "adjacent": lambda q, k, **b: rope(q, k, *TABLES["full"], pairing="adjacent", **b),
    "partial": lambda q, k, **b: rope(q, k, *(t[..., :4] for t in TABLES["full"]), rotary_dim=4, **b),
    "half_width": lambda q, k, **b: rope(q, k, *(t[..., :4] for t in TABLES["full"]), **b),
    "head_axis": lambda q, k, **b: rope(
        q.transpose(1, 2), k.transpose(1, 2), *TABLES["full"], head_axis=2, **b
    ),
    "positions": lambda q, k, **b: rope(q, k, *TABLES["indexed"], positions=INDEX, **b),
    "blocked": lambda q, k, **b: mrope(q, k, *TABLES["rows"], [1, 2, 1], **b),
    "interleaved": lambda q, k, **b: mrope(q, k, *TABLES["rows"], [2, 1, 1], order="interleaved", **b),
    "rows_of_positions": lambda q, k, **b: mrope(
        q, k, *TABLES["indexed"], [1, 2, 1], positions=torch.stack((INDEX, INDEX + 1, INDEX - 1)), **b
    ),
}


@pytest.mark.fp64
@pytest.mark.parametrize("name", CALLS)
def test_first_and_second_derivatives(backend, name):
    q, k = leaves(2, 1, dtype=torch.float64)

    def call(q, k):
        return CALLS[name](q, k, backend=backend)

    assert torch.autograd.gradcheck(call, (q, k))
    # Nonlinear, so that a second derivative is not zero.
    assert torch.autograd.gradgradcheck(lambda q, k: [y.sin() for y in call(q, k)], (q, k), fast_mode=True)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_only_what_is_needed(backend, needs, used, monkeypatch):
    wanted = [i for i in (0, 1) if needs[i] and i in used]
    q, k = (x.detach().requires_grad_(need) for x, need in zip(leaves(3, 2), needs, strict=True))
    cos, sin = tables()
    outs = rope(q, k, cos, sin, backend=backend)
    runs, operator = [], autograd.rope_forward
    monkeypatch.setattr(autograd, "rope_forward", lambda *args: runs.append(args[:2]) or operator(*args))
    loss = sum(outs[i].square().sum() for i in used)
    if loss.requires_grad:
        loss.backward()
    for i, x in enumerate((q, k)):
        if i in wanted:
            copy = x.detach().requires_grad_()
            y, _ = rope(copy, None, cos, sin, backend="reference")
            torch.testing.assert_close(x.grad, torch.autograd.grad(y.square().sum(), copy)[0])
        else:
            assert x.grad is None
    if backend != "reference":
        assert [sum(x is not None for x in given) for given in runs] == ([len(wanted)] if wanted else [])


LOSSES = {
    "sum": torch.sum,
    "mean": torch.mean,
    "transposed": lambda y: (y.transpose(1, 2).contiguous() * torch.arange(8.0)).sum(),
    "every_second": lambda y: y[..., ::2].sum(),
    "one_head": lambda y: y[:, :1].expand(-1, 4, -1, -1).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_any_stride(backend, loss):
    q, k = leaves(3, 2)
    cos, sin = tables()
    outs = rope(q, k, cos, sin, backend=backend)
    losses = [LOSSES[loss](y) for y in outs]
    grads = [d.contiguous() for d in torch.autograd.grad(losses, outs, retain_graph=True)]
    expected = torch.autograd.grad(outs, (q, k), grads, retain_graph=True)
    for actual, want in zip(torch.autograd.grad(losses, (q, k)), expected, strict=True):
        assert want.any()
        assert_same(actual, want)


@pytest.mark.parametrize("expanded", [(0,), (1, 2), (0, 1, 2, 3), (3,)], ids=str)
def test_expanded_gradient(backend, expanded):
    (q,) = leaves(3)
    cos, sin = tables()
    shape = [1 if axis in expanded else size for axis, size in enumerate(q.shape)]
    grad = randn(*shape).expand(q.shape)
    y, _ = rope(q, None, cos, sin, backend=backend)
    (actual,) = torch.autograd.grad(y, q, grad, retain_graph=True)
    (expected,) = torch.autograd.grad(y, q, grad.contiguous())
    assert_same(actual, expected)


def test_nothing_is_modified(backend):
    q, k = leaves(3, 2)
    cos, sin = tables()
    dq, dk = randn(*q.shape), randn(*k.shape)
    kept = [x.detach().clone() for x in (q, k, cos, sin, dq, dk)]
    versions = [x._version for x in (q, k, cos, sin, dq, dk)]
    outs = rope(q, k, cos, sin, backend=backend)
    first = torch.autograd.grad(outs, (q, k), (dq, dk), retain_graph=True)
    second = torch.autograd.grad(outs, (q, k), (dq, dk), retain_graph=True)
    again = rope(q, k, cos, sin, backend=backend)
    for a, b in (*zip(first, second, strict=True), *zip(outs, again, strict=True)):
        assert_same(a, b)
    for x, was, version in zip((q, k, cos, sin, dq, dk), kept, versions, strict=True):
        assert_same(x, was)
        assert x._version == version
    # Outputs share memory with nothing, so a model may write to them.
    assert not {y.untyped_storage().data_ptr() for y in outs} & {
        x.untyped_storage().data_ptr() for x in (q, k)
    }


def test_checkpoint_and_reuse(backend):
    q, k = leaves(3, 2)
    cos, sin = tables()

    def block(q, k):
        a, b = rope(q, k, cos, sin, backend=backend)
        return (a * q).sum() + (b * k).sum()

    expected = torch.autograd.grad(block(q, k), (q, k))
    actual = torch.autograd.grad(checkpoint(block, q, k, use_reentrant=False), (q, k))
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)


def test_saves_tables_alone(backend):
    if backend == "reference":
        return
    saved = []
    q, k = leaves(3, 2)
    cos, sin = tables()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope(q, k, cos, sin, backend=backend)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}
