"""Facts about the device a tensor is on, and what they allow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch._backends.triton import operand

INT32_MAX = 2**31 - 1
_HERE = nullcontext()
# What the public function calls, once it has made sure that CUDA is initialised: so it is where there are tensors.
_current_index = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a handful where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) where kernels are interpreted, and on AMD, which numbers its GPUs otherwise."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


@cache
def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; Hopper's where kernels are interpreted."""
    if device.type != "cuda":
        return 232_448
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


class Gpu(NamedTuple):
    """All that launchers decide by, of where they launch."""

    device: torch.device
    capability: tuple[int, int]
    num_sms: int
    shared_memory: int
    int32_max: int


def gpu(device: torch.device) -> Gpu:
    """The facts about a device, as one value."""
    return _gpu(device, capability, num_sms, shared_memory_limit, INT32_MAX)


@lru_cache
def _gpu(
    device: torch.device,
    capability: Callable[[torch.device], tuple[int, int]],
    num_sms: Callable[[torch.device], int],
    shared_memory: Callable[[torch.device], int],
    int32_max: int,
) -> Gpu:
    """Remembered for as long as nobody puts other functions in place of those here."""
    return Gpu(device, capability(device), num_sms(device), shared_memory(device), int32_max)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on the tensors' device, whatever the current one is."""
    return torch.cuda.device(device) if elsewhere(device) else _HERE


def elsewhere(device: torch.device) -> bool:
    """Whether a GPU is not the current one."""
    return device.type == "cuda" and device.index != _current_index()


def tma_refusal(value: Tensor, inner: int = -1) -> str | None:
    """Why the tensor memory accelerator cannot read or write ``value``, or None if it can.

    ``inner`` is the dimension that a tile is contiguous along.
    """
    return operand.tma_refusal(operand.of(value), capability(value.device), inner)


def input_precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: in TF32 only where torch.backends.cuda.matmul allows it."""
    # Not allow_tf32, which raises an error where this one was set.
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"
