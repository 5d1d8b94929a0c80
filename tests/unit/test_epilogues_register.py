"""What register asks of an epilogue, and what it says where that is missing."""

import textwrap
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch import ExpertLayout, epilogues, grouped_gemm
from anabranch.epilogues import Epilogue, Gated, Silu, base, register
from anabranch.epilogues._definition import check
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.testing import randn

frozen = dataclass(frozen=True)
VALUE, TYPE = ArgumentError, ArgumentTypeError


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))
    monkeypatch.setattr(base, "PARAMETERS", dict(base.PARAMETERS))
    yield
    epilogues.from_spec.cache_clear()


def scaled_square(self, z):
    return self.slope * z**2


def right(self, grad, z):
    return (2 * self.slope * grad * z,)


def made(wrap=frozen, bases=(Epilogue,), slope: object = 1.5, kind: object = float, **members):
    """A right epilogue, ``slope * z**2``, but for what is given; a member that is None is left out."""
    given = dict(
        __annotations__={"slope": kind}, slope=slope, name="made", forward=scaled_square, backward=right
    )
    return wrap(type("Made", bases, {k: v for k, v in {**given, **members}.items() if v is not None}))


def refused(error, cls):
    with pytest.raises(error) as raised:
        register(cls)
    assert "made" not in base.REGISTRY
    assert type(raised.value) is error
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(base.REGISTRY))
def test_ours_pass(name):
    check(base.REGISTRY[name])


def test_a_right_one_passes():
    cls = made()
    assert register(cls) is cls
    assert epilogues.resolve("test", "made(slope=2)") == cls(slope=2.0)
    register(made(name="without", kind="float", __annotations__={}, slope=None, forward=None, bases=(Silu,),
                  backward=None, wrap=lambda cls: cls))  # fmt: skip
    register(made(name="behind", bases=(Gated,), forward=None, backward=None, inner=Silu(), slope=1.0))


def plain(cls):
    return cls


def of(*values):
    return lambda *_: values[0] if len(values) == 1 else values


ONE = torch.ones(2, 4, dtype=torch.float64)

