"""A whole call's launches, recorded once and made again for calls that look alike.

What is left of a call then is one allocation, the tensors' addresses, and the launches themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from anabranch._backends.triton import prepared
from anabranch._backends.triton.device import current
from anabranch._backends.triton.native import Encoder, encoded
from anabranch._backends.triton.prepared import Launch, Recording, recorder

ALIGNED = 256
"""Bytes of whose multiples temporary tensors start, in the memory that they share."""
Pick = Callable[[Sequence[Any]], Sequence[Any]]
"""Some of many values, by their places."""


@contextmanager
def recording() -> Iterator[Recording]:
    """Every launch that this thread makes inside, with its tensors, which are kept alive: no two have one address."""
    outer, recorder.recording = recorder.recording, Recording()
    try:
        yield recorder.recording
    finally:
        recorder.recording = outer


class Replay(NamedTuple):
    """Launches whose tensors are known by number: those given, then temporary ones, then parts of these, then None.

    Attributes:
        steps: each launch, and what picks its tensors.
        temporaries: sizes and dtype of each, and where it starts in the memory that they share.
        memory: bytes of that.
        parts: tensors that start inside another: its number, how many bytes in, how many elements in.
        calls: the same launches in C, or None where one is not known.
    """

    steps: Sequence[tuple[Launch, Pick]]
    temporaries: Sequence[tuple[torch.Size, torch.dtype, int]]
    memory: int
    parts: Sequence[tuple[int, int, int]]
    calls: Calls | None

    def run(self, given: Sequence[Tensor | None]) -> None:
        """Launches them for tensors like those recorded, the first of which is on the device that all are on."""
        first = given[0]
        assert first is not None
        if self.calls is None or self._hooked():
            self._with_tensors(first, given)
            return
        memory = first.new_empty(self.memory, dtype=torch.uint8)
        start = memory.data_ptr()
        found: list[Any] = [None if value is None else value.data_ptr() for value in given]
        for _, _, offset in self.temporaries:
            found.append(start + offset)
        for whole, shift, _ in self.parts:
            found.append(found[whole] + shift)
        found.append(None)
        with current(first.device):
            self.calls.make(found, driver.active.get_current_stream(first.device.index))

    def _hooked(self) -> bool:
        for launch, _ in self.steps:
            if launch.hooked:
                return True
        return prepared.hooked()

    def _with_tensors(self, first: Tensor, given: Sequence[Tensor | None]) -> None:
        """The same, of whoever has to see tensors."""
        found: list[Any] = [*given]
        for size, dtype, _ in self.temporaries:
            found.append(first.new_empty(size, dtype=dtype))
        for whole, _, elements in self.parts:
            found.append(found[whole].view(-1)[elements:])
        found.append(None)
        for launch, pick in self.steps:
            launch(*pick(found))


class Calls(NamedTuple):
    """Launches in C. Their arguments are picked from the tensors' addresses, the stream, descriptors, and constants.

    Attributes:
        encoders: of each descriptor, and the number of the tensor that it is of.
        constants: all other arguments of all launches.
        launches: each one's function, and what picks its arguments.
    """

    encoders: Sequence[tuple[Encoder, int]]
    constants: Sequence[Any]
    launches: Sequence[tuple[Callable[..., Any], Pick]]

    def make(self, values: list[Any], stream: int) -> None:
        """Makes them on a stream of the current device. ``values`` are the tensors' addresses; the rest is appended."""
        values.append(stream)
        for encoder, number in self.encoders:
            values.append(encoded(encoder, values[number])[0])
        values += self.constants
        for launch, pick in self.launches:
            launch(*pick(values))


def of(
    recorded: Recording,
    given: Sequence[Tensor | None],
    fresh: Sequence[Tensor | None],
    temporaries: Sequence[Tensor],
) -> Replay | None:
    """What repeats the recorded launches, or None if they read or wrote anything but the tensors named.

    Nothing but the launches may have touched the tensors. ``given`` ones come from the caller and are told by their
    addresses, so no two may share one; ``fresh`` ones were given as well, and like ``temporaries`` allocated for this
    call, contiguous.
    """
    temporaries = [*recorded.temporaries, *temporaries]
    named = [*given, *fresh, *temporaries]
    numbers: dict[int, int] = {}
    for number, value in enumerate(named):
        if value is not None and value.numel():
            if value.data_ptr() in numbers:
                return None
            numbers[value.data_ptr()] = number
    parts: list[tuple[int, int, int]] = []
    for _, tensors in recorded.steps:
        for value in tensors:
            if value is not None and value.data_ptr() not in numbers:
                part = _part(value, named, range(len(given), len(named)))
                if part is None:
                    return None
                numbers[value.data_ptr()] = len(named) + len(parts)
                parts.append(part)
    none = len(named) + len(parts)
    steps = [
        (launch, [none if v is None else numbers[v.data_ptr()] for v in tensors])
        for launch, tensors in recorded.steps
    ]
    offset, places = 0, []
    for value in temporaries:
        places.append((value.shape, value.dtype, offset))
        offset += -(-value.nbytes // ALIGNED) * ALIGNED
    addresses = {number: address for address, number in numbers.items()}
    picks = [(launch, _pick(found)) for launch, found in steps]
    return Replay(picks, places, offset, parts, _calls(steps, addresses, none + 1))


def _part(value: Tensor, named: Sequence[Tensor | None], among: range) -> tuple[int, int, int] | None:
    for number in among:
        whole = named[number]
        if whole is not None and 0 < value.data_ptr() - whole.data_ptr() < whole.nbytes:
            shift = value.data_ptr() - whole.data_ptr()
            return number, shift, shift // whole.element_size()
    return None


def _calls(
    steps: Sequence[tuple[Launch, Sequence[int]]], addresses: dict[int, int], stream: int
) -> Calls | None:
    """The launches in C, of tensors whose addresses, by number, are those recorded."""
    natives = [launch.native for launch, _ in steps]
    encoders = [
        (encoder, found[place])
        for (_, found), native in zip(steps, natives, strict=True)
        if native
        for place, encoder in native.encoders
    ]
    constants: list[Any] = []
    first_map = stream + 1
    first_constant = first_map + len(encoders)

    def constant(value: Any) -> _Number:
        constants.append(value)
        return _Number(first_constant + len(constants) - 1)

    launches, maps = [], first_map
    for (launch, found), native in zip(steps, natives, strict=True):
        if native is None:
            return None
        tensors: list[Any] = [_Number(number) for number in found]
        for place, encoder in native.encoders:
            sizes = encoded(encoder, addresses[found[place]])[1:]
            tensors[place : place + 1] = [_Number(maps), *sizes]
            maps += 1
        arguments = launch.arguments(_Number(stream), tensors)
        numbers = [value if isinstance(value, _Number) else constant(value) for value in arguments]
        launches.append((native.launch, _pick([number.value for number in numbers])))
    return Calls(encoders, constants, launches)


class _Number(NamedTuple):
    """Where an argument is among all values; anything else is a constant."""

    value: int


def _pick(numbers: Sequence[int]) -> Pick:
    # Of one number, itemgetter gives no tuple.
    return operator.itemgetter(*numbers) if len(numbers) > 1 else lambda values: (values[numbers[0]],)
