"""Launches through the function in C that Triton's launcher for NVIDIA ends in, where that is of the form known here.

At every launch Triton's goes over all arguments in Python, encodes every descriptor anew, and asks the driver about
the memory of every tensor: that takes longer than most kernels run. Here a tensor is passed as its address, and a
descriptor's encoding is remembered by it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

ENCODED = 8192
"""Descriptors that are remembered, of all launches together: weights' and results' of a large model."""
DRIVER = "triton.backends.nvidia.driver"
BEFORE_ARGUMENTS = "iiiKKppOOOOOO"
"""What the function takes before a kernel's arguments, as :func:`_passed` and ``options`` give it."""
PASSED = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")
"""What Triton's launcher takes: other releases put other things between."""
WRAPPED = {"launcher", "tensordesc_indices", "tensordesc_meta"}
"""What the function around it that expands descriptors holds."""


class Describes(Protocol):
    """Tiles of a tensor, as Triton's kernels or as Gluon's take them."""

    def of(self, value: Any) -> Any:
        """The descriptor of a tensor."""


class Native(NamedTuple):
    """A launcher in C.

    Attributes:
        launch: takes the grid, stream, function, options, packed metadata, three of hooks, and the arguments.
        options: what it takes between the function and the packed metadata.
        encoders: of the arguments that are descriptors, from the last to the first: so what one expands to moves
            none of those left.
    """

    launch: Callable[..., Any]
    options: tuple[Any, ...]
    encoders: Sequence[tuple[int, Encoder]]

    def arguments(self, addresses: Sequence[int | None]) -> Sequence[Any]:
        """What it takes for tensors at some addresses, None for one that is None."""
        if not self.encoders:
            return addresses
        found: list[Any] = [*addresses]
        for place, encoder in self.encoders:
            found[place : place + 1] = encoded(encoder, found[place])
        return found


class Encoder:
    """Encodes one argument of a launch: its tiles, and what the compiler settled of them."""

    __slots__ = ("_metadata", "_tiles")

    def __init__(self, tiles: Describes, metadata: Any) -> None:
        self._tiles = tiles
        self._metadata = metadata

    def encode(self, address: int) -> tuple[Any, ...]:
        """All that the launcher takes of a descriptor: encoded, and its sizes and strides."""
        found = self._tiles.of(_At(address))
        return tuple(importlib.import_module(DRIVER).make_tensordesc_arg(found, self._metadata))


class _At(NamedTuple):
    """Memory that somebody else keeps. What is encoded keeps nothing but the address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@lru_cache(ENCODED)
def encoded(encoder: Encoder, address: int) -> tuple[Any, ...]:
    """:meth:`Encoder.encode`, remembered. What it is of may be freed: another tensor there is encoded alike."""
    return encoder.encode(address)


def of(run: Any, tiles: Mapping[int, Describes]) -> Native | None:
    """The launcher in C below one of Triton's, for tensors of which some are described by tiles.

    None where it is not known how to be called, as another release's; where the kernel needs scratch memory, which
    Triton's allocates; and where descriptors are not all made of tiles. Then Triton's is to be called itself.
    """
    launcher: Any = type(run)
    if not _known(launcher) or run.global_scratch_size or run.profile_scratch_size:
        return None
    options = run.launch_cooperative_grid, run.launch_pdl, None, None
    if inspect.isbuiltin(run.launch):
        return None if tiles else Native(run.launch, options, ())
    inner = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
    if inner.keys() != WRAPPED:
        return None
    places = sorted(inner["tensordesc_indices"])
    metadata = dict(zip(places, inner["tensordesc_meta"], strict=True))
    if metadata.keys() != tiles.keys() or None in metadata.values():
        return None  # None: descriptors that the device has no hardware for
    encoders = [(place, Encoder(tiles[place], metadata[place])) for place in reversed(places)]
    return Native(inner["launcher"], options, encoders)


@cache
def _known(launcher: Any) -> bool:
    """Whether a class is Triton's launcher for NVIDIA, of a release that is called as this module does."""
    try:
        driver = importlib.import_module(DRIVER)
    except ImportError:
        return False
    if launcher is not getattr(driver, "CudaLauncher", None):
        return False
    takes = tuple(inspect.signature(vars(launcher)["__call__"]).parameters)
    return takes == PASSED and getattr(driver, "_BASE_ARGS_FORMAT", None) == BEFORE_ARGUMENTS
