"""Gradients of grouped_gemm: against finite differences, only those needed, whatever the incoming one."""

import math

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.epilogues import base
from anabranch.errors import UnsupportedError
from anabranch.testing import assert_same, randn, routing
from anabranch.testing.conformance import FULL, make, solve
from anabranch.testing.problems import Flags

pytestmark = pytest.mark.op("grouped_gemm")


@pytest.mark.cpu
@pytest.mark.parametrize(("gather", "scatter"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("activation", sorted(base.REGISTRY))
def test_gradcheck(activation, gather, scatter):
    flags = Flags(gather, scatter, bias=True, scale=True, activation=activation)
    ids = torch.tensor([[0, 2], [-1, 0], [2, 2]])
    problem = make(torch.float64, "cpu", ids, E=3, N=4, K_dim=3, flags=flags)
    # What may not be read holds NaN, which finite differences cannot take.
    tensors = {n: v.nan_to_num(0.5).double().requires_grad_() for n, v in problem.inputs().items()}

    def function(*values):
        return problem.call("eager", **dict(zip(tensors, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", ["sum", "mean", "transpose", "every_second", "expand", "partial"])
def test_gradients_that_are_not_contiguous(grad, dtype, backend, device):
    losses = {
        "sum": lambda y: y.sum(),
        "mean": lambda y: y.mean(),
        "transpose": lambda y: (y.transpose(0, 1).contiguous() * torch.arange(y.shape[0])).sum(),
        "every_second": lambda y: (y[:, ::2] * 3).sum(),
        "expand": lambda y: (y * torch.ones(y.shape[1]).expand(y.shape)).sum(),
        "partial": lambda y: y[2:5, 1:].square().sum(),
    }
    problem = make(dtype, device, routing(9, 4, 2), flags=FULL, backend=backend)
    leaves = {n: v.detach().requires_grad_() for n, v in problem.inputs().items()}
    out = problem.call(backend, **leaves)
    copy = out.detach().clone().requires_grad_()
    losses[grad](copy.to(dtype)).backward()
    losses[grad](out).backward()
    problem = problem.with_inputs(grad=copy.grad.contiguous())
    problem.check({name: leaf.grad for name, leaf in leaves.items()}, name=f"{grad}: ")


@pytest.mark.fp64
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("scatter", [False, True])
def test_the_scale_learns(scatter, activation, backend, device):
    """d_scale[t, k] = <d_out, act(W x + b)>, which is not zero."""
    flags = Flags(gather=True, scatter=scatter, bias=True, scale=True, activation=activation)
    problem = make(torch.float64, device, routing(9, 4, 2), flags=flags)
    results = problem.run(backend, needs=("scale",))
    problem.check({"scale": results["scale"]})
    assert results["scale"].ne(0).all()


def products(function) -> int:
    """Matrix products that run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        function()
    return sum(event.name in ("aten::mm", "aten::addmm", "aten::bmm") for event in profile.events())


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("needs", "count"), [(("x",), 1), (("weight",), 1), (("x", "weight"), 2), (("bias",), 0), (("scale",), 0)]
)
def test_eager_multiplies_only_for_what_is_needed(needs, count):
    ids = torch.tensor([[0], [2], [2]])
    problem = make(torch.float32, "cpu", ids, flags=Flags(bias=True, scale=True, activation="silu"))
    leaves = {n: v.requires_grad_(n in needs) for n, v in problem.inputs().items()}
    out = problem.call("eager", **leaves)
    assert products(lambda: out.backward(problem.grad)) == 2 * count


@pytest.mark.cpu
@pytest.mark.parametrize("needs", ["x", "weight", "bias", "scale"])
def test_eager_allocates_only_what_is_needed(needs):
    E, N, K_dim = 4, 256, 512
    problem = make(
        torch.float32, "cpu", torch.tensor([[0, 3]] * 4), E, N, K_dim, Flags(bias=True, scale=True)
    )
    leaves = {n: v.requires_grad_(n == needs) for n, v in problem.inputs().items()}
    out = problem.call("eager", **leaves)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        out.backward(problem.grad)
    peak = max((event.cpu_memory_usage for event in profile.events()), default=0)
    whole = E * N * K_dim * 4
    assert (peak >= whole) == (needs == "weight")


def test_nothing_is_kept_for_backward_without_gradients(device):
    problem = make(torch.float32, device, flags=Flags(activation="swiglu"))
    with torch.no_grad():
        out = problem.call("eager", **{n: v.requires_grad_() for n, v in problem.inputs().items()})
    assert not out.requires_grad
    assert out.grad_fn is None


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_second_derivative_is_refused(activation, device):
    problem = make(torch.float64, device, flags=Flags(activation=activation))
    x = problem.x.requires_grad_()
    (grad,) = torch.autograd.grad(
        problem.call("eager", x=x), x, problem.grad.requires_grad_(), create_graph=True
    )
    with pytest.raises(UnsupportedError) as raised:
        grad.sum().backward()
    assert str(raised.value) == (
        "grouped_gemm: create_graph: expected first derivatives "
        '(backend="reference" has higher ones), got a second one'
    )


@pytest.mark.cpu
def test_the_reference_has_second_derivatives():
    layout = ExpertLayout.from_topk(torch.tensor([[0], [1], [0]]), 2)
    inputs = [randn(*s, dtype=torch.float64).requires_grad_() for s in ((3, 3), (2, 2, 3))]

    def function(x, weight):
        return grouped_gemm(x, weight, layout, activation="gelu", backend="reference")

    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.fp64
def test_one_weight_for_all_experts(backend, device):
    """An expert stride of 0: the gradient of the one weight is the sum over experts."""
    problem = make(torch.float64, device, routing(9, 4, 2), flags=Flags(gather=True))
    weight = problem.weight[0].clone().requires_grad_()
    out = problem.call(backend, weight=weight.expand(4, -1, -1))
    out.backward(problem.grad)
    each = problem.with_inputs(weight=weight.detach().expand(4, -1, -1).contiguous()).oracle()["weight"]
    torch.testing.assert_close(weight.grad, each.sum(0))


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 12, 16, 20, 24, 64])
def test_adapters_of_any_rank(rank, backend, device):
    """Low rank products, in and out, with few rows or none."""
    for counts in ([0, 1, 2], [15, 16, 0]):
        ids = torch.tensor([e for e, c in enumerate(counts) for _ in range(c)]).reshape(-1, 1)
        for N, K_dim in ((rank, 32), (32, rank)):
            problem = make(torch.bfloat16, device, ids, 3, N, K_dim, Flags(), counts=counts, backend=backend)
            solve(backend, problem, f"counts {counts}, N = {N}, K_dim = {K_dim}")


@pytest.mark.cpu
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_at_the_same_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        problem = make(torch.bfloat16, "cpu", routing(300, 4, 2), N=64, K_dim=96)
        first, second = problem.run("eager"), problem.run("eager")
    finally:
        torch.set_num_threads(before)
    for name, value in first.items():
        assert_same(second[name], value, name=name)


def test_deterministic_algorithms_change_nothing(backend, device):
    problem = make(torch.bfloat16, device, backend=backend)
    expected = problem.run(backend)
    torch.use_deterministic_algorithms(True)
    try:
        actual = problem.run(backend)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in expected.items():
        assert_same(actual[name], value, name=name)


def test_padding_tokens_changes_nothing(backend, device):
    """45 tokens are the first 45 of 64 whose last 19 go nowhere, forward and backward."""
    ids = routing(45, 4, 2)
    padded = torch.cat([ids, ids.new_full((19, 2), -1)])
    short = make(torch.float32, device, ids, flags=Flags(gather=True, scatter=True, scale=True))
    long = make(torch.float32, device, padded, flags=short.flags)
    fill = {"x": long.x.clone(), "scale": long.scale.clone(), "grad": long.grad.clone()}
    fill["x"][:45], fill["scale"][:45], fill["grad"][:90] = short.x, short.scale, short.grad
    actual = long.with_inputs(weight=short.weight, **fill).run(backend)
    for name, value in short.run(backend).items():
        rows = value.shape[0]
        torch.testing.assert_close(actual[name][:rows], value, rtol=1e-5, atol=1e-5)
        assert not actual[name][rows:].any(), name


def test_autograd_reaches_a_gathered_token_once_for_each_choice():
    """Half precision sums over choices do not lose small terms: the sum is fp32, rounded once."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = grouped_gemm(
        x,
        torch.ones(1, 1, 1, dtype=torch.bfloat16),
        ExpertLayout.from_topk(ids, 1),
        gather=True,
        scatter=True,
    )
    for values, exact in (([256, 1, 1, 1, 1, 1, 1, 0], 262), ([1, 2**-9, -1, 0, 0, 0, 0, 0], 2**-9)):
        grad = torch.tensor(values, dtype=torch.bfloat16)[:, None]
        (d_x,) = torch.autograd.grad(out, x, grad, retain_graph=True)
        assert math.isclose(d_x.item(), exact, rel_tol=0)
