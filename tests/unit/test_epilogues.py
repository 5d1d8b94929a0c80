"""Every epilogue is its textbook formula, with its gradient, and can be named, parametrized and added to."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from anabranch import ExpertLayout, epilogues, grouped_gemm
from anabranch.epilogues import base
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.testing import assert_component_wise, randn
from anabranch.testing.problems import FORMULAS, majorant

NAMES = sorted(base.REGISTRY)


def operands(name: str, dtype: torch.dtype = torch.float64, size: float = 2.0) -> list[torch.Tensor]:
    return [
        randn(40, 50, dtype=dtype, scale=size).requires_grad_() for _ in range(base.REGISTRY[name].columns)
    ]


def test_every_file_is_registered_and_exported():
    files = {path.stem for path in Path(epilogues.__file__).parent.glob("[!_]*.py")} - {"base"}
    assert files == set(NAMES), "imported in epilogues/__init__.py?"
    for cls in base.REGISTRY.values():
        assert getattr(epilogues, cls.__name__) is cls
        assert cls.__name__ in epilogues.__all__


def test_every_one_has_its_textbook_formula():
    assert set(FORMULAS) - {None} == set(NAMES)
    for name in NAMES:
        assert FORMULAS[name].__code__.co_argcount == base.REGISTRY[name].columns


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.01, 2.0, 20.0])
@pytest.mark.parametrize("name", NAMES)
def test_maths(name, size, dtype):
    epilogue = epilogues.resolve("test", name)
    z, grad = operands(name, dtype, size), randn(40, 50, dtype=dtype)

    def with_gradient(formula, *values, grad):
        leaves = [v.detach().double().requires_grad_() for v in values]
        out = formula(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]

    expected = with_gradient(FORMULAS[name], *z, grad=grad)
    bounds = with_gradient(majorant(name), *[v.abs() for v in z], grad=grad.abs())
    actual = [epilogue.forward(*z), *epilogue.backward(grad, *z)]
    for key, *values in zip(("out", "first", "second"), actual, expected, bounds, strict=False):
        assert values[0].dtype == dtype
        # PyTorch's vectorized exp is up to 20 units in the last place off, and tanh near 1 loses as much.
        assert_component_wise(*values, length=1, constant=64, name=f"{name} {key}")


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_derivative(name):
    epilogue = epilogues.resolve("test", name)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *z):
            ctx.save_for_backward(*z)
            return epilogue.forward(*z)

        @staticmethod
        def backward(ctx, grad):
            return epilogue.backward(grad, *ctx.saved_tensors)

    # Away from the kinks: relu's at 0, the clamps' at 7.
    z = [v.detach()[:4, :5].abs().clamp(0.1, 6).mul((-1) ** torch.arange(5)) for v in operands(name)]
    assert torch.autograd.gradcheck(Function.apply, [v.requires_grad_() for v in z])


@pytest.mark.parametrize("name", ["gpt_oss", "clamped_swiglu"])
def test_clamps(name):
    epilogue = epilogues.resolve("test", f"{name}(limit=2.0)")
    gate = torch.tensor([-9.0, 1.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    up = torch.tensor([0.5, 0.5, 0.5, 0.5, -2.5, -2.0, 2.0, 2.5], dtype=torch.float64)
    d_gate, d_up = epilogue.backward(torch.ones_like(gate), gate, up)
    assert ((d_gate != 0) == torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)).all()
    assert ((d_up != 0) == torch.tensor([1, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)).all()
    beyond = epilogue.forward(torch.tensor([2.5, 2.0]), torch.tensor([3.0, 2.0]))
    assert beyond[0] == beyond[1] != 0


@pytest.mark.parametrize("name", NAMES)
def test_spec_round_trip(name):
    default = epilogues.resolve("test", name)
    others = [default, type(default)(**dict.fromkeys(base.PARAMETERS[name], 0.1 + 0.2))]
    for epilogue in others:
        assert epilogues.resolve("test", epilogue.spec) == epilogue
        assert epilogues.resolve("test", epilogue) is epilogue
    assert default.spec.startswith(name)


def test_spellings():
    assert epilogues.resolve("test", None) == epilogues.Identity()
    assert epilogues.resolve("test", "silu()") == epilogues.Silu()
    expected = epilogues.GptOss(alpha=1.0, limit=1e30)
    assert epilogues.resolve("test", "gpt_oss( limit=1e30, alpha=1 )") == expected


KNOWN = "test: activation: expected one of " + ", ".join(NAMES)
UNCLOSED = "test: activation: expected {0} or {0}(parameter=number), with its brackets closed"


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        ("Silu", ArgumentError, f"{KNOWN}, got 'Silu'; did you mean 'silu'?"),
        ("SwiGLU", ArgumentError, f"{KNOWN}, got 'SwiGLU'; did you mean 'swiglu'?"),
        ("swigul", ArgumentError, f"{KNOWN}, got 'swigul'; did you mean 'swiglu'?"),
        ("gpt-oss(limit=1)", ArgumentError, f"{KNOWN}, got 'gpt-oss(limit=1)'; did you mean 'gpt_oss'?"),
        ("GeLU_Tanh", ArgumentError, f"{KNOWN}, got 'GeLU_Tanh'; did you mean 'gelu_tanh'?"),
        ("mish", ArgumentError, f"{KNOWN}, got 'mish'"),
        ("", ArgumentError, f"{KNOWN}, got ''"),
        ("silu(", ArgumentError, f"{UNCLOSED.format('silu')}, got 'silu('"),
        ("gpt_oss(limit=1", ArgumentError, f"{UNCLOSED.format('gpt_oss')}, got 'gpt_oss(limit=1'"),
        ("silu(a=1)", ArgumentError, "test: activation: expected silu with no parameter, got 'silu(a=1)'"),
        (
            "gpt_oss(beta=1)",
            ArgumentError,
            "test: activation: expected gpt_oss with alpha, limit, got 'gpt_oss(beta=1)'",
        ),
        (
            "gpt_oss(limit=1,limit=2)",
            ArgumentError,
            "test: activation: expected gpt_oss with alpha, limit, got 'gpt_oss(limit=1,limit=2)'",
        ),
        (
            "gpt_oss(limit=x)",
            ArgumentError,
            "test: activation: expected a number for gpt_oss's limit, got 'x'",
        ),
        ("gpt_oss(limit)", ArgumentError, "test: activation: expected a number for gpt_oss's limit, got ''"),
        (
            "gpt_oss(limit=-1)",
            ArgumentError,
            "test: activation: expected parameters that gpt_oss can have, got 'gpt_oss(limit=-1)' "
            "(gpt_oss: limit: expected a finite number above 0, got -1.0)",
        ),
        (
            epilogues.Silu,
            ArgumentTypeError,
            f"{KNOWN.replace('one of', 'an Epilogue, None or one of')}, got class Silu; call it: Silu()",
        ),
        (
            torch.relu,
            ArgumentTypeError,
            f"{KNOWN.replace('one of', 'an Epilogue, None or one of')}, got function relu",
        ),
    ],
)
def test_bad_activations(activation, error, message):
    with pytest.raises(error) as raised:
        epilogues.resolve("test", activation)
    assert str(raised.value) == message


@dataclass(frozen=True)
class Cubed(epilogues.Epilogue):
    """``slope * z**3``."""

    name = "cubed_by_a_test"
    slope: float = 1.0

    def forward(self, z):
        return self.slope * z**3

    def backward(self, grad, z):
        return (3 * self.slope * grad * z**2,)


@pytest.fixture
def cubed(monkeypatch):
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))
    monkeypatch.setattr(base, "PARAMETERS", dict(base.PARAMETERS))
    return epilogues.register(Cubed)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_users_own_epilogue(cubed, compiled):
    function = torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager") if compiled else grouped_gemm
    layout = ExpertLayout.from_topk(torch.tensor([[0], [1], [0]]), 2)
    x, weight = (randn(*s, dtype=torch.float64).requires_grad_() for s in ((3, 5), (2, 4, 5)))
    for activation, slope in ((cubed.name, 1.0), (cubed(slope=0.5), 0.5)):
        out = function(x, weight, layout, activation=activation)
        expected = slope * torch.stack([weight[e] @ x[i] for i, e in enumerate((0, 0, 1))]) ** 3
        torch.testing.assert_close(out, expected)
        actual = torch.autograd.grad(out.sum(), (x, weight))
        torch.testing.assert_close(actual, torch.autograd.grad(expected.sum(), (x, weight)))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_parameters_are_finite(value):
    for make, parameter, above in (
        (lambda: epilogues.GptOss(alpha=value), "gpt_oss: alpha", ""),
        (lambda: epilogues.GptOss(limit=value), "gpt_oss: limit", " above 0"),
        (lambda: epilogues.ClampedSwiglu(limit=value), "clamped_swiglu: limit", " above 0"),
    ):
        with pytest.raises(ArgumentError) as raised:
            make()
        assert str(raised.value) == f"{parameter}: expected a finite number{above}, got {value}"


def test_the_module_lists_the_names():
    for name in NAMES:
        assert f"\n    {name} " in epilogues.__doc__
