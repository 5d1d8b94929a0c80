"""What is asked of an epilogue when it is registered: that it is declared whole, and that its gradient is right."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import MISSING, fields
from typing import Any, ClassVar, get_origin

import torch
from torch import Tensor

from anabranch.epilogues.base import Epilogue, Gated
from anabranch.errors import ArgumentError, ArgumentTypeError

OP = "register"
STEP = 2.0**-17
TOLERANCE = 1e-6
# No round numbers, where a function may have a kink. The last up is beyond the limit of gpt-oss.
VALUES = ((-6.3, -2.17, -0.71, -0.13, 0.37, 1.13, 2.9, 5.3), (1.7, -0.45, 3.1, -5.9, 0.83, -2.3, 0.21, 7.6))
GRAD = (0.7, -1.3, 1.9, 0.45, -0.8, 1.1, -1.7, 0.6)


def check(cls: type[Epilogue]) -> None:
    """Raises unless a class is an epilogue that operators can use by its name, with the gradient it should have."""
    if not isinstance(cls, type):
        raise ArgumentTypeError(OP, "cls", expected="a class", got=f"a {type(cls).__name__}")
    if not issubclass(cls, Epilogue) or cls in (Epilogue, Gated):
        raise ArgumentTypeError(OP, "cls", expected="a subclass of Epilogue", got=f"class {cls.__name__}")
    _dataclass(cls)
    _attributes(cls)
    _parameters(cls)
    _methods(cls)
    mode = nullcontext()
    # What makes tensors of forward's own has them here too, whatever the device or mode that is set around.
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        if type(torch.empty(0)) is not Tensor:  # under FakeTensorMode, which computes no values
            mode = torch.utils._python_dispatch._disable_current_modes()  # type: ignore[assignment]
        with mode:
            for epilogue in _instances(cls):
                _run(epilogue)


def _dataclass(cls: type[Epilogue]) -> None:
    if "__dataclass_params__" in vars(cls):
        return
    found = [p for p, kind in inspect.get_annotations(cls).items() if not _is_class_variable(p, kind)]
    if found:
        expected = "a frozen dataclass, so @dataclass(frozen=True) under @register and above the class"
        got = f"class {cls.__name__} without it, whose {', '.join(found)} would be no parameter"
        raise ArgumentTypeError(OP, "cls", expected=expected, got=got)


def _is_class_variable(name: str, kind: Any) -> bool:
    if name in ("name", "columns") or kind is ClassVar or get_origin(kind) is ClassVar:
        return True
    return isinstance(kind, str) and "ClassVar" in kind


def _attributes(cls: type[Epilogue]) -> None:
    for attribute in ("name", "columns"):
        if any(f.name == attribute for f in fields(cls)):
            expected = "a class attribute, not a parameter: leave its annotation out"
            raise ArgumentTypeError(
                OP, attribute, expected=expected, got=f"a field of the dataclass {cls.__name__}"
            )
    name, columns = getattr(cls, "name", None), cls.columns
    if name is None:
        raise ArgumentError(OP, "name", expected=f'name = "..." in class {cls.__name__}', got="none")
    if not isinstance(name, str):
        raise ArgumentTypeError(OP, "name", expected="a string", got=type(name).__name__)
    if not name.isidentifier():
        expected = "letters, digits and underscores, no digit first"
        raise ArgumentError(OP, "name", expected=expected, got=repr(name))
    if type(columns) is not int or columns not in (1, 2):
        raise ArgumentError(OP, "columns", expected="1, or 2 for (gate, up)", got=repr(columns))


def _parameters(cls: type[Epilogue]) -> None:
    for f in fields(cls):
        kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", repr(f.type))
        if kind.strip("'\"") != "float":
            expected = f"a float, as {cls.__name__}'s parameters travel through operators as text"
            raise ArgumentTypeError(OP, f.name, expected=expected, got=kind)
        if not f.init:
            expected = "a parameter that the constructor takes"
            raise ArgumentError(OP, f.name, expected=expected, got="field(init=False)")
        if f.default is MISSING:
            expected = f"a default, with which activation={cls.name!r} makes a {cls.__name__}"
            got = "none" if f.default_factory is MISSING else "a default_factory"
            raise ArgumentError(OP, f.name, expected=expected, got=got)
        if isinstance(f.default, bool) or not isinstance(f.default, (int, float)):
            expected = "a number as its default"
            raise ArgumentTypeError(OP, f.name, expected=expected, got=type(f.default).__name__)


def _methods(cls: type[Epilogue]) -> None:
    for method in ("forward", "backward"):
        if getattr(cls, method) is getattr(Epilogue, method):
            raise ArgumentError(OP, method, expected=f"a method of class {cls.__name__}", got="none")
        if getattr(cls, method) is getattr(Gated, method):
            inner = getattr(cls, "inner", None)
            if not isinstance(inner, Epilogue) or inner.columns != 1 or cls.columns != 2:
                expected = "the epilogue of one column that is behind the gate, as in inner = Silu()"
                got = f"class {inner.__name__}" if isinstance(inner, type) else repr(inner)
                raise ArgumentTypeError(OP, "inner", expected=expected, got=got)


def _instances(cls: type[Epilogue]) -> list[Epilogue]:
    """With the defaults and, where that is allowed, with others: a default of 1 hides a factor that is missing."""
    try:
        found = [cls()]
    except Exception as error:
        expected = f"{cls.__name__}() to work, with the defaults alone"
        raise ArgumentError(OP, "cls", expected=expected, got=_brief(error)) from error
    if fields(cls):
        try:
            others = {f.name: 0.75 * getattr(found[0], f.name) or 0.25 for f in fields(cls)}
            found.append(cls(**others))
        except ValueError:
            pass
    return found


def _run(epilogue: Epilogue) -> None:
    values = VALUES[: epilogue.columns]

    def operands() -> list[Tensor]:
        return [torch.tensor(v, dtype=torch.float64).view(2, 4) for v in values]

    z, grad = operands(), torch.tensor(GRAD, dtype=torch.float64).view(2, 4)
    out = _result("forward", lambda: epilogue.forward(*z), z)
    _like("forward", out, "each operand")
    # Kernels hold a tile of the accumulator, wherever that starts.
    part = _result("forward", lambda: epilogue.forward(*[v[1:, 1:] for v in z]), z)
    if not torch.allclose(part, out[1:, 1:], rtol=1e-9, atol=1e-9, equal_nan=True):
        got = "other values when there are fewer elements"
        raise ArgumentError(
            OP, "forward", expected="each element to depend on its own operands alone", got=got
        )
    gradients = _result("backward", lambda: epilogue.backward(grad, *z), [*z, grad])
    if type(gradients) is not tuple or len(gradients) != epilogue.columns:
        count = "1 gradient, as in return (d_z,)" if epilogue.columns == 1 else "2 gradients: of gate, of up"
        got = f"{len(gradients)} of them" if type(gradients) is tuple else f"a {type(gradients).__name__}"
        raise ArgumentTypeError(OP, "backward", expected=f"a tuple of {count}", got=got)
    for gradient in gradients:
        _like("backward", gradient, "each operand for its gradient")
    _derivative(epilogue, gradients, grad, out, operands)


def _result(method: str, function: Callable[[], Any], given: list[Tensor]) -> Any:
    before = [v.clone() for v in given]
    try:
        found = function()
    except Exception as error:
        names = {1: "z", 2: "gate, up"}
        count = len(given) - (method == "backward")
        call = f"{method}({'grad, ' if method == 'backward' else ''}{names[count]})"
        raise ArgumentError(
            OP, method, expected=f"{call} to run on fp64 CPU tensors", got=_brief(error)
        ) from error
    if not all(torch.equal(v, b) for v, b in zip(given, before, strict=True)):
        raise ArgumentError(OP, method, expected="operands left as they are", got="some that it wrote to")
    return found


def _like(method: str, value: Any, whose: str) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(OP, method, expected="a tensor", got=f"a {type(value).__name__}")
    if value.shape != (2, 4):
        expected = f"the shape of {whose}, here (2, 4)"
        raise ArgumentError(OP, method, expected=expected, got=str(tuple(value.shape)))
    if value.dtype != torch.float64 or value.device.type != "cpu":
        expected = f"the dtype and device of {whose}, here float64 on the CPU"
        got = f"{str(value.dtype).removeprefix('torch.')} on {value.device}"
        raise ArgumentTypeError(OP, method, expected=expected, got=got)


def _derivative(
    epilogue: Epilogue,
    gradients: tuple[Tensor, ...],
    grad: Tensor,
    out: Tensor,
    operands: Callable[[], list[Tensor]],
) -> None:
    """Central differences, and autograd where those disagree: at a kink, or after rounding to another dtype.

    Autograd comes last because its first backward asks for the devices, after which a process may not fork.
    """
    names = ("z",) if epilogue.columns == 1 else ("gate", "up")
    exact: list[Tensor] | None = None
    for i, actual in enumerate(gradients):
        above, below = operands(), operands()
        above[i] += STEP
        below[i] -= STEP
        expected = grad * (epilogue.forward(*above) - epilogue.forward(*below)) / (above[i] - below[i])
        if not _wrong(actual, expected, grad * out).any():
            continue
        exact = _autograd(epilogue, grad, operands()) if exact is None else exact
        expected = exact[i] if exact else expected
        wrong = _wrong(actual, expected, grad * out).flatten().tolist()
        if True not in wrong:
            continue
        at = wrong.index(True)
        where = [
            *zip(names, (v.flatten()[at] for v in operands()), strict=True),
            ("grad", grad.flatten()[at]),
        ]
        right, found = float(expected.flatten()[at]), float(actual.flatten()[at])
        parameters = ", ".join(f"{f.name}={getattr(epilogue, f.name)!r}" for f in fields(epilogue))
        raise ArgumentError(
            OP,
            "backward",
            expected=f"the derivative of forward by {names[i]}, {right:.9g} at "
            + ", ".join(f"{name} = {float(value):g}" for name, value in where)
            + f" of {type(epilogue).__name__}({parameters})",
            got=f"{found:.9g}, which differs by {abs(found - right):.3g}",
        )


def _wrong(actual: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Where a gradient is not the one expected. Outside of forward's domain anything is right."""
    size = torch.maximum(actual.abs(), expected.abs()).clamp(min=1)
    right = (actual - expected).abs() <= TOLERANCE * size + 1e-9 * scale.abs()
    return ~right & expected.isfinite()


def _autograd(epilogue: Epilogue, grad: Tensor, z: list[Tensor]) -> list[Tensor]:
    """The gradients of forward, or none where autograd cannot differentiate it."""
    with torch.enable_grad():
        out = epilogue.forward(*[v.requires_grad_() for v in z])
        try:
            return list(torch.autograd.grad(out, z, grad, materialize_grads=True))
        except RuntimeError:
            return []


def _brief(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
