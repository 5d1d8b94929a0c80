"""Autocast, mixed dtypes and rounding: grouped_gemm does with dtypes what torch.bmm does."""

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.errors import ArgumentTypeError
from anabranch.testing import assert_component_wise, randn
from anabranch.testing.conformance import make, rounds_once
from anabranch.testing.problems import Flags

pytestmark = pytest.mark.op("grouped_gemm")
COUNTS = [1, 3]
LOW = (torch.bfloat16, torch.float16)


def leaves(x_dtype, weight_dtype, bias_dtype):
    made = randn(4, 64, dtype=x_dtype), randn(2, 128, 64, dtype=weight_dtype), randn(2, 128, dtype=bias_dtype)
    scale = torch.rand(4, 1).add(0.1)
    return [value.requires_grad_() for value in (*made, scale)]


def bmm(x, weight, bias, scale):
    """What is asked for, with torch.bmm: the first row to expert 0, the others to expert 1."""
    out = torch.bmm(x[:, None], weight.mT[[0, 1, 1, 1]])[:, 0]
    return out, (out.double() + bias[[0, 1, 1, 1]].to(out.dtype).double()) * scale.double()


def ours(x, weight, bias, scale, backend):
    layout = ExpertLayout.from_counts(torch.tensor(COUNTS), 4)
    return grouped_gemm(x, weight, layout, bias=bias, scale=scale, backend=backend)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
    ids=["x32-w16", "x16-w32", "all32", "all-different"],
)
def test_autocast_is_that_of_bmm(dtypes, backward_inside, low, backend, device):
    inputs = leaves(*dtypes)
    linear = torch.nn.Linear(128, 8, device=device)
    with torch.autocast(device, low):
        plain, expected = bmm(*inputs)
        out = ours(*inputs, backend)
        assert out.dtype == plain.dtype == low
        after = linear(out)
        assert after.dtype == low
        if backward_inside:
            after.sum().backward()
    if not backward_inside:
        after.sum().backward()
    for leaf in inputs:
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()
    x, weight, bias, scale = _rounded(inputs, low)
    reference = (
        torch.stack([weight[e] @ x[i] for i, e in enumerate((0, 1, 1, 1))]) + bias[[0, 1, 1, 1]]
    ) * scale
    magnitude = torch.stack([weight[e].abs() @ x[i].abs() for i, e in enumerate((0, 1, 1, 1))])
    magnitude = (magnitude + bias[[0, 1, 1, 1]].abs()) * scale
    once = rounds_once(backend, low, Flags(bias=True, scale=True), device)
    assert_component_wise(out, reference, magnitude, 64, roundings=1 if once else 2)
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-6)


def _rounded(inputs, low):
    x, weight, bias, scale = (value.detach() for value in inputs)
    return (*(value.to(low).double() for value in (x, weight, bias)), scale.double())


@pytest.mark.fp64
def test_fp64_stays_fp64_under_autocast(backend, device):
    inputs = [value.detach().double() for value in leaves(torch.float32, torch.float32, torch.float32)]
    outside = ours(*inputs, backend)
    with torch.autocast(device, torch.bfloat16):
        assert torch.bmm(inputs[0][None], inputs[1][:1].mT).dtype == torch.float64
        assert torch.equal(ours(*inputs, backend), outside)


def test_backward_alone_under_autocast_keeps_its_precision(backend, device):
    if backend == "reference":
        return  # plain PyTorch, which autocast reaches
    inputs = leaves(torch.float32, torch.float32, torch.float32)
    out = ours(*inputs, backend)
    grad = randn(*out.shape)
    expected = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        actual = torch.autograd.grad(out, inputs, grad)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_switched_off_is_off(backend, device):
    inputs = leaves(torch.float32, torch.float32, torch.float32)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        assert ours(*inputs, backend).dtype == torch.float32


def test_mixed_dtypes_are_an_error_outside_autocast():
    inputs = leaves(torch.float32, torch.bfloat16, torch.float32)
    with pytest.raises(ArgumentTypeError) as raised:
        ours(*inputs, None)
    assert str(raised.value) == "grouped_gemm: weight: expected x's dtype float32, got bfloat16"


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_scale_has_a_dtype_of_its_own(backend, dtype, scale_dtype, device):
    problem = make(dtype, device, flags=Flags(scale=True, gather=True))
    problem = problem.with_inputs(scale=problem.scale.to(scale_dtype))
    results = problem.run(backend)
    assert results["scale"].dtype == scale_dtype
    reference = problem.oracle()["scale"]
    wrong = (results["scale"].double() - reference).abs().max() / reference.abs().max()
    # Two roundings: of the pre-activation or of the gradient, whichever is coarser, and of the result.
    assert wrong <= 4 * max(torch.finfo(d).eps for d in (dtype, scale_dtype))
    problem.check({"out": results["out"]}, one_rounding=rounds_once(backend, dtype, problem.flags, device))


def test_the_bias_is_added_once_and_weighted(backend):
    """W = 0, bias 1, weights .7 and .3: the combined output is exactly 1, and d_bias the sum of weights."""
    ids, weights = torch.tensor([[0, 1]] * 3), torch.tensor([[0.7, 0.3]] * 3)
    layout = ExpertLayout.from_topk(ids, 3)
    bias = torch.ones(3, 2, requires_grad=True)
    options = {"gather": True, "scatter": True, "bias": bias, "scale": weights, "backend": backend}
    out = grouped_gemm(torch.ones(3, 4), torch.zeros(3, 2, 4), layout, **options).view(3, 2, 2).sum(1)
    assert out.tolist() == [[1.0, 1.0]] * 3
    out.sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([[2.1, 2.1], [0.9, 0.9], [0, 0]]))