DECLARED = {
    "no class": (lambda: Silu(), TYPE, "cls: expected a class, got a Silu"),
    "another class": (lambda: torch.nn.SiLU, TYPE, "cls: expected a subclass of Epilogue, got class SiLU"),
    "the base": (lambda: Epilogue, TYPE, "cls: expected a subclass of Epilogue, got class Epilogue"),
    "no dataclass": (
        lambda: made(plain),
        TYPE,
        "cls: expected a frozen dataclass, so @dataclass(frozen=True) under @register and above the class, "
        "got class Made without it, whose slope would be no parameter",
    ),
    "no name": (lambda: made(name=None), VALUE, 'name: expected name = "..." in class Made, got none'),
    "name's type": (lambda: made(name=3), TYPE, "name: expected a string, got int"),
    "name's letters": (
        lambda: made(name="my-act"),
        VALUE,
        "name: expected letters, digits and underscores, no digit first, got 'my-act'",
    ),
    "name is a field": (
        lambda: made(__annotations__={"name": str}),
        TYPE,
        "name: expected a class attribute, not a parameter: leave its annotation out, "
        "got a field of the dataclass Made",
    ),
    "columns is a field": (
        lambda: made(__annotations__={"columns": int}, columns=1),
        TYPE,
        "columns: expected a class attribute, not a parameter: leave its annotation out, "
        "got a field of the dataclass Made",
    ),
    "name is taken": (
        lambda: made(name="silu"),
        VALUE,
        "name: expected a name not taken, got 'silu', which is anabranch.epilogues.silu.Silu",
    ),
    "name is inherited": (
        lambda: type("Mine", (Silu,), {}),
        VALUE,
        "name: expected a name not taken, got 'silu', which is anabranch.epilogues.silu.Silu",
    ),
    "columns": (lambda: made(columns=3), VALUE, "columns: expected 1, or 2 for (gate, up), got 3"),
    "columns' type": (
        lambda: made(columns=True),
        VALUE,
        "columns: expected 1, or 2 for (gate, up), got True",
    ),
    "no default": (
        lambda: made(slope=None),
        VALUE,
        "slope: expected a default, with which activation='made' makes a Made, got none",
    ),
    "default_factory": (
        lambda: made(slope=field(default_factory=float)),
        VALUE,
        "slope: expected a default, with which activation='made' makes a Made, got a default_factory",
    ),
    "no init": (
        lambda: made(slope=field(default=1.0, init=False)),
        VALUE,
        "slope: expected a parameter that the constructor takes, got field(init=False)",
    ),
    "default's type": (lambda: made(slope="1"), TYPE, "slope: expected a number as its default, got str"),
    "a bool": (lambda: made(slope=True), TYPE, "slope: expected a number as its default, got bool"),
    "an int": (
        lambda: made(kind=int, slope=1),
        TYPE,
        "slope: expected a float, as Made's parameters travel through operators as text, got int",
    ),
    "a tensor": (
        lambda: made(kind="torch.Tensor"),
        TYPE,
        "slope: expected a float, as Made's parameters travel through operators as text, got torch.Tensor",
    ),
    "no forward": (lambda: made(forward=None), VALUE, "forward: expected a method of class Made, got none"),
    "no backward": (
        lambda: made(backward=None),
        VALUE,
        "backward: expected a method of class Made, got none",
    ),
    "no inner": (
        lambda: made(bases=(Gated,), forward=None, backward=None),
        TYPE,
        "inner: expected the epilogue of one column that is behind the gate, as in inner = Silu(), got None",
    ),
    "inner is a class": (
        lambda: made(bases=(Gated,), forward=None, backward=None, inner=Silu),
        TYPE,
        "inner: expected the epilogue of one column that is behind the gate, as in inner = Silu(), "
        "got class Silu",
    ),
}


@pytest.mark.parametrize("key", DECLARED)
def test_declared(key):
    make, error, message = DECLARED[key]
    assert refused(error, make()) == f"register: {message}"


def test_class_variables_are_no_parameters():
    kinds = {"half": ClassVar[float], "third": "ClassVar[float]", "name": str}
    register(made(plain, __annotations__=kinds, slope=2.0))


def raises(*_, **__):
    raise KeyError("missing")


def written(self, z):
    return z.mul_(2)


