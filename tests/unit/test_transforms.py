"""Derivatives by other ways than backward: right, or refused; never zero without a word."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from anabranch import (
    ExpertLayout,
    UnsupportedError,
    grouped_gemm,
    moe_mlp,
    mrope,
    multi_gemm,
    permute,
    rope,
    topk_router,
    unpermute,
)

# What torch loads for forward-mode derivatives is a script still.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

T, H, E, K = 5, 4, 3, 2
IDS = torch.tensor([[0, 1], [2, 2], [1, -1], [0, 2], [7, 1]])
LAYOUT = ExpertLayout.from_topk(IDS, E)
GENERATOR = torch.Generator().manual_seed(0)
GATE_UP, DOWN = torch.randn(E, 6, H, generator=GENERATOR), torch.randn(E, H, 3, generator=GENERATOR)
TABLE = torch.randn(T, H, generator=GENERATOR)
X, ROWS = torch.randn(T, H, generator=GENERATOR), torch.randn(T * K, H, generator=GENERATOR)
WEIGHTS = torch.rand(T, K, generator=GENERATOR)

CALLS = {
    "moe_mlp": (lambda x, **b: moe_mlp(x, GATE_UP, DOWN, IDS, WEIGHTS, **b), X),
    "grouped_gemm": (lambda x, **b: grouped_gemm(x, GATE_UP, LAYOUT, activation="silu", **b), ROWS),
    "permute": (lambda x, **b: permute(x, LAYOUT, **b), X),
    "unpermute": (lambda x, **b: unpermute(x, LAYOUT, WEIGHTS, **b), ROWS),
    "multi_gemm": (lambda x, **b: multi_gemm([x], [GATE_UP[0]], **b)[0], X),
    "topk_router": (lambda x, **b: topk_router(x, 2, **b)[0], X),
    "rope": (lambda x, **b: rope(x[None, None], None, TABLE, TABLE, **b)[0], X),
    "mrope": (
        lambda x, **b: mrope(x[None, None], None, *[TABLE.expand(3, 1, T, H)] * 2, [1, 1, 0], **b)[0],
        X,
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_forward_mode_is_refused(op):
    run, x = CALLS[op]
    expected = f'{op}: tangent: expected none (backend="reference" has forward-mode derivatives), got one of '
    with forward_ad.dual_level(), pytest.raises(UnsupportedError) as error:
        run(forward_ad.make_dual(x, x))
    assert str(error.value) == expected + "forward-mode automatic differentiation"
    with pytest.raises(UnsupportedError):
        jvp(run, (x,), (x,))


@pytest.mark.parametrize("op", CALLS)
def test_the_reference_has_forward_mode(op):
    run, x = CALLS[op]
    _, tangent = jvp(lambda x: run(x, backend="reference"), (x,), (x,))
    step = 1e-3
    rise = run(x + step * x, backend="reference") - run(x - step * x, backend="reference")
    assert tangent.abs().max() > 0
    # Central differences in fp32 are good for a look at the size and the sign.
    assert (tangent - rise / (2 * step)).abs().max() < 0.02 * tangent.abs().max()


VMAPPED = {name: CALLS[name] for name in ("moe_mlp", "grouped_gemm", "permute", "topk_router", "rope")}
VMAPPED["moe_mlp of inputs"] = (lambda x: moe_mlp(x, GATE_UP, DOWN, IDS, WEIGHTS, save="inputs"), X)


@pytest.mark.parametrize("op", CALLS)
def test_gradients_by_torch_func_are_refused(op):
    run, x = CALLS[op]
    name = "rope" if op == "mrope" else op
    with pytest.raises(UnsupportedError, match=rf"^{name}: torch.func: expected torch.autograd.grad "):
        grad(lambda x: run(x).square().sum())(x)
    found = grad(lambda x: run(x, backend="reference").square().sum())(x)
    x = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(x).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_vmap_over_lists_is_refused():
    run, x = CALLS["multi_gemm"]
    batch = torch.stack([x, -x])
    with pytest.raises(
        UnsupportedError, match=r"^multi_gemm: torch.func.vmap: expected tensors that are not"
    ):
        vmap(run)(batch)
    found = vmap(lambda x: run(x, backend="reference"))(batch)
    torch.testing.assert_close(found, torch.stack([run(x) for x in batch]))


@pytest.mark.parametrize("op", VMAPPED)
def test_gradient_through_vmap(op):
    """The forward cannot see there that a gradient is needed, and keeps nothing for it."""
    run, x = VMAPPED[op]
    batch = torch.stack([x, -x, 2 * x]).requires_grad_()
    found = vmap(run)(batch)
    (gradient,) = torch.autograd.grad(found.square().sum(), batch)
    one_by_one = torch.stack([run(x) for x in batch])
    (expected,) = torch.autograd.grad(one_by_one.square().sum(), batch)
    torch.testing.assert_close(found, one_by_one)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    "ids", [torch.zeros(0, K, dtype=torch.int64), torch.full((T, K), -1)], ids=["T 0", "dropped"]
)
def test_gradients_of_the_reference_where_no_expert_works(ids):
    inputs = [X[: len(ids)], GATE_UP, DOWN, WEIGHTS[: len(ids)]]
    inputs = [value.clone().requires_grad_() for value in inputs]
    x, gate_up, down, weights = inputs
    out = moe_mlp(x, gate_up, down, ids, weights, backend="reference")
    assert out.shape == x.shape
    assert not out.any()
    for value, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.shape == value.shape
        assert not gradient.any()


def test_export_of_any_number_of_tokens():
    """The limit of int32 is the operator's to check: in a graph it would narrow the range of T."""

    class Layer(torch.nn.Module):
        def forward(self, x, ids, weights):
            return moe_mlp(x, GATE_UP, DOWN, ids, weights)

    tokens = torch.export.Dim("T")
    shapes = {"x": {0: tokens}, "ids": {0: tokens}, "weights": {0: tokens}}
    exported = torch.export.export(Layer(), (X, IDS, WEIGHTS), dynamic_shapes=shapes).module()
    more = X.repeat(3, 1), IDS.repeat(3, 1), WEIGHTS.repeat(3, 1)
    torch.testing.assert_close(exported(*more), Layer()(*more))


@pytest.mark.parametrize("op", CALLS)
def test_a_trace_without_mutation_may_have_symbols_for_sizes(op):
    """Which no call remembers: they cannot be compared without being decided."""
    run, x = CALLS[op]
    traced = make_fx(functionalize(run), tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert any(str(node.target).startswith("anabranch.") for node in traced.graph.nodes)
