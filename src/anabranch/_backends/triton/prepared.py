"""Launches that are prepared once, for calls of which only the tensors' contents and addresses differ.

:func:`launch` is for kernels that are easily described; who has much to decide remembers a :class:`Launch` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from anabranch._backends.triton import native
from anabranch._backends.triton.device import current, elsewhere
from anabranch._backends.triton.native import Describes, Native

REMEMBERED = 1024
"""Launches of a kind that are remembered. Each size of a batch is one more."""
_RUNTIME = knobs.runtime


class Recorder(threading.local):
    """Who makes a thread's launches in their place, to take note of them, if anybody does."""

    recording: Callable[[Launch, Sequence[Any]], None] | None = None


recorder = Recorder()


class Launch:
    """A kernel with all of its arguments but the tensors, which come first.

    At every launch Triton finds out anew which of a kernel's compiled forms to run, from the type, value and
    alignment of each argument, and takes longer for that than many kernels run. Whoever makes a ``Launch``
    promises that the tensors of all calls agree in dtype, in being None, and in whether their addresses are
    multiples of 16 bytes (descriptors: in dtype and tile; tensors to be described: in sizes and strides too), as they
    do if it is kept by their :class:`~anabranch._backends.triton.operand.Operand`. Then what the first call compiled
    serves the others.

    Attributes:
        native: the launcher in C that launches it, once it is known.
    """

    __slots__ = (
        "_constants",
        "_device",
        "_fixed",
        "_grid",
        "_kernel",
        "_numbers",
        "_rest",
        "_run",
        "_stream",
        "_tiles",
        "native",
    )

    def __init__(
        self, device: torch.device, kernel: Any, grid: Sequence[int], *numbers: Any, **constants: Any
    ) -> None:
        """``numbers`` follow the tensors; ``constants`` are what is left, and the compiler's options."""
        self._device = device
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._numbers = numbers
        # Products and sums may contract into one instruction: so they do unasked up to Triton 3.9, not after.
        self._constants = {"enable_fp_fusion": True, **constants}
        self._run: Callable[..., Any] | None = None
        self.native: Native | None = None
        self._tiles: Mapping[int, Describes] = {}

    def tiled(self, tiles: Mapping[int, Describes | None]) -> Launch:
        """Itself, made to describe the tensors in some places by tiles, a Triton kernel's or a Gluon kernel's."""
        self._tiles = {place: found for place, found in tiles.items() if found is not None}
        return self

    @property
    def hooks(self) -> list[Any]:
        """Those who want to be told before this kernel runs."""
        found: list[Any] = self._kernel.pre_run_hooks
        return found

    def arguments(self, stream: Any, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """All that :attr:`native` takes, for what stands for its tensors."""
        return (*self._grid, stream, *self._fixed, *tensors, *self._rest)

    def __call__(self, *tensors: Any) -> None:
        """Launches on the device it was made for."""
        if recorder.recording is not None:
            recorder.recording(self, tensors)
            return
        if self._run is None or self._kernel.pre_run_hooks or hooked():
            self.unprepared(*tensors)
            return
        if self.native is not None:
            addresses = [None if value is None else value.data_ptr() for value in tensors]
            arguments: Sequence[Any] = self.native.arguments(addresses)
        else:
            arguments = self._described(tensors) if self._tiles else tensors
        if elsewhere(self._device):
            with current(self._device):
                self._launch(arguments)
        else:
            self._launch(arguments)

    def _launch(self, arguments: Sequence[Any]) -> None:
        assert self._run is not None
        self._run(*self._grid, self._stream(self._device.index), *self._fixed, *arguments, *self._rest)

    def unprepared(self, *tensors: Any) -> None:
        """Launches as Triton does it."""
        arguments = self._described(tensors)
        with current(self._device):
            found = self._kernel[self._grid](*arguments, *self._numbers, **self._constants)
        # The interpreter returns nothing. On AMD a tensor's size decides too, of which nothing was promised.
        if (
            self._run is None
            and isinstance(found, CompiledKernel)
            and found.metadata.target.backend == "cuda"
        ):
            names = self._kernel.arg_names[len(tensors) + len(self._numbers) :]
            self._rest = (*self._numbers, *(self._constants[name] for name in names))
            self.native = known = native.of(found.run, self._tiles)
            run, options = (found.run, ()) if known is None else (known.launch, known.options)
            # As Triton calls it: no metadata for hooks, no hook before, none after.
            self._fixed = (found.function, *options, found.packed_metadata, None, None, None)
            self._stream = driver.active.get_current_stream
            self._run = run

    def _described(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return [self._tiles[i].of(value) if i in self._tiles else value for i, value in enumerate(tensors)]


def hooked() -> bool:
    """Whether someone, as a profiler, wants to be told of every launch."""
    before, after = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def launch(
    device: torch.device,
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | None],
    *numbers: float,
    **constants: Any,
) -> None:
    """``kernel[grid](*tensors, *numbers, **constants)`` on a device, prepared at the first such call."""
    known = tuple([None if v is None else (v.dtype, v.data_ptr() % 16 == 0) for v in tensors])
    _remembered(device, kernel, grid, known, *numbers, **constants)(*tensors)


@lru_cache(4 * REMEMBERED, typed=True)  # 1, 1.0 and True are compiled differently
def _remembered(
    device: torch.device, kernel: Any, grid: tuple[int, ...], known: Any, *numbers: float, **constants: Any
) -> Launch:
    return Launch(device, kernel, grid, *numbers, **constants)