RUN = {
    "the constructor": (
        lambda: made(__post_init__=raises),
        VALUE,
        "cls: expected Made() to work, with the defaults alone, got KeyError: 'missing'",
    ),
    "forward": (
        lambda: made(forward=raises),
        VALUE,
        "forward: expected forward(z) to run on fp64 CPU tensors, got KeyError: 'missing'",
    ),
    "forward's arguments": (
        lambda: made(forward=lambda self: 0, columns=2),
        VALUE,
        "forward: expected forward(gate, up) to run on fp64 CPU tensors, got TypeError: ",
    ),
    "backward": (
        lambda: made(backward=raises),
        VALUE,
        "backward: expected backward(grad, z) to run on fp64 CPU tensors, got KeyError: 'missing'",
    ),
    "forward writes": (
        lambda: made(forward=written),
        VALUE,
        "forward: expected operands left as they are, got some that it wrote to",
    ),
    "backward writes": (
        lambda: made(backward=lambda self, grad, z: (grad.mul_(z),)),
        VALUE,
        "backward: expected operands left as they are, got some that it wrote to",
    ),
    "no tensor": (lambda: made(forward=lambda self, z: 1.0), TYPE, "forward: expected a tensor, got a float"),
    "forward's shape": (
        lambda: made(forward=lambda self, z: z.sum()),
        VALUE,
        "forward: expected the shape of each operand, here (2, 4), got ()",
    ),
    "forward's dtype": (
        lambda: made(forward=lambda self, z: z.float()),
        TYPE,
        "forward: expected the dtype and device of each operand, here float64 on the CPU, got float32 on cpu",
    ),
    "softmax": (
        lambda: made(forward=lambda self, z: z.softmax(-1)),
        VALUE,
        "forward: expected each element to depend on its own operands alone, "
        "got other values when there are fewer elements",
    ),
    "no tuple": (
        lambda: made(backward=of(ONE)),
        TYPE,
        "backward: expected a tuple of 1 gradient, as in return (d_z,), got a Tensor",
    ),
    "too many": (
        lambda: made(backward=of(ONE, ONE)),
        TYPE,
        "backward: expected a tuple of 1 gradient, as in return (d_z,), got 2 of them",
    ),
    "too few": (
        lambda: made(columns=2, forward=lambda self, g, u: g * u, backward=lambda self, d, g, u: (d * u,)),
        TYPE,
        "backward: expected a tuple of 2 gradients: of gate, of up, got 1 of them",
    ),
    "None": (
        lambda: made(columns=2, forward=lambda self, g, u: g, backward=lambda self, d, g, u: (d, None)),
        TYPE,
        "backward: expected a tensor, got a NoneType",
    ),
    "backward's shape": (
        lambda: made(backward=lambda self, grad, z: (z.new_ones(1),)),
        VALUE,
        "backward: expected the shape of each operand for its gradient, here (2, 4), got (1,)",
    ),
    "not the derivative": (
        lambda: made(backward=lambda self, grad, z: (self.slope * grad * z,)),
        VALUE,
        "backward: expected the derivative of forward by z, -13.23 at z = -6.3, grad = 0.7 of Made(slope=1.5), "
        "got -6.615, which differs by 6.6",
    ),
    "grad is left out": (
        lambda: made(backward=lambda self, grad, z: (2 * self.slope * z,)),
        VALUE,
        "backward: expected the derivative of forward by z, -13.23 at z = -6.3, grad = 0.7 of Made(slope=1.5), "
        "got -18.9, which differs by 5.67",
    ),
    "a factor that the default hides": (
        lambda: made(slope=1.0, backward=lambda self, grad, z: (2 * grad * z,)),
        VALUE,
        "backward: expected the derivative of forward by z, -6.615 at z = -6.3, grad = 0.7 of Made(slope=0.75), "
        "got -8.82, which differs by 2.2",
    ),
    "gate and up exchanged": (
        lambda: made(
            columns=2, forward=lambda self, g, u: g * u, backward=lambda self, d, g, u: (d * g, d * u)
        ),
        VALUE,
        "backward: expected the derivative of forward by gate, 1.19 at gate = -6.3, up = 1.7, grad = 0.7 "
        "of Made(slope=1.5), got -4.41, which differs by 5.6",
    ),
    "NaN": (
        lambda: made(backward=lambda self, grad, z: (grad * torch.nan,)),
        VALUE,
        "backward: expected the derivative of forward by z, -13.23 at z = -6.3, grad = 0.7 of Made(slope=1.5), "
        "got nan, which differs by nan",
    ),
    "detached, and wrong": (
        lambda: made(forward=lambda self, z: z.detach() ** 2, backward=lambda self, grad, z: (grad * z,)),
        VALUE,
        "backward: expected the derivative of forward by z, -8.82 at z = -6.3, grad = 0.7 of Made(slope=1.5), "
        "got -4.41, which differs by 4.41",
    ),
}


@pytest.mark.parametrize("key", RUN)
def test_run(key):
    make, error, message = RUN[key]
    found = refused(error, make())
    assert found.startswith(f"register: {message}")  # which Python's wording, or a last digit, may follow


