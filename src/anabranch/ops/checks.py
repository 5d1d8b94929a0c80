"""Checks of arguments that several ops share. Each raises, or returns what the op needs to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.layout import ExpertLayout
from anabranch.ops.precision import autocasts

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
_PLAIN = (Tensor, torch.nn.Parameter)


@lru_cache(4096)
def known(*facts: Any) -> list[bool]:
    """For calls with such facts, see :func:`facts`, and whatever else decides: [True] once one passed its checks."""
    return []


def facts(*values: Tensor | None) -> tuple[Any, ...] | None:
    """All that checks read of tensors; None where they have to be read again, as of those that are no plain tensors.

    Checks of what passed them before take a quarter of a small call's time on the host.
    """
    if is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return None  # a transform's tensors may have symbols for sizes, which cannot be remembered
    found: list[Any] = []
    for value in values:
        if value is None:
            found.append(None)
        elif type(value) not in _PLAIN or value.is_nested:
            return None
        else:
            found += value.shape, value.dtype, value.layout, value.device
    return tuple(found)


def name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def tensor(op: str, argument: str, value: object, shape: str, dtypes: Sequence[torch.dtype]) -> None:
    """Demands a tensor of a rank, which ``shape`` spells as ``(T, H)``, and of one of ``dtypes``."""
    rank = shape.count(",") + (not shape.endswith(",)"))
    dense(op, argument, value, shape, dtypes)
    assert isinstance(value, Tensor)
    if value.dim() != rank:
        raise ArgumentError(op, argument, expected=f"shape {shape}", got=f"shape {tuple(value.shape)}")


def dense(op: str, argument: str, value: object, shapes: str, dtypes: Sequence[torch.dtype]) -> None:
    """Demands a tensor in strided memory, of one of ``dtypes``; ``shapes`` only words the message."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(op, argument, expected=f"a tensor {shapes}", got=type(value).__name__)
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ArgumentTypeError(op, argument, expected=f"a dense tensor {shapes}", got=f"a {kind} one")
    if value.dtype not in dtypes:
        expected = "dtype " + " or ".join(name(d) for d in dtypes)
        raise ArgumentTypeError(op, argument, expected=expected, got=name(value.dtype))


def shape(
    op: str, argument: str, value: Tensor, *sizes: int, means: str, fits: Callable[[], str] | None = None
) -> None:
    """Demands exact sizes; ``means`` says in letters where they come from.

    ``fits`` is asked what a wrong shape would be right for; with no answer, "", the error says no more.
    """
    if tuple(value.shape) != sizes:
        expected = f"shape {means} = ({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
        got = f"shape {tuple(value.shape)}"
        if fits is not None and (other := fits()):
            got = f"{got}, which fits {other}"
        raise ArgumentError(op, argument, expected=expected, got=got)


def last_size(op: str, argument: str, value: object, letter: str, size: int) -> None:
    """Demands a tensor whose last dimension has a size, with any dimensions before it."""
    dense(op, argument, value, f"(..., {letter})", FLOATS)
    assert isinstance(value, Tensor)
    if value.dim() == 0 or value.shape[-1] != size:
        expected = f"shape (..., {letter}) with {letter} = {size}"
        raise ArgumentError(op, argument, expected=expected, got=f"shape {tuple(value.shape)}")


def same_dtype(op: str, argument: str, value: Tensor, like: Tensor, like_name: str = "x") -> None:
    """Demands the dtype of another argument."""
    if value.dtype != like.dtype:
        expected = f"{like_name}'s dtype {name(like.dtype)}"
        raise ArgumentTypeError(op, argument, expected=expected, got=name(value.dtype))


def own_dtype(op: str, argument: str, value: Tensor, like: Tensor, owner: str) -> None:
    """Demands the dtype of a module's parameters, unless autocast makes them one (it leaves fp64 alone)."""
    if value.dtype == like.dtype:
        return
    if torch.float64 in (value.dtype, like.dtype) or not autocasts(value.device):
        expected = f"{owner}' dtype {name(like.dtype)}"
        raise ArgumentTypeError(op, argument, expected=expected, got=name(value.dtype))


