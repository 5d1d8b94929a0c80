"""Which backend serves a call: names, probes, choice and its explanation."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from anabranch.errors import ArgumentError, UnsupportedError

ORDER = ("hopper", "triton", "eager")
"""Backends in the order that ``backend=None`` tries them."""
BACKENDS = (*ORDER, "reference")
"""All backend names. The reference defines correctness and runs only when asked for by name."""


class Call(Protocol):
    """What dispatch reads of an op's frozen call."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def backend(self) -> str | None: ...


class Choice(NamedTuple):
    """The backend that serves a call, and why each one tried before it does not."""

    op: str
    backend: str
    module: ModuleType
    refusals: dict[str, str]


def check_name(op: str, backend: str | None) -> None:
    """Raises unless ``backend`` is None or a backend's name."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ArgumentError(
            op, "backend", expected="None or one of " + ", ".join(BACKENDS), got=repr(backend)
        )


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@cache
def _module(op: str, backend: str) -> ModuleType | None:
    name = f"anabranch.ops.{op}.backends.{backend}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@cache
def _capability(index: int) -> tuple[int, int]:
    # What an AMD GPU calls its capability may be 9.0 too.
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(index)


def probe(backend: str, device: torch.device) -> str | None:
    """Why no operation can run with ``backend`` on ``device``, or None if that is possible."""
    if backend in ("eager", "reference"):
        return None
    if not _installed("triton"):
        return "Triton is not installed"
    if device.type == "cpu" and backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"it runs on CUDA tensors, not on {device.type}"
    if backend != "hopper":
        return None
    if _capability(torch.cuda.current_device() if device.index is None else device.index) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    return None


def unavailable(op: str, backend: str, device: torch.device) -> str | None:
    """Why ``op`` cannot run with ``backend`` on ``device``, whatever its arguments, or None if it may."""
    reason = probe(backend, device)
    if reason is None and _module(op, backend) is None:
        reason = "it has no kernel for this operation"
    return reason


def _refusal(op: str, call: Call, backend: str) -> str | None:
    reason = unavailable(op, backend, call.device)
    if reason is not None:
        return reason
    module = _module(op, backend)
    assert module is not None
    supports: Callable[[Call], str | None] = module.supports
    return supports(call)


def choose(op: str, call: Call) -> Choice:
    """The backend for a call: the one named, or the first of :data:`ORDER` that can serve it.

    Raises:
        UnsupportedError: the backend named cannot serve the call, or none can; the message has every reason.
    """
    refusals: dict[str, str] = {}
    for name in ORDER if call.backend is None else (call.backend,):
        reason = _refusal(op, call, name)
        if reason is None and call.backend is None and name != "eager" and call.device.type == "cpu":
            reason = "on the CPU its kernels are interpreted, which has to be asked for by name"
        if reason is None:
            module = _module(op, name)
            assert module is not None
            return Choice(op, name, module, refusals)
        refusals[name] = reason
    raise UnsupportedError(
        op,
        "backend",
        expected="a backend that can serve this call",
        got="; ".join(f"{name}: {reason}" for name, reason in refusals.items()),
    )


def checks_values() -> bool:
    """Whether operators may read tensor values to check them: ANABRANCH_CHECK_VALUES=1."""
    return os.environ.get("ANABRANCH_CHECK_VALUES") == "1"