def test_a_millionth_is_found():
    off = made(backward=lambda self, grad, z: (2 * self.slope * grad * z * (1 + 1e-5),))
    assert refused(ArgumentError, off).startswith(
        "register: backward: expected the derivative of forward by z, "
    )
    register(made(backward=lambda self, grad, z: (2 * self.slope * grad * z * (1 + 1e-8),)))


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (lambda self, z: z.log(), lambda self, grad, z: (grad / z,)),  # of half the numbers
        (lambda self, z: (z.float() ** 2).double(), lambda self, grad, z: (2 * z * grad,)),
        (lambda self, z: (z - 0.37).relu(), lambda self, grad, z: (grad * (z > 0.37),)),  # kink at a sample
        (lambda self, z: torch.ones_like(z), lambda self, grad, z: (grad * 0,)),
        (lambda self, z: z, lambda self, grad, z: (grad,)),
        (lambda self, z: z + torch.tensor([1.0]), lambda self, grad, z: (grad,)),  # a tensor of its own
    ],
    ids=["log", "fp32 inside", "kink", "constant", "identity", "own tensor"],
)
@pytest.mark.parametrize("under", ["nothing", "fake", "meta", "no grad", "inference", "autocast"])
def test_right_ones(forward, backward, under):
    around = {
        "nothing": torch.enable_grad,
        "fake": FakeTensorMode,
        "meta": lambda: torch.device("meta"),
        "no grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu"),
    }[under]
    with around():
        register(made(forward=forward, backward=backward))
        wrong = made(forward=lambda self, z: 2 * forward(self, z) + z, backward=backward, name="wrong")
        with pytest.raises(ArgumentError, match="backward: expected the derivative of forward"):
            register(wrong)


def test_a_right_one_needs_no_autograd(monkeypatch):
    """Its engine, once started where there is a GPU, keeps a process from forking."""
    monkeypatch.setattr(torch.autograd, "grad", raises)
    register(made())
    with pytest.raises(KeyError):
        register(made(backward=lambda self, grad, z: (grad,)))


def test_parameters_that_allow_no_other_value():
    def only(self):
        if self.slope != 1.5:
            raise ValueError

    register(made(__post_init__=only))


def test_a_cell_that_runs_again_replaces():
    layout = ExpertLayout.from_topk(torch.tensor([[0]]), 1)
    x, weight = torch.full((1, 1), 3.0), torch.ones(1, 1, 1)
    first = register(made())
    assert grouped_gemm(x, weight, layout, activation="made").item() == 13.5
    second = register(made(forward=lambda self, z: 2 * z, backward=lambda self, grad, z: (2 * grad,)))
    assert second is not first
    assert grouped_gemm(x, weight, layout, activation="made").item() == 6
    assert grouped_gemm(x, weight, layout, activation=second()).item() == 6
    with pytest.raises(ArgumentError) as raised:
        grouped_gemm(x, weight, layout, activation=first())
    assert str(raised.value) == (
        "grouped_gemm: activation: expected an epilogue whose class is decorated with "
        "@anabranch.epilogues.register, got a Made made before its class was registered again"
    )
    other = made(__qualname__="Other")
    with pytest.raises(
        ArgumentError, match=f"name: expected a name not taken, got 'made', which is {__name__}.Made"
    ):
        register(other)
    assert base.REGISTRY["made"] is second


def test_the_docstrings_example_works():
    text = register.__doc__.partition("::\n\n")[2].partition("\n\n    From then on")[0]
    namespace = {"__name__": "example"}
    exec(textwrap.dedent(text), namespace)
    assert base.REGISTRY["sigmoid_gate"] is namespace["SigmoidGate"]
    layout = ExpertLayout.from_topk(torch.tensor([[0], [0]]), 1)
    x, weight = randn(2, 3), randn(1, 4, 3)
    gate, up = (x @ weight[0].T).chunk(2, dim=1)
    for activation in ("sigmoid_gate(slope=2.0)", namespace["SigmoidGate"](slope=2.0)):
        out = grouped_gemm(x, weight, layout, activation=activation)
        torch.testing.assert_close(out, torch.sigmoid(2 * gate) * up)
