"""What an epilogue is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, TypeVar

from torch import Tensor

from anabranch.errors import ArgumentError, ArgumentTypeError

REGISTRY: dict[str, type[Epilogue]] = {}
PARAMETERS: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Epilogue:
    """A small pure function of the accumulator, applied before the one rounding.

    A subclass is a frozen dataclass: its class attributes declare what it takes, its fields are its parameters
    (floats), and it is found by ``name`` once :func:`register` has seen it. All arithmetic is in the
    dtype of the operands, which are fp32, or fp64 for fp64 inputs.
    """

    name: ClassVar[str]
    columns: ClassVar[int] = 1
    """Columns of the accumulator consumed per output column: 2 for a gated epilogue (gate, then up)."""

    def forward(self, *z: Tensor) -> Tensor:
        """The output, of the shape of each of the ``columns`` operands."""
        raise NotImplementedError

    def backward(self, grad: Tensor, *z: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, from the output's gradient and the pre-activation."""
        raise NotImplementedError

    @property
    def device_code(self) -> str:
        """Name of the module with this epilogue's functions for Triton kernels, imported when one is built."""
        return f"anabranch.epilogues.device.{self.name}"

    @property
    def spec(self) -> str:
        """The text that :func:`resolve` and :func:`from_spec` read back: ``name`` or ``name(field=value,...)``."""
        given = ",".join(f"{p}={float(getattr(self, p))!r}" for p in PARAMETERS[self.name])
        return f"{self.name}({given})" if given else self.name


def _number(epilogue: Epilogue, parameter: str) -> float:
    value = getattr(epilogue, parameter)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(epilogue.name, parameter, expected="a number", got=type(value).__name__)
    return value


def positive(epilogue: Epilogue, parameter: str) -> None:
    """Demands that a parameter is a number above 0 (NaN is not)."""
    value = _number(epilogue, parameter)
    if not value > 0:
        raise ArgumentError(epilogue.name, parameter, expected="a number above 0", got=value)


class Gated(Epilogue):
    """``inner(gate) * up``, for an epilogue ``inner`` of one column."""

    columns: ClassVar[int] = 2
    inner: ClassVar[Epilogue]

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        return self.inner.forward(gate) * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (*self.inner.backward(grad * up, gate), grad * self.inner.forward(gate))


Class = TypeVar("Class", bound=type[Epilogue])


def register(cls: Class) -> Class:
    """Class decorator: makes an epilogue known by its name."""
    if cls.name in REGISTRY:
        raise ArgumentError("register", "name", expected="a name not taken", got=repr(cls.name))
    REGISTRY[cls.name] = cls
    PARAMETERS[cls.name] = tuple(f.name for f in fields(cls))
    return cls


def resolve(op: str, activation: str | Epilogue | None) -> Epilogue:
    """The epilogue a caller means: None is identity, a string a name or a spec, a value itself."""
    if activation is None:
        return REGISTRY["identity"]()
    if isinstance(activation, Epilogue):
        # Operators know an epilogue by its name, so another of that name would run in its place.
        if REGISTRY.get(getattr(activation, "name", "")) is not type(activation):
            got = f"a {type(activation).__name__}"
            raise ArgumentError(op, "activation", expected="an epilogue that was registered", got=got)
        for parameter in PARAMETERS[activation.name]:
            _number(activation, parameter)
        return activation
    if not isinstance(activation, str):
        got = type(activation).__name__
        if callable(activation) and hasattr(activation, "__name__"):
            got = f"{'class' if isinstance(activation, type) else 'function'} {activation.__name__}"
        expected = f"an Epilogue, None or one of {_known()}"
        raise ArgumentTypeError(op, "activation", expected=expected, got=got)
    name, opened, rest = activation.partition("(")
    if name not in REGISTRY or (opened and not rest.endswith(")")):
        raise ArgumentError(op, "activation", expected=f"one of {_known()}", got=repr(activation))
    given: dict[str, float] = {}
    for part in rest[:-1].split(",") if rest[:-1] else ():
        parameter, _, value = part.strip().partition("=")
        if parameter not in PARAMETERS[name] or parameter in given:
            takes = ", ".join(PARAMETERS[name]) or "no parameter"
            raise ArgumentError(op, "activation", expected=f"{name} with {takes}", got=repr(activation))
        try:
            given[parameter] = float(value)
        except ValueError:
            raise ArgumentError(
                op, "activation", expected=f"a number for {name}'s {parameter}", got=repr(value)
            ) from None
    return REGISTRY[name](**given)


def _known() -> str:
    return ", ".join(sorted(REGISTRY))


@cache
def from_spec(spec: str) -> Epilogue:
    """The epilogue that :attr:`Epilogue.spec` stands for, in an operator: torch.compile traces no cache."""
    return resolve("from_spec", spec)
