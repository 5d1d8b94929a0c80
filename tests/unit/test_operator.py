"""What every operator keeps, whatever it computes: seen on small ones that are defined here."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from anabranch.ops import operator

NAMESPACE = "anabranch_planted"


@pytest.fixture(autouse=True)
def _namespace(monkeypatch):
    monkeypatch.setattr(operator, "NAMESPACE", NAMESPACE)


def define_scaled(needs):
    """``factor * weight * x`` for every x of a list; ``needs`` collects what was needed of the gradient."""

    def save(ctx, args, results):
        xs, weight, ctx.factor = args
        ctx.save_for_backward(weight, *xs)

    def differentiate(ctx, *grads):
        weight, *xs = ctx.saved_tensors
        needs.append(ctx.needs_input_grad[: len(xs) + 1])
        seen = [None if g is None else ctx.factor * g for g in grads]
        d_xs = [None if g is None else g if weight is None else g * weight for g in seen]
        d_weight = sum((g * x).sum() for g, x in zip(seen, xs, strict=True) if g is not None)
        return (*d_xs, d_weight) if weight is not None else d_xs

    return operator.define(
        "scaled",
        "(Tensor[] xs, Tensor? weight, float factor) -> Tensor[]",
        lambda xs, weight, factor: [factor * x if weight is None else factor * weight * x for x in xs],
        fake=lambda xs, weight, factor: [torch.empty_like(x) for x in xs],
        save=save,
        differentiate=differentiate,
    )


def define_doubling():
    def kernel(out, others, x):
        for value in (out, *others):
            if value is not None:
                value.copy_(2 * x)

    return operator.define(
        "double", "(Tensor(a!)? out, Tensor(b!)[] others, Tensor x) -> ()", kernel, fake=lambda *args: None
    )


def test_gradients_of_lists_and_of_what_is_optional():
    needs = []
    scaled = define_scaled(needs)
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0])
    weight = torch.tensor(5.0, requires_grad=True)
    first, second = scaled([x, y], weight, 2.0)
    assert first.tolist() == [10, 20]
    assert second.tolist() == [30]
    d_x, d_weight = torch.autograd.grad(first.sum() + second.sum(), (x, weight))
    assert d_x.tolist() == [10, 10]
    assert d_weight.item() == 2 * (1 + 2 + 3)
    (unused,) = torch.autograd.grad(scaled([x, y], None, 2.0)[0].sum(), x)
    assert unused.tolist() == [2, 2]
    assert needs == [(True, False, True), (True, False, False)]


def test_opcheck():
    x, y = torch.ones(2, requires_grad=True), torch.ones(3)
    torch.library.opcheck(define_scaled([]), ([x, y], torch.tensor(2.0, requires_grad=True), 3.0))
    torch.library.opcheck(define_scaled([]), ([x, y], None, 3.0))
    torch.library.opcheck(define_doubling(), (torch.zeros(2), [torch.zeros(2)], torch.ones(2)))
    torch.library.opcheck(define_doubling(), (None, [], torch.ones(2)))


def test_no_node_where_no_gradient_is_needed():
    scaled = define_scaled([])
    x = torch.ones(2, requires_grad=True)
    assert scaled([x], None, 1.0)[0].grad_fn is not None
    assert scaled([x.detach()], None, 1.0)[0].grad_fn is None
    with torch.no_grad():
        assert scaled([x], None, 1.0)[0].grad_fn is None
    with torch.inference_mode():
        assert scaled([x], None, 1.0)[0].is_inference()


@pytest.mark.parametrize("in_list", [False, True])
def test_a_write_to_what_the_backward_reads_is_noticed(in_list):
    kept, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    product = weight * kept
    define_doubling()(None if in_list else kept, [kept] if in_list else [], torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_what_comes_between_autograd_and_the_kernel_is_not_passed_over():
    scaled = define_scaled([])
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, negative = torch.ones(2), torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag
    assert negative.is_neg()
    with Watch():
        assert scaled([x], None, 2.0)[0].tolist() == [2, 2]
    assert seen[0] is scaled
    assert scaled([negative], None, 2.0)[0].tolist() == [-2, -2]


def test_writes_in_inference_mode():
    with torch.inference_mode():
        out = torch.zeros(2)
        define_doubling()(out, [], torch.ones(2))
        assert out.tolist() == [2, 2]


def test_fake_tensors_have_the_fake_run():
    with FakeTensorMode():
        assert define_scaled([])([torch.empty(2, 3)], None, 1.0)[0].shape == (2, 3)
    assert define_scaled([])([torch.empty(2, 3, device="meta")], None, 1.0)[0].is_meta


def test_one_graph():
    double, scaled = define_doubling(), define_scaled([])

    def function(x):
        out = torch.zeros(2)
        double(out, [], x)
        return scaled([x], out, 3.0)[0]

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    result = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert result.tolist() == [6, 24]
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad.tolist() == [6, 12]


@pytest.mark.parametrize("differentiable", [False, True])
def test_the_compiler_does_not_look_inside(differentiable):
    compiling = []

    def kernel(x):
        compiling.append(torch.compiler.is_compiling())
        return x.clone()

    opaque = operator.define(
        "opaque",
        "(Tensor x) -> Tensor",
        kernel,
        fake=torch.empty_like,
        differentiate=(lambda ctx, grad: [grad]) if differentiable else None,
    )

    def given_up(x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = opaque(x)
        return x

    for needed in {False, differentiable}:
        x = torch.ones(1, requires_grad=needed)
        y = torch.compile(given_up, backend="eager")(x)
        assert y.tolist() == [1]
        assert y.requires_grad == needed
        assert compiling == [False, False]
        compiling.clear()


def test_a_definition_replaces_the_one_before():
    x = torch.ones(1)
    for factor in (2.0, 3.0):
        again = operator.define(
            "again", "(Tensor x) -> Tensor", lambda x, factor=factor: factor * x, fake=torch.empty_like
        )
        assert again(x).item() == factor
        assert torch.ops.anabranch_planted.again(x).item() == factor


def test_a_module_can_be_imported_anew():
    """In a process of its own: others hold the operators that this replaces."""
    code = """