def same_device(op: str, like: Tensor, like_name: str = "x", **values: Tensor | ExpertLayout | None) -> None:
    """Demands that every value given is where ``like`` is."""
    for argument, value in values.items():
        if value is not None and value.device != like.device:
            expected = f"{like_name}'s device {like.device}"
            raise ArgumentError(op, argument, expected=expected, got=str(value.device))


def layout(op: str, value: object, num_experts: int | None = None) -> None:
    """Demands an ExpertLayout; with ``num_experts``, one that counts rows for that many experts."""
    if not isinstance(value, ExpertLayout):
        raise ArgumentTypeError(op, "layout", expected="an ExpertLayout", got=type(value).__name__)
    # One put together by hand may hold anything, and kernels trust it.
    tensor(op, "layout.row_to_slot", value.row_to_slot, "(R,)", INTEGERS)
    tensor(op, "layout.slot_to_row", value.slot_to_row, "(T, K)", INTEGERS)
    same_device(op, value.slot_to_row, "slot_to_row", **{"layout.row_to_slot": value.row_to_slot})
    if num_experts is None:
        return
    if value.counts is None or value.offsets is None:
        raise ArgumentError(op, "layout", expected="a layout with counts and offsets", got="maps alone")
    tensor(op, "layout.counts", value.counts, "(E,)", INTEGERS)
    if value.num_experts != num_experts:
        expected = f"a layout of weight's E = {num_experts} experts"
        raise ArgumentError(op, "layout", expected=expected, got=f"{value.num_experts} experts")
    tensor(op, "layout.offsets", value.offsets, "(E + 1,)", INTEGERS)
    shape(op, "layout.offsets", value.offsets, num_experts + 1, means="(E + 1,)")
    same_device(op, value.slot_to_row, "slot_to_row", **{"layout.offsets": value.offsets})


def choice(op: str, argument: str, value: object, options: Sequence[str]) -> None:
    """Demands one of a few strings."""
    if not isinstance(value, str) or value not in options:
        raise ArgumentError(op, argument, expected=" or ".join(map(repr, options)), got=repr(value))


def flag(op: str, **values: object) -> None:
    """Demands that every value given is True or False."""
    for argument, value in values.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(op, argument, expected="a bool", got=type(value).__name__)


def float_dtype(op: str, dtype: object) -> None:
    """Demands a dtype that parameters and tables can have; None is torch's default."""
    if dtype is None or dtype in FLOATS:
        return
    got = name(dtype) if isinstance(dtype, torch.dtype) else type(dtype).__name__
    raise ArgumentTypeError(op, "dtype", expected=f"None or {' or '.join(map(name, FLOATS))}", got=got)


def integer(op: str, argument: str, value: object, *, minimum: int) -> None:
    """Demands an int (or a symbolic one) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentTypeError(op, argument, expected="an int", got=type(value).__name__)
    if value < minimum:
        raise ArgumentError(op, argument, expected=f"at least {minimum}", got=value)


def needs_grad(*values: Tensor | None) -> bool:
    """Whether autograd will want a gradient of any of the values."""
    return torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in values)


def no_gradient_through(op: str, argument: str, /, **values: Tensor | None) -> None:
    """Demands that nobody needs a gradient: an operator that mutates has none. Nor does it take lazy negation."""
    for which, value in values.items():
        if value is None:
            continue
        if not torch.compiler.is_compiling() and value.is_neg():
            # PyTorch's own fallback for these fails in a mutating operator, over an argument that is None.
            got = f"{which}, from a view such as .conj().imag; use resolve_neg()"
            raise ArgumentError(op, argument, expected="no tensor whose sign is yet to be turned", got=got)
        if needs_grad(value):
            expected = "no tensor that requires grad (a mutating call has no gradient)"
            raise ArgumentError(
                op, argument, expected=expected, got=f"{which}, which does; use torch.no_grad()"
            )
