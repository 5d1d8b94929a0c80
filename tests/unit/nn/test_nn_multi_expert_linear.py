"""MultiExpertLinear: experts of different widths."""

import pytest
import torch
import torch.nn.functional as F

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.nn import MultiExpertLinear
from anabranch.testing import assert_same, randn

INS, OUTS = (8, 3, 5), (6, 4, 7)


def inputs(dtype=torch.float64):
    return [
        randn(2, 5, 8, dtype=dtype).requires_grad_(),
        randn(0, 3, dtype=dtype).requires_grad_(),
        randn(5, dtype=dtype).requires_grad_(),
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_each_expert_is_a_linear_layer(bias):
    module, xs = MultiExpertLinear(INS, OUTS, bias, dtype=torch.float64), inputs()
    ys = module(xs)
    assert isinstance(ys, list)
    expected = [F.linear(x, module.weights[i], module.biases[i] if bias else None) for i, x in enumerate(xs)]
    leaves = (*xs, *module.parameters())
    grads = torch.autograd.grad(sum(y.square().sum() for y in ys), leaves)
    others = torch.autograd.grad(sum(y.square().sum() for y in expected), leaves)
    for found, wanted in zip((*ys, *grads), (*expected, *others), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_a_frozen_expert_gets_no_gradient():
    module = MultiExpertLinear((4, 2), (3, 3))
    module.weights[0].requires_grad_(False)
    xs = [randn(5, 4).requires_grad_(), randn(6, 2).requires_grad_()]
    sum(y.sum() for y in module(xs)).backward()
    assert module.weights[0].grad is None
    assert (module.weights[1].grad != 0).any()
    assert all((x.grad != 0).any() for x in xs)


def test_autocast():
    module, xs = MultiExpertLinear(INS, OUTS, bias=True), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ys = module(xs)
    assert all(y.dtype == torch.bfloat16 for y in ys)
    sum(y.sum() for y in ys).backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_draws_as_nn_linear_does():
    module = MultiExpertLinear((100, 4), (50, 50), bias=True)
    for values, fan_in in zip(module.weights, (100, 4), strict=True):
        assert 0.9 < values.abs().max() * fan_in**0.5 <= 1
    before = [p.clone() for p in module.parameters()]
    module.reset_parameters()
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_wrong_arguments():
    with pytest.raises(
        ArgumentTypeError, match="MultiExpertLinear: in_features: expected a list or tuple of ints"
    ):
        MultiExpertLinear(4, (4,))
    with pytest.raises(
        ArgumentError, match="MultiExpertLinear: in_features: expected at least one int, got none"
    ):
        MultiExpertLinear((), ())
    with pytest.raises(
        ArgumentError, match="MultiExpertLinear: out_features: expected as many as in_features, 2"
    ):
        MultiExpertLinear((4, 3), (4,))
    with pytest.raises(
        ArgumentError, match=r"MultiExpertLinear: out_features\[1\]: expected at least 1, got 0"
    ):
        MultiExpertLinear((4, 3), (4, 0))
    module = MultiExpertLinear((4, 3), (4, 5))
    with pytest.raises(
        ArgumentTypeError, match="MultiExpertLinear: xs: expected a list or tuple of tensors, got T"
    ):
        module(torch.zeros(2, 4))
    with pytest.raises(
        ArgumentError, match="MultiExpertLinear: xs: expected 2 tensors, one per expert, got 1"
    ):
        module([torch.zeros(2, 4)])
    with pytest.raises(
        ArgumentError, match=r"MultiExpertLinear: xs\[1\]: expected shape \(..., in\) with in = 3"
    ):
        module([torch.zeros(2, 4), torch.zeros(2, 4)])
    with pytest.raises(ArgumentTypeError, match=r"^MultiExpertLinear: bias: expected a bool, got int$"):
        MultiExpertLinear((4, 3), (4, 5), bias=2)
    xs = [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bfloat16)]
    expected = r"^MultiExpertLinear: xs\[1\]: expected the parameters' dtype float32, got bfloat16$"
    with pytest.raises(ArgumentTypeError, match=expected):
        module(xs)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(xs)[1].dtype == torch.bfloat16
    with pytest.raises(
        NotImplementedError, match=r"^MultiExpertLinear: backend: expected a backend that can"
    ):
        MultiExpertLinear((4, 3), (4, 5), backend="hopper")([xs[0], xs[0][:, :3]])


def test_repr():
    expected = "in_features=(4, 3), out_features=(4, 5), bias=False"
    assert MultiExpertLinear([4, 3], [4, 5]).extra_repr() == expected
    xs = [randn(2, 4), randn(2, 3)]
    module = MultiExpertLinear([4, 3], [4, 5])
    assert_same(module(xs)[0], module(tuple(xs))[0])
