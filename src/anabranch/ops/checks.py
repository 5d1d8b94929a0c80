"""Checks of arguments that several ops share. Each raises, or returns what the op needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.layout import ExpertLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def tensor(op: str, argument: str, value: object, shape: str, dtypes: Sequence[torch.dtype]) -> None:
    """Demands a tensor of a rank, which ``shape`` spells as ``(T, H)``, and of one of ``dtypes``."""
    rank = shape.count(",") + (not shape.endswith(",)"))
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(op, argument, expected=f"a tensor {shape}", got=type(value).__name__)
    if value.dtype not in dtypes:
        expected = "dtype " + " or ".join(name(d) for d in dtypes)
        raise ArgumentTypeError(op, argument, expected=expected, got=name(value.dtype))
    if value.dim() != rank:
        raise ArgumentError(op, argument, expected=f"shape {shape}", got=f"shape {tuple(value.shape)}")


def shape(op: str, argument: str, value: Tensor, *sizes: int, means: str) -> None:
    """Demands exact sizes; ``means`` says in letters where they come from."""
    if tuple(value.shape) != sizes:
        expected = f"shape {means} = ({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
        raise ArgumentError(op, argument, expected=expected, got=f"shape {tuple(value.shape)}")


def last_size(op: str, argument: str, value: object, letter: str, size: int) -> None:
    """Demands a tensor whose last dimension has a size, with any dimensions before it."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(op, argument, expected=f"a tensor (..., {letter})", got=type(value).__name__)
    if value.dim() == 0 or value.shape[-1] != size:
        expected = f"shape (..., {letter}) with {letter} = {size}"
        raise ArgumentError(op, argument, expected=expected, got=f"shape {tuple(value.shape)}")


def same_dtype(op: str, argument: str, value: Tensor, like: Tensor, like_name: str = "x") -> None:
    """Demands the dtype of another argument."""
    if value.dtype != like.dtype:
        expected = f"{like_name}'s dtype {name(like.dtype)}"
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
    if num_experts is None:
        return
    if value.counts is None or value.offsets is None:
        raise ArgumentError(op, "layout", expected="a layout with counts and offsets", got="maps alone")
    if value.num_experts != num_experts:
        expected = f"a layout of weight's E = {num_experts} experts"
        raise ArgumentError(op, "layout", expected=expected, got=f"{value.num_experts} experts")


def choice(op: str, argument: str, value: object, options: Sequence[str]) -> None:
    """Demands one of a few strings."""
    if value not in options:
        raise ArgumentError(op, argument, expected=" or ".join(map(repr, options)), got=repr(value))


def integer(op: str, argument: str, value: object, *, minimum: int) -> None:
    """Demands an int (or a symbolic one) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentTypeError(op, argument, expected="an int", got=type(value).__name__)
    if value < minimum:
        raise ArgumentError(op, argument, expected=f"at least {minimum}", got=value)


def no_config(op: str, config: object) -> None:
    """Refuses a tile configuration: no backend of this op has tiles to configure."""
    if config is not None:
        raise UnsupportedError(op, "config", expected="None (no backend here has tiles)", got=repr(config))


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; a kind of device that knows none (meta) has it off."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_like_matmul(*values: Any) -> tuple[Any, ...]:
    """Under autocast, casts floating tensors (but fp64) as torch.matmul's operands are cast."""
    first = next((v for v in values if isinstance(v, Tensor)), None)
    if first is None or not autocasts(first.device):
        return values
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() and v.dtype != torch.float64 else v
        for v in values
    )


def needs_grad(*values: Tensor | None) -> bool:
    """Whether autograd will want a gradient of any of the values."""
    return torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in values)


def no_gradient_through(op: str, argument: str, *values: Tensor | None) -> None:
    """Demands that nobody needs a gradient: an operator that mutates has none."""
    if needs_grad(*values):
        expected = "no tensor that requires grad (a mutating call has no gradient)"
        raise ArgumentError(op, argument, expected=expected, got="one that does; use torch.no_grad()")
