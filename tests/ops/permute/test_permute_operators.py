"""permute and unpermute as operators: what they compute and keep, compilation, fake tensors, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.layout import ExpertLayout
from anabranch.ops.permute import autograd
from anabranch.ops.permute.api import permute, unpermute
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("permute")
IDS = torch.tensor([[0, -1], [2, 1], [1, 1], [9, 0], [3, 2]])
T, K, R, H = 5, 2, 10, 3


class Operators(TorchDispatchMode):
    """Notes each of our operators and the shapes it returns."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "anabranch":
            results = result if isinstance(result, (list, tuple)) else [result]
            self.calls.append((func.__name__.partition(".")[0], [tuple(r.shape) for r in results]))
        return result


def inputs(dtype=torch.float32, weights_dtype=None, needs=(True, True)):
    y = randn(R, H, dtype=dtype).requires_grad_(needs[0])
    return y, torch.rand(T, K).to(weights_dtype or dtype).requires_grad_(needs[1])


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)))
def test_only_needed_gradients(needs):
    """Nothing is computed, returned or kept for an input that is frozen."""
    layout = ExpertLayout.from_topk(IDS, 4)
    y, weights = inputs(needs=needs)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: kept.append(v.data_ptr()) or v, lambda v: v):
        out = unpermute(y, layout, weights)
    assert (y.data_ptr() in kept) == needs[1]
    assert out.requires_grad == any(needs)
    if not any(needs):
        assert not kept
        return
    with Operators() as seen:
        out.sum().backward()
    assert seen.calls == [("unpermute_backward", [(R, H)] * needs[0] + [(T, K)] * needs[1])]
    assert (y.grad is not None, weights.grad is not None) == needs


def test_gradients_of_the_unweighted_are_each_other():
    layout = ExpertLayout.from_topk(IDS, 4)
    x, y = randn(T, H).requires_grad_(), randn(R, H).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: kept.append(v.dtype) or v, lambda v: v):
        results = permute(x, layout), unpermute(y, layout)
    assert set(kept) == {torch.int32}  # the maps, nothing else
    with Operators() as seen:
        torch.autograd.backward(results, [y.detach(), x.detach()])
    assert sorted(seen.calls) == [("permute", [(R, H)]), ("unpermute", [(T, H)])]


def test_no_gradient_without_grad_mode():
    layout = ExpertLayout.from_topk(IDS, 4)
    with torch.no_grad():
        assert not unpermute(*inputs()[:1], layout, inputs()[1]).requires_grad
        assert not permute(randn(T, H).requires_grad_(), layout).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_are_equal_to_the_bit(dtype):
    """Two backwards on one graph, and whole repeats; inputs and incoming gradients stay as they were."""
    layout = ExpertLayout.from_topk(torch.randint(-1, 6, (40, 4)), 6)
    x, y = (randn(n, 64, dtype=dtype).requires_grad_() for n in (40, 160))
    weights = torch.rand(40, 4).requires_grad_()
    grads = randn(160, 64, dtype=dtype), randn(40, 64, dtype=dtype)
    before = [v.detach().clone() for v in (x, y, weights, *grads)]

    def run():
        results = permute(x, layout), unpermute(y, layout, weights)
        once, twice = (torch.autograd.grad(results, (x, y, weights), grads, retain_graph=True) for _ in "12")
        return [*results, *once], [*results, *twice]

    first, *others = *run(), *run(), *run()
    for other in others:
        for actual, expected in zip(other, first, strict=True):
            assert_same(actual, expected)
    for actual, expected in zip((x, y, weights, *grads), before, strict=True):
        assert_same(actual, expected)


def test_deterministic_algorithms():
    layout = ExpertLayout.from_topk(IDS, 4)
    y, weights = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        unpermute(y, layout, weights).sum().backward()
        permute(randn(T, H).requires_grad_(), layout).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tokens", [5, 1, 0])
def test_opcheck(tokens):
    layout = ExpertLayout.from_topk(IDS[:tokens], 4)
    maps = (layout.row_to_slot, layout.slot_to_row, None)
    x, y = randn(tokens, H).requires_grad_(), randn(tokens * K, H).requires_grad_()
    weights = torch.rand(tokens, K).requires_grad_()
    torch.library.opcheck(autograd.permute_forward, (x, *maps))
    torch.library.opcheck(autograd.unpermute_forward, (y, weights, *maps))
    torch.library.opcheck(autograd.unpermute_forward, (y, None, *maps))
    for needs in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(
            autograd.unpermute_backward, (needs, x, y if needs[1] else None, weights, *maps)
        )


def round_trip(x, expert_ids, weights):
    layout = ExpertLayout.from_topk(expert_ids, 4)
    return unpermute(permute(x, layout).sin(), layout, weights)


@pytest.mark.cpu
def test_compiled():
    """One graph for every number of tokens but 0 and 1, which PyTorch always specialises."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 8, 3, 1, 0):
        ids = torch.randint(-1, 5, (tokens, K))
        results = []
        for function in (round_trip, compiled):
            torch.manual_seed(tokens)
            x, weights = randn(tokens, H).requires_grad_(), torch.rand(tokens, K).requires_grad_()
            out = function(x, ids, weights)
            results.append([out, *torch.autograd.grad(out.square().sum(), (x, weights))])
        for actual, expected in zip(*reversed(results), strict=True):
            assert_same(actual, expected)
        if tokens == 3:
            assert counter.frame_count == 1
    assert counter.frame_count <= 3


@pytest.mark.cpu
def test_compiled_with_a_layout_as_argument():
    function = torch.compile(
        lambda y, layout, w: unpermute(y, layout, w), fullgraph=True, backend="aot_eager"
    )
    layout = ExpertLayout.from_slot_to_row(torch.tensor([[0, 2], [-1, 1]]), 3)
    y, weights = randn(3, 2), torch.rand(2, 2)
    assert_same(function(y, layout, weights), unpermute(y, layout, weights))


@pytest.mark.cpu
def test_fake_tensors():
    with FakeTensorMode():
        layout = ExpertLayout.from_topk(torch.empty(T, K, dtype=torch.int64), 4)
        x = torch.empty(T, H, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.empty(T, K, requires_grad=True)
        rows = permute(x, layout)
        out = unpermute(rows, layout, weights)
        out.sum().backward()
    assert (rows.shape, rows.dtype) == ((R, H), torch.bfloat16)
    assert (out.shape, out.dtype) == ((T, H), torch.bfloat16)
    assert (x.grad.shape, weights.grad.dtype) == (x.shape, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_nothing(dtype, device):
    layout = ExpertLayout.from_topk(IDS, 4)
    y, weights = inputs(dtype, torch.float32)
    x = randn(T, H, dtype=dtype).requires_grad_()
    results = []
    for enabled in (False, True):
        with torch.autocast(device, torch.float16, enabled=enabled):
            outs = permute(x, layout), unpermute(y, layout, weights)
            results.append([*outs, *torch.autograd.grad(outs, (x, y, weights), (y.detach(), x.detach()))])
    for actual, expected in zip(*reversed(results), strict=True):
        assert_same(actual, expected)
