"""What an epilogue is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from anabranch.errors import ArgumentError, ArgumentTypeError

REGISTRY: dict[str, type[Epilogue]] = {}
PARAMETERS: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Epilogue:
    """A small pure function of the accumulator, element by element, applied before the one rounding.

    A subclass is a frozen dataclass under :func:`register`, whose example is a whole one. It declares:

    - ``name``, a class attribute: what ``activation=`` takes, letters, digits and underscores;
    - ``columns``, a class attribute: 1, the default, or 2 behind a gate, where the output is half as wide as the
      accumulator and the operands are (gate, up);
    - its parameters, as fields annotated ``float``, each with a default;
    - ``forward(self, z)`` or ``forward(self, gate, up)``: the output, in operations that autograd differentiates
      too, as ``backend="reference"`` does;
    - ``backward(self, grad, z)`` or ``backward(self, grad, gate, up)``: a tuple of the gradient of each operand, from
      the output's gradient and the operands.

    Operands, the result and gradients have one shape and dtype: fp32, or fp64 for fp64 inputs. Neither function may
    write to what it is given. :class:`Gated` has both for ``inner(gate) * up``.

    The eager backend and the reference need no more. Triton and Hopper need the two functions as device code, in the
    module that :attr:`device_code` names. Without it they leave the call to the next backend that can serve it, and
    refuse one that asks for them by name; :func:`anabranch.explain` says so.
    """

    name: ClassVar[str]
    columns: ClassVar[int] = 1
    """Columns of the accumulator consumed per output column: 2 for a gated epilogue (gate, then up)."""

    def forward(self, *z: Tensor) -> Tensor:
        """The output, of the shape and dtype of each of the ``columns`` operands."""
        raise NotImplementedError

    def backward(self, grad: Tensor, *z: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each operand, a tuple of ``columns``, from the output's gradient and the pre-activation."""
        raise NotImplementedError

    @property
    def device_code(self) -> str:
        """Name of the module with this epilogue's functions for Triton kernels, imported when one is built.

        Override it to name a module of yours, with ``forward(z, P)`` and ``backward(grad, z, P)``, or gate and up
        in place of z, both ``@triton.jit``; the second returns the gradients and then the output. ``P`` holds the
        parameters. The modules in ``anabranch.epilogues.device`` are the patterns.
        """
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
    """Demands that a parameter is a finite number above 0 (NaN is not)."""
    value = _number(epilogue, parameter)
    if not 0 < value < math.inf:
        raise ArgumentError(epilogue.name, parameter, expected="a finite number above 0", got=value)


def finite(epilogue: Epilogue, parameter: str) -> None:
    """Demands that a parameter is a finite number."""
    value = _number(epilogue, parameter)
    if not -math.inf < value < math.inf:
        raise ArgumentError(epilogue.name, parameter, expected="a finite number", got=value)


class Gated(Epilogue):
    """``inner(gate) * up``, for an epilogue ``inner`` of one column: a subclass sets ``name`` and ``inner``."""

    columns: ClassVar[int] = 2
    inner: ClassVar[Epilogue]

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        return self.inner.forward(gate) * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (*self.inner.backward(grad * up, gate), grad * self.inner.forward(gate))


Class = TypeVar("Class", bound=type[Epilogue])


