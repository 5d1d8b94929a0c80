"""Notes on what a call launches and allocates, from which the same can be made for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch._backends.triton.prepared import Launch, recorder

_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
"""All that a call may do besides launches and views. What else it did could not be made again."""


class Memory(NamedTuple):
    """A tensor that was allocated, and all bytes from its first to its last."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Place(NamedTuple):
    """Where a tensor that was given to a launch starts.

    Attributes:
        number: of a tensor that was given to the recording, or past these of one that was allocated.
        shift: how many bytes in.
    """

    number: int
    shift: int


class Recording(TorchDispatchMode):
    """Every launch that this thread makes inside, and where its tensors are. No tensor is kept.

    Attributes:
        given: how many tensors it was given.
        steps: each launch, and the places of its tensors.
        allocated: memory, in its order.
        whole: whether nothing else happened, and every tensor's place is known.
    """

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.given = len(given)
        self._dtypes = [None if value is None else value.dtype for value in given]
        self.steps: list[tuple[Launch, Sequence[Place | None]]] = []
        self.allocated: list[Memory] = []
        self.whole = True
        self._launching = False
        self._known: dict[int, int] = {}
        for number, value in enumerate(given):
            if value is not None and value.numel():
                # They are told by their addresses. Of several with one, any will do, but for a launch that looks at it.
                first = given[self._known.setdefault(value.data_ptr(), number)]
                self.whole &= first is not None and first.dtype == value.dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._launching:
            return result
        if func in _ALLOCATES:
            self.allocate(result)
        else:
            self.whole &= func.is_view
        return result

    def allocate(self, value: Tensor) -> None:
        """Takes down an allocation. What was there before is gone."""
        address, number, nbytes = value.data_ptr(), self.given + len(self.allocated), span(value)
        self.allocated.append(Memory(address, value.shape, value.stride(), value.dtype, nbytes))
        self._dtypes.append(value.dtype)
        self._known = {at: i for at, i in self._known.items() if not address < at < address + nbytes}
        self._known[address] = number

    def launch(self, launch: Launch, tensors: Sequence[Any]) -> None:
        """Takes down a launch and makes it, whatever that does."""
        places = [None if value is None else self.place(value) for value in tensors]
        for value, place in zip(tensors, places, strict=True):
            # Whoever has to see tensors would be given one of another dtype.
            self.whole &= place is None or self._dtypes[place.number] == value.dtype
        self.steps.append((launch, places))
        recorder.recording, self._launching = None, True
        try:
            launch(*tensors)
        finally:
            recorder.recording, self._launching = self.launch, False

    def place(self, value: Tensor) -> Place | None:
        """Where a tensor is."""
        address = value.data_ptr()
        number = self._known.get(address)
        if number is not None:
            return Place(number, 0)
        # From the last to the first: it may be where another was.
        for i, memory in reversed([*enumerate(self.allocated, self.given)]):
            if memory.address < address < memory.address + memory.nbytes:
                return Place(i, address - memory.address)
        self.whole = False
        return None


def span(value: Tensor) -> int:
    """Bytes from a tensor's first to its last."""
    if not value.numel():
        return 0
    steps = zip(value.shape, value.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * value.element_size()


@contextmanager
def recording(given: Sequence[Tensor | None]) -> Iterator[Recording]:
    """Notes what this thread does inside. See :class:`Recording`."""
    outer, found = recorder.recording, Recording(given)
    recorder.recording = found.launch
    try:
        with found:
            yield found
    finally:
        recorder.recording = outer
