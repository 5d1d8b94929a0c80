"""grouped_gemm under torch.compile, export, fake tensors and opcheck."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch import ExpertLayout, grouped_gemm
from anabranch.ops.grouped_gemm import autograd, call, routed
from anabranch.testing import STRIDES, randn, routing, strided
from anabranch.testing.conformance import FULL, VARIANTS, make
from anabranch.testing.problems import Flags, Problem


def operands(problem: Problem, backend: str | None = "eager") -> tuple:
    """What the operators take."""
    flags = problem.flags
    bound = call.bind_grouped_gemm(
        problem.x,
        problem.weight,
        problem.layout,
        gather=flags.gather,
        scatter=flags.scatter,
        bias=problem.bias,
        scale=problem.scale,
        activation=flags.activation,
        transpose_weight=flags.transpose_weight,
        backend=backend,
    )
    return autograd._flatten(bound)


def without_nan(problem: Problem) -> Problem:
    """Fit for comparing results by allclose."""
    tensors = {**problem.inputs(), "grad": problem.grad}
    return problem.with_inputs(**{name: value.nan_to_num(0) for name, value in tensors.items()})


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(flags, dtype):
    problem = without_nan(make(dtype, "cpu", flags=flags))
    for tensor in problem.inputs().values():
        tensor.requires_grad_()
    args = operands(problem)
    torch.library.opcheck(autograd.grouped_gemm_forward, (True, *args))
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(autograd.grouped_gemm_forward, (False, *args))
    torch.library.opcheck(autograd.grouped_gemm_out, (torch.empty_like(problem.grad), *args))
    _, h = autograd.grouped_gemm_forward(flags.activation is not None, *args)
    needs = [True, True, flags.bias, flags.scale]
    torch.library.opcheck(autograd.grouped_gemm_backward, (needs, problem.grad, h, *args))


@pytest.mark.parametrize("sorted_elsewhere", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_opcheck_of_the_operator_that_routes(sorted_elsewhere, scaled):
    x, weight = randn(12, 8).requires_grad_(), randn(3, 6, 8).requires_grad_()
    scale = torch.rand(12, 1).view(6, 2).requires_grad_() if scaled and sorted_elsewhere else None
    slots = torch.randperm(12) if sorted_elsewhere else None
    args = (x, weight, torch.tensor([5, 0, 6]), slots, scale, 2, False, sorted_elsewhere, *[None] * 4)
    torch.library.opcheck(routed.grouped_gemm_sorted, args)


@pytest.mark.parametrize("layout", STRIDES)
def test_opcheck_of_any_memory_layout(layout):
    problem = without_nan(make(torch.float32, "cpu", routing(9, 4, 2)))
    problem = problem.with_inputs(**{name: strided(v, layout) for name, v in problem.inputs().items()})
    grad = strided(problem.grad, layout)
    args = operands(problem)
    _, h = autograd.grouped_gemm_forward(True, *args)
    # The output may not alias an input, and an input that overlaps itself cannot be mutated: schemas hold.
    torch.library.opcheck(autograd.grouped_gemm_forward, (True, *args), test_utils=("test_faketensor",))
    torch.library.opcheck(
        autograd.grouped_gemm_backward, ([True] * 4, grad, h, *args), test_utils=("test_faketensor",)
    )


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_fake_tensors(flags):
    problem = make(torch.bfloat16, "cpu", flags=flags)
    real = problem.run(None)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        layout = ExpertLayout(
            *(
                mode.from_tensor(getattr(problem.layout, f))
                for f in ("counts", "offsets", "row_to_slot", "slot_to_row")
            )
        )
        tensors = {**problem.inputs(), "grad": problem.grad}
        fakes = {name: mode.from_tensor(value) for name, value in tensors.items()}
        fake = problem.with_inputs(layout=layout, **fakes).run(None)
    for name, value in real.items():
        for attribute in ("shape", "dtype", "device"):
            assert getattr(fake[name], attribute) == getattr(value, attribute), name
        assert fake[name].stride() == value.stride(), name


class Layer(torch.nn.Module):
    """Routing, up and down projections: what an expert layer does."""

    def forward(self, x, up, down, ids, weights):
        layout = ExpertLayout.from_topk(ids, up.shape[0])
        h = grouped_gemm(x, up, layout, gather=True, activation="swiglu")
        y = grouped_gemm(h, down, layout, scale=weights, scatter=True)
        return y.view(*ids.shape, y.shape[-1]).sum(1)


def arguments(T: int, kind: str = "random") -> list[torch.Tensor]:
    sizes = ((T, 12), (6, 16, 12), (6, 12, 8))
    x, up, down = (randn(*size).requires_grad_() for size in sizes)
    return [x, up, down, routing(T, 6, 2, kind), torch.rand(T, 2).requires_grad_()]


def results(function, args) -> list[torch.Tensor]:
    out = function(*args)
    return [out, *torch.autograd.grad(out.square().sum(), [a for a in args if a.requires_grad])]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(Layer(), fullgraph=True, dynamic=True, backend=counter)
    for T, kind in ((7, "random"), (64, "random"), (65, "zipf"), (64, "every_other")):
        args = arguments(T, kind)
        for actual, expected in zip(results(compiled, args), results(Layer(), args), strict=True):
            torch.testing.assert_close(actual, expected)
    assert counter.frame_count <= 2


def test_compile_without_tokens():
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    args = arguments(0)
    for actual, expected in zip(results(compiled, args), results(Layer(), args), strict=True):
        assert actual.shape == expected.shape
        assert not actual.any()


@pytest.mark.parametrize("flags", [FULL, Flags(), Flags(bias=True, activation="gpt_oss")], ids=str)
def test_compile_of_variants(flags):
    problem = make(torch.float32, "cpu", flags=flags)
    function = torch.compile(problem.call, fullgraph=True, backend="aot_eager")
    leaves = {n: v.detach().requires_grad_() for n, v in problem.inputs().items()}
    out = function("eager", **leaves)
    out.backward(problem.grad)
    problem.check({"out": out.detach(), **{n: leaf.grad for n, leaf in leaves.items()}})


def test_compile_writes_to_out():
    problem = make(torch.float32, "cpu", flags=Flags(gather=True))

    def function(out):
        return problem.call(None, out=out) * 2

    out = torch.full_like(problem.grad, float("nan"))
    doubled = torch.compile(function, fullgraph=True, backend="aot_eager")(out)
    assert torch.equal(out, problem.call(None))
    assert torch.equal(doubled, 2 * out)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    args = [a.detach() for a in arguments(7)]
    tokens = torch.export.Dim("T", min=2, max=4096)
    dynamic = ({0: tokens}, None, None, {0: tokens}, {0: tokens})
    program = torch.export.export(Layer(), tuple(args), dynamic_shapes=dynamic, strict=strict)
    for T in (7, 64):
        args = [a.detach() for a in arguments(T)]
        assert torch.equal(program.module()(*args), Layer()(*args))
