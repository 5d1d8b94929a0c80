"""explain: what would run for a call, and at what price."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from anabranch.dispatch import choose
from anabranch.errors import ArgumentError
from anabranch.ops.checks import needs_grad


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; ``str()`` of it is for reading, its attributes are for programs.

    Attributes:
        function: the public function asked about.
        backend: the backend that would run.
        refusals: backend -> why it would not, for each one tried before.
        loads: operand -> how the backend would load or store it, where it says; those of the forward.
        padding: share of the rows the backend would compute that are padding of its tiles; None where it does not
            say.
        saved_bytes: bytes kept for the backward beyond the arguments; 0 where no gradient is needed.
        needs_grad: whether a gradient is needed: some argument requires grad, and gradients are on.
    """

    function: str
    backend: str
    refusals: dict[str, str]
    loads: dict[str, str]
    padding: float | None
    saved_bytes: int
    needs_grad: bool

    def __str__(self) -> str:
        lines = [f"{self.function} runs on: {self.backend}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        lines += [f"  {operand} by {path}" for operand, path in self.loads.items()]
        if self.padding is not None:
            lines.append(f"  padding: {self.padding:.1%} of the rows computed")
        why = "" if self.needs_grad else ", as no argument requires grad, or gradients are off"
        lines.append(f"  kept for the backward beyond the arguments: {self.saved_bytes:,} bytes{why}")
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says what ``fn(*args, **kwargs)`` would run, without running it (but for ``backend="reference"``).

    It validates the arguments as the call would, asks every backend in turn, and traces the call on fake tensors to see
    what autograd would keep. It may read routing values on the host, so it is no part of a training step.

    Args:
        fn: a public operation of anabranch that has backends, such as :func:`anabranch.moe_mlp`.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Returns:
        An :class:`Explanation` with ``function``, ``backend``, ``refusals`` (backend -> reason), ``loads`` (operand ->
        path), ``padding`` (share of the rows computed, or None), ``saved_bytes`` and ``needs_grad``; printed, it is a
        few lines of text.

    Raises:
        ArgumentError: fn is not such an operation, or what fn itself raises for the arguments.
    """
    name = getattr(fn, "__name__", None) or type(fn).__name__
    op, bind = _find(getattr(fn, "__module__", None) or "", name)
    if bind is None:
        expected = f"an operation of anabranch that has backends ({', '.join(_operations())})"
        raise ArgumentError("explain", "fn", expected=expected, got=name)
    try:
        inspect.signature(bind).bind(*args, **kwargs)
    except TypeError as error:
        # In place of what Python would say of the function that validates, which is not the user's.
        raise TypeError(f"{name}() {error}") from None
    call = bind(*args, **kwargs)
    backend, refusals = "reference", {}
    loads: dict[str, str] = {}
    padding = None
    if call.backend != "reference":
        choice = choose(op, call)
        backend, refusals = choice.backend, choice.refusals
        # Of these a backend says what it can.
        loads = choice.module.loads(call) if hasattr(choice.module, "loads") else {}
        padding = choice.module.padding(call) if hasattr(choice.module, "padding") else None
    wanted = needs_grad(*(v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)))
    kept = _saved_bytes(fn, args, kwargs) if wanted else 0
    return Explanation(name, backend, refusals, loads, padding, kept, wanted)


def _operations() -> list[str]:
    """The public functions that a backend serves."""
    package = importlib.import_module("anabranch")  # which imports this module
    public = (getattr(package, name) for name in package.__all__)
    functions = [value for value in public if inspect.isfunction(value)]
    return [fn.__name__ for fn in functions if _find(fn.__module__, fn.__name__)[1] is not None]


def _find(module: str, name: str) -> tuple[str, Callable[..., Any] | None]:
    """The op that a function belongs to, and what validates its arguments; None if no backend serves it."""
    path = re.fullmatch(r"anabranch\.ops\.(\w+)\.api", module)
    if path is None or importlib.util.find_spec(f"anabranch.ops.{path[1]}.backends") is None:
        return "", None
    return path[1], getattr(importlib.import_module(f"anabranch.ops.{path[1]}.call"), f"bind_{name}", None)


def _saved_bytes(fn: Callable[..., Any], args: Any, kwargs: Any) -> int:
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return value

    # The reference reads values, so it has to run.
    mode = nullcontext() if kwargs.get("backend") == "reference" else FakeTensorMode()

    def stand_in(value: Tensor) -> Tensor:
        plain = value.detach()
        if isinstance(mode, FakeTensorMode):
            plain = mode.from_tensor(plain)
        return plain.requires_grad_(value.requires_grad)

    args, kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
    given = {v.untyped_storage()._cdata for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
    with mode, torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        result = fn(*args, **kwargs)
    del result
    return sum(size for storage, size in kept.items() if storage not in given)
