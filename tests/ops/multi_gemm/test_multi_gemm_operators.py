"""multi_gemm as an operator: what it computes and keeps, compilation, fake tensors, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.ops.multi_gemm import autograd
from anabranch.ops.multi_gemm.api import dual_gemm, multi_gemm
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("multi_gemm")
X_SHAPES, W_SHAPES, Y_SHAPES = ((4, 5), (3, 7)), ((6, 5), (2, 7)), ((4, 6), (3, 2))


class Operators(TorchDispatchMode):
    """Notes what our operators return, and whatever else makes memory."""

    def __init__(self):
        super().__init__()
        self.results, self.others = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "anabranch":
            self.results.append([tuple(r.shape) for r in result])
        elif not func.is_view:
            self.others.append(func.__name__)
        return result


def leaves(needs=(True,) * 4, dtype=torch.float32):
    shapes = (*X_SHAPES, *W_SHAPES)
    return [randn(*s, dtype=dtype).requires_grad_(need) for s, need in zip(shapes, needs, strict=True)]


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=4)), ids=str)
def test_only_needed_gradients(needs):
    """All gradients needed come from one call; nothing is computed, returned or kept for a frozen input."""
    x0, x1, w0, w1 = values = leaves(needs)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: kept.append(v.data_ptr()) or v, lambda v: v):
        ys = dual_gemm(*values)
    partners = ((x0, w0), (x1, w1), (w0, x0), (w1, x1))
    assert sorted(kept) == sorted(b.data_ptr() for a, b in partners if a.requires_grad)
    assert {y.requires_grad for y in ys} == {any(needs)}
    if not any(needs):
        return
    grads = [torch.ones(s) for s in Y_SHAPES]
    with Operators() as seen:
        torch.autograd.backward(ys, grads)
    order = [0, 2, 1, 3]  # by expert
    assert seen.results == [[tuple(values[i].shape) for i in order if needs[i]]]
    # Accumulating into a leaf detaches or clones; no other memory is made.
    assert set(seen.others) <= {"detach.default", "ones.default"}
    assert tuple(v.grad is not None for v in values) == needs


def test_a_result_that_nobody_uses():
    """costs nothing either: its expert has no gradient, as if the product had been a call of its own."""
    x0, x1, w0, w1 = leaves()
    _, y1 = dual_gemm(x0, x1, w0, w1)
    with Operators() as seen:
        y1.backward(torch.ones_like(y1))
    assert seen.results == [[x1.shape, w1.shape]]
    assert x0.grad is None
    assert w0.grad is None


def test_two_backwards():
    values, grads = leaves(), [randn(*s) for s in Y_SHAPES]
    before = [v.detach().clone() for v in (*values, *grads)]
    ys = dual_gemm(*values)
    once = torch.autograd.grad(ys, values, grads, retain_graph=True)
    for actual, expected in zip(torch.autograd.grad(ys, values, grads), once, strict=True):
        assert_same(actual, expected)
    for actual, expected in zip((*values, *grads), before, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("shared", ["x", "weight"])
def test_one_tensor_for_two_experts(shared):
    """Its gradients add up."""
    # Small integers: every sum is exact.
    value, *others = (torch.randint(-5, 5, s).float() for s in ((4, 5), (3, 5), (2, 5)))
    value.requires_grad_()
    pair = [value, value]
    ys = multi_gemm(pair, others) if shared == "x" else multi_gemm(others, pair)
    (found,) = torch.autograd.grad([y.sum() for y in ys], value)
    assert_same(found, torch.cat(others).sum(0).expand(4, 5))


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=2)), ids=str)
def test_opcheck(flags):
    xs = [randn(*(s[::-1] if flags[0] else s)).requires_grad_() for s in (*X_SHAPES, (0, 2))]
    weights = [randn(*(s[::-1] if flags[1] else s)).requires_grad_() for s in (*W_SHAPES, (1, 2))]
    torch.library.opcheck(autograd.multi_gemm_forward, (xs, weights, *flags, None))
    weights[0].requires_grad_(False)
    torch.library.opcheck(autograd.multi_gemm_forward, (xs, weights, *flags, "eager"))
    xs, weights = ([v.detach() for v in values] for values in (xs, weights))
    out = [torch.zeros(s) for s in (*Y_SHAPES, (0, 1))]
    torch.library.opcheck(autograd.multi_gemm_out, (out, "multi_gemm", xs, weights, *flags, None))


@pytest.mark.cpu
def test_compiled():
    """One graph for every number of rows but 0 and 1, which PyTorch always specialises."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(x0, x1, w0, w1):
        y0, y1 = dual_gemm(x0, x1, w0, w1)
        return y0.sin(), y1.cos()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    w0, w1 = randn(6, 5).requires_grad_(), randn(2, 7).requires_grad_()
    for rows in ((4, 9), (5, 2), (8, 3), (0, 4), (1, 4), (0, 0)):
        x0, x1 = (randn(m, k).requires_grad_() for m, k in zip(rows, (5, 7), strict=True))
        results = []
        for f in (function, compiled):
            ys = f(x0, x1, w0, w1)
            results.append([*ys, *torch.autograd.grad(sum(y.sum() for y in ys), (x0, x1, w0, w1))])
        for actual, expected in zip(*reversed(results), strict=True):
            assert_same(actual, expected)
        if rows == (8, 3):
            assert counter.frame_count == 1


@pytest.mark.cpu
def test_compiled_out():
    def function(x0, x1, w0, w1, out0, out1):
        dual_gemm(x0, x1, w0, w1, out=(out0, out1))
        return out0 + 1

    values = [v.detach() for v in leaves()]
    out = [torch.zeros(s) for s in Y_SHAPES]
    result = torch.compile(function, fullgraph=True, backend="aot_eager")(*values, *out)
    for y, expected in zip(out, dual_gemm(*values), strict=True):
        assert_same(y, expected)
    assert_same(result, out[0] + 1)


@pytest.mark.cpu
def test_fake_tensors():
    with FakeTensorMode():
        values = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in (*X_SHAPES, *W_SHAPES)]
        ys = dual_gemm(*values)
        sum(y.sum() for y in ys).backward()
        out = [torch.empty(s, dtype=torch.bfloat16) for s in Y_SHAPES]
        with torch.no_grad():
            assert dual_gemm(*values, out=out)[0] is out[0]
    assert [tuple(y.shape) for y in ys] == list(Y_SHAPES)
    assert {v.dtype for v in (*ys, *(v.grad for v in values))} == {torch.bfloat16}
    assert all(v.grad.shape == v.shape for v in values)


def test_autocast(device):
    """As torch.matmul: operands are cast, the result has the cast dtype, and each leaf's gradient its own."""
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    values = [v.detach().to(d).requires_grad_() for v, d in zip(leaves(), dtypes, strict=True)]
    grads = [randn(*s, dtype=torch.bfloat16) for s in Y_SHAPES]
    with torch.autocast(device, torch.bfloat16):
        ys = dual_gemm(*values)
        assert {y.dtype for y in ys} == {torch.matmul(values[0], values[2].T).dtype}
    found = [*ys, *torch.autograd.grad(ys, values, grads)]
    ys = dual_gemm(*(v.bfloat16() for v in values))
    expected = [*ys, *torch.autograd.grad(ys, values, grads)]
    assert [g.dtype for g in found[2:]] == list(dtypes)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual, wanted)


def test_autocast_leaves_fp64(device):
    values = leaves(dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16):
        assert dual_gemm(*values)[0].dtype == torch.float64