import importlib, torch, anabranch
from anabranch.ops.permute import autograd as permute
layout = anabranch.ExpertLayout.from_topk(torch.tensor([[1], [0]]), 2)
x = torch.tensor([[1.0], [2.0]], requires_grad=True)
importlib.reload(permute)
rows = anabranch.permute(x, layout)
(grad,) = torch.autograd.grad(rows[0].sum(), x)
print(rows.tolist(), grad.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[[2.0], [1.0]] [[0.0], [1.0]]\n"


def define_counted(gradient=True):
    """``2 * x``, called directly, and a list of the tensors that its kernel got."""
    seen = []

    def save(ctx, args, results):
        ctx.save_for_backward(*args)

    scaled = operator.define(
        "counted",
        "(Tensor x) -> Tensor",
        lambda x: seen.append(x) or 2 * x,
        fake=torch.empty_like,
        save=save,
        differentiate=(lambda ctx, grad: [2 * grad.expand_as(*ctx.saved_tensors)]) if gradient else None,
    )
    return operator.direct(scaled), scaled, seen


@pytest.fixture
def through(monkeypatch):
    """How often the dispatcher was asked by a direct call."""
    from torch._ops import OpOverload

    found, original = [], OpOverload.__call__
    monkeypatch.setattr(
        OpOverload, "__call__", lambda self, /, *args, **kw: found.append(self) or original(self, *args, **kw)
    )
    return found


@pytest.mark.parametrize("gradient", [True, False])
def test_plain_calls_go_past_the_dispatcher(gradient, through):
    call, scaled, seen = define_counted(gradient)
    x = torch.tensor([1.0, 2.0])
    assert call(x).tolist() == [2, 4]
    assert call(torch.nn.Parameter(x, requires_grad=False)).tolist() == [2, 4]
    assert through.count(scaled) == 0
    assert len(seen) == 2


def test_a_direct_call_has_the_gradient_of_the_operator(through):
    call, scaled, _ = define_counted()
    x = torch.ones(2, requires_grad=True)
    y = call(x)
    assert type(y.grad_fn) is type(scaled(x).grad_fn)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2]
    with torch.no_grad():
        assert call(x).grad_fn is None
    y = call(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert through.count(scaled) == 1


class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def profile_of_all_threads():
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, acc_events=True, experimental_config=every)


@pytest.mark.parametrize(
    "inside",
    [
        Functions,
        Operators,
        FakeTensorMode,
        torch.inference_mode,
        torch.autograd.profiler.profile,
        profile_of_all_threads,
        lambda: torch._C._AutoDispatchBelowAutograd(),
    ],
    ids=["functions", "operators", "fake", "inference", "profiler", "all threads", "below autograd"],
)
def test_whoever_sees_calls_sees_direct_ones(inside, through):
    call, scaled, _ = define_counted()
    with inside():
        call(torch.ones(2))
    assert scaled in through


def test_tensors_that_are_more_than_their_memory_are_dispatched(through):
    call, scaled, seen = define_counted()
    negative = torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag
    with torch.inference_mode():
        inference = torch.ones(2)
    special = [negative, torch.ones(2).as_subclass(Sub), inference, torch.ones(2, device="meta")]
    for value in special:
        call(value)
    assert through.count(scaled) >= len(special)
    assert call(negative).tolist() == [-2, -2]
    assert not seen[0].is_neg()
    assert torch.func.vmap(call)(torch.ones(3, 2)).tolist() == [[2, 2]] * 3


def test_a_direct_call_is_traced_as_the_operator():
    call, scaled, _ = define_counted()
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    x = torch.ones(2)
    assert torch.compile(call, backend=backend, fullgraph=True)(x).tolist() == [2, 2]
    traced = torch.fx.experimental.proxy_tensor.make_fx(call)(x)
    assert scaled in graphs[0]
    assert scaled in {node.target for node in traced.graph.nodes}