def register(cls: Class) -> Class:
    """Class decorator: makes an epilogue known by its name, and checks it.

    A whole one, gated and with a parameter::

        from dataclasses import dataclass
        import torch
        from anabranch.epilogues import Epilogue, register

        @register
        @dataclass(frozen=True)
        class SigmoidGate(Epilogue):
            name = "sigmoid_gate"
            columns = 2
            slope: float = 1.0

            def forward(self, gate, up):
                return torch.sigmoid(self.slope * gate) * up

            def backward(self, grad, gate, up):
                s = torch.sigmoid(self.slope * gate)
                return grad * up * self.slope * s * (1 - s), grad * s

    From then on ``activation="sigmoid_gate"``, ``"sigmoid_gate(slope=2.0)"`` and ``SigmoidGate(slope=2.0)`` work in
    every operation that has ``activation=``. Both functions run on a few fp64 numbers, on the CPU, and backward is
    compared with forward's central differences, then with autograd. A class of the same module and qualified name
    replaces the earlier one, as when a notebook's cell runs again.

    Returns:
        The class, unchanged.

    Raises:
        ArgumentTypeError: not a subclass of Epilogue, or no dataclass though it has fields; a parameter that is no
            float; a result of the wrong type or dtype.
        ArgumentError: a name that is missing, taken or no identifier; columns other than 1 and 2; a parameter
            without default; a method that is missing or fails; a wrong shape; a backward that is not the
            derivative of forward.
    """
    # Ours are checked by the tests, so that an import does not wait for it.
    ours = isinstance(cls, type) and cls.__module__.startswith("anabranch.epilogues.")
    if not ours or cls.__module__ == __name__:
        from anabranch.epilogues._definition import check

        check(cls)
    holder = REGISTRY.get(cls.name)
    if holder is not None:
        if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
            got = f"{cls.name!r}, which is {holder.__module__}.{holder.__qualname__}"
            raise ArgumentError("register", "name", expected="a name not taken", got=got)
        from_spec.cache_clear()
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
            raise _unregistered(op, activation)
        for parameter in PARAMETERS[activation.name]:
            _number(activation, parameter)
        return activation
    if not isinstance(activation, str):
        got = type(activation).__name__
        if callable(activation) and hasattr(activation, "__name__"):
            got = f"{'class' if isinstance(activation, type) else 'function'} {activation.__name__}"
        if isinstance(activation, type) and issubclass(activation, Epilogue):
            got += f"; call it: {activation.__name__}()"
        expected = f"an Epilogue, None or one of {_known()}"
        raise ArgumentTypeError(op, "activation", expected=expected, got=got)
    name, opened, rest = activation.partition("(")
    if name not in REGISTRY:
        raise ArgumentError(
            op, "activation", expected=f"one of {_known()}", got=_suggesting(activation, name)
        )
    if opened and not rest.endswith(")"):
        expected = f"{name} or {name}(parameter=number), with its brackets closed"
        raise ArgumentError(op, "activation", expected=expected, got=repr(activation))
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
    try:
        return REGISTRY[name](**given)
    except ValueError as error:
        got = f"{activation!r} ({error})"
        raise ArgumentError(op, "activation", expected=f"parameters that {name} can have", got=got) from None


def _known() -> str:
    return ", ".join(sorted(REGISTRY))


def _unregistered(op: str, epilogue: Epilogue) -> ArgumentError:
    cls = type(epilogue)
    expected = "an epilogue whose class is decorated with @anabranch.epilogues.register"
    holder = REGISTRY.get(getattr(epilogue, "name", ""))
    got = f"a {cls.__name__}"
    if holder is not None and (holder.__module__, holder.__qualname__) == (cls.__module__, cls.__qualname__):
        got += " made before its class was registered again"
    return ArgumentError(op, "activation", expected=expected, got=got)


def _suggesting(activation: str, name: str) -> str:
    """The text given, and the name it comes near to, if there is one."""
    if is_dynamo_compiling():  # which cannot trace the search
        return repr(activation)
    from difflib import get_close_matches

    plain = {known.replace("_", ""): known for known in REGISTRY}
    near = get_close_matches(re.sub(r"[\W_]", "", name.lower()), plain, 1)
    return f"{activation!r}; did you mean {plain[near[0]]!r}?" if near else repr(activation)


@cache
def from_spec(spec: str) -> Epilogue:
    """The epilogue that :attr:`Epilogue.spec` stands for, in an operator: torch.compile traces no cache."""
    return resolve("from_spec", spec)
