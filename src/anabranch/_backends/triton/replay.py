"""A whole call's launches, recorded once and made again for calls that look alike.

What is left of a call then are its results' allocation, the tensors' addresses, and the launches themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from anabranch._backends.triton import prepared
from anabranch._backends.triton.device import current, elsewhere
from anabranch._backends.triton.native import Encoder, encoded
from anabranch._backends.triton.prepared import Launch
from anabranch._backends.triton.recording import Memory, Place, Recording, span

ALIGNED = 256
"""Bytes of whose multiples temporary tensors start, in the memory that they share."""
MOST = 128 << 20
"""Bytes of that memory. Larger tensors keep the GPU busy for longer than the host, and are better freed one by one."""
Pick = Callable[[Sequence[Any]], Sequence[Any]]
"""Some of many values, by their places."""


class Result(NamedTuple):
    """A result: its sizes and strides, None for contiguous ones, the number of a tensor to allocate it like, and its
    dtype, None for that one's."""

    shape: torch.Size
    stride: tuple[int, ...] | None
    like: int
    dtype: torch.dtype | None

    def new(self, like: Tensor) -> Tensor:
        """Memory for one."""
        if self.stride is None:
            return like.new_empty(self.shape, dtype=self.dtype)
        return like.new_empty_strided(self.shape, self.stride, dtype=self.dtype)


class Replay(NamedTuple):
    """Launches whose tensors are known by number: those given, results, temporary ones, parts of these, then None.

    Attributes:
        steps: each launch, and what picks its tensors.
        results: each one, or None in its place.
        temporaries: sizes, strides and dtype of each, and where it starts in the memory that they share.
        memory: bytes of that.
        parts: tensors that start inside another: its number, how many bytes in, how many elements in.
        hooks: lists of those who want to be told of a kernel.
        calls: the same launches in C, or None where one is not known, or there are none.
    """

    steps: Sequence[tuple[Launch, Pick]]
    results: Sequence[Result | None]
    temporaries: Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype, int]]
    memory: int
    parts: Sequence[tuple[int, int, int]]
    hooks: Sequence[list[Any]]
    calls: Calls | None

    def run(self, given: Sequence[Tensor | None], addresses: list[int | None]) -> list[Any]:
        """Launches them for tensors like those recorded, the first of which is on the device that all are on.

        ``addresses`` are theirs; more is appended. Returns new results.
        """
        tensors: list[Any] = [*given]
        for result in self.results:
            if result is None:
                value = None
            else:
                shape, stride, like, dtype = result
                plain = stride is None and dtype is None  # as most are, which then take half as long
                value = tensors[like].new_empty(shape) if plain else result.new(tensors[like])
            tensors.append(value)
            addresses.append(None if value is None else value.data_ptr())
        found = tensors[len(given) :]
        first = tensors[0]
        if self.calls is None or any(self.hooks) or prepared.hooked():
            self._with_tensors(first, tensors)
            return found
        values: list[Any] = addresses
        if self.temporaries:
            memory = first.new_empty(self.memory, dtype=torch.uint8)  # kept until all is launched
            start = memory.data_ptr()
            for *_, offset in self.temporaries:
                values.append(start + offset)
        for whole, shift, _ in self.parts:
            values.append(values[whole] + shift)
        values.append(None)
        device = first.device
        if elsewhere(device):
            with current(device):
                self.calls.make(values, device.index)
        else:
            self.calls.make(values, device.index)
        return found

    def _with_tensors(self, first: Tensor, tensors: list[Any]) -> None:
        """The same, of whoever has to see tensors."""
        for shape, stride, dtype, _ in self.temporaries:
            tensors.append(first.new_empty_strided(shape, stride, dtype=dtype))
        for whole, _, elements in self.parts:
            tensors.append(tensors[whole].as_strided((1,), (1,), elements))
        tensors.append(None)
        for launch, pick in self.steps:
            launch(*pick(tensors))


class Calls(NamedTuple):
    """Launches in C. Their arguments are picked from the tensors' addresses, the stream, descriptors, and constants.

    Attributes:
        encoders: of each descriptor, and the number of the tensor that it is of.
        constants: all other arguments of all launches.
        launches: each one's function, and what picks its arguments.
        stream: the current one of a device.
    """

    encoders: Sequence[tuple[Encoder, int]]
    constants: Sequence[Any]
    launches: Sequence[tuple[Callable[..., Any], Pick]]
    stream: Callable[[int], int]

    def make(self, values: list[Any], device: int) -> None:
        """Makes them on the current device. ``values`` are the tensors' addresses; the rest is appended."""
        values.append(self.stream(device))
        for encoder, number in self.encoders:
            values.append(encoded(encoder, values[number])[0])
        values += self.constants
        for launch, pick in self.launches:
            launch(*pick(values))


def of(
    recorded: Recording, given: Sequence[Tensor | None], results: Sequence[Tensor | None]
) -> Replay | None:
    """What repeats the recorded launches and allocates the results, or None if that would not be all.

    ``given`` are all tensors that the recording was. They are alive, as are the results.
    """
    places = [None if value is None else recorded.place(value) for value in results]
    if not recorded.whole or not _own(results, places, recorded.allocated, len(given)):
        return None
    # By the recording's numbers: first those given, then all that was allocated.
    addresses = [0 if value is None else value.data_ptr() for value in given]
    addresses += [at.address for at in recorded.allocated]
    order = {number: number for number in range(len(given))}
    order |= {place.number: len(given) + i for i, place in enumerate(places) if place is not None}
    count = len(given) + len(results)
    passing = [n for n in range(len(given), len(addresses)) if n not in order]
    order |= {number: count + i for i, number in enumerate(passing)}
    memory = [recorded.allocated[number - len(given)] for number in passing]
    uses = [[i for i, (_, found) in enumerate(recorded.steps) if _in(found, number)] for number in passing]
    starts, size = _packed([at.nbytes for at in memory], uses)
    temporaries = [(at.shape, at.stride, at.dtype, start) for at, start in zip(memory, starts, strict=True)]
    if size > MOST:
        return None
    count += len(temporaries)
    inside = sorted(
        {place for _, found in recorded.steps for place in found if place is not None and place.shift}
    )
    parts = {place: count + i for i, place in enumerate(inside)}
    none = count + len(parts)

    def where(place: Place | None) -> int:
        return none if place is None else parts.get(place, order[place.number])

    steps = [(launch, [where(place) for place in found]) for launch, found in recorded.steps]
    at = {order[number]: address for number, address in enumerate(addresses)}
    at |= {i: addresses[place.number] + place.shift for place, i in parts.items()}
    sizes = [1 if value is None else value.element_size() for value in given]
    sizes += [at.dtype.itemsize for at in recorded.allocated]
    return Replay(
        steps=[(launch, _pick(found)) for launch, found in steps],
        results=_results(given, results),
        temporaries=temporaries,
        memory=size,
        parts=[(order[n], shift, shift // sizes[n]) for n, shift in inside],
        hooks=[launch.hooks for launch, _ in steps],
        calls=_calls(steps, at, none + 1),
    )


def _in(places: Sequence[Place | None], number: int) -> bool:
    return any(place is not None and place.number == number for place in places)


def _packed(sizes: Sequence[int], uses: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Where pieces of memory start, and bytes of all: one may be where another was that no later launch uses."""
    starts = [0] * len(sizes)
    placed: list[int] = []
    for i in sorted((i for i in range(len(sizes)) if uses[i]), key=lambda i: uses[i][0]):
        beside = sorted((starts[j], sizes[j]) for j in placed if uses[j][-1] >= uses[i][0])
        for start, size in beside:
            if starts[i] + sizes[i] <= start:
                break
            starts[i] = max(starts[i], -(-(start + size) // ALIGNED) * ALIGNED)
        placed.append(i)
    return starts, max((starts[i] + sizes[i] for i in placed), default=0)


def _own(
    results: Sequence[Tensor | None], places: Sequence[Place | None], allocated: Sequence[Memory], given: int
) -> bool:
    """Whether results are memory that was allocated, each all of its own."""
    found = [(value, place) for value, place in zip(results, places, strict=True) if value is not None]
    numbers = [place.number for _, place in found if place is not None and place.number >= given]
    return len({*numbers}) == len(found) and all(
        place is not None
        and not place.shift
        and allocated[place.number - given].nbytes == span(value)
        and allocated[place.number - given].dtype == value.dtype
        for value, place in found
    )


def _results(given: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> Sequence[Result | None]:
    found: list[Result | None] = []
    dtypes = [None if value is None else value.dtype for value in given]
    for value in results:
        if value is None:
            found.append(None)
        else:
            known = value.dtype in dtypes
            like = dtypes.index(value.dtype) if known else 0
            stride = None if value.is_contiguous() else value.stride()
            found.append(Result(value.shape, stride, like, None if known else value.dtype))
        dtypes.append(None if value is None else value.dtype)
    return found


def _calls(
    steps: Sequence[tuple[Launch, Sequence[int]]], addresses: dict[int, int], stream: int
) -> Calls | None:
    """The launches in C, of tensors whose addresses, by number, are those recorded."""
    natives = [launch.native for launch, _ in steps]
    if None in natives or not natives:  # without any, there is no stream to ask for either
        return None
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
        assert native is not None
        tensors: list[Any] = [_Number(number) for number in found]
        for place, encoder in native.encoders:
            sizes = encoded(encoder, addresses[found[place]])[1:]
            tensors[place : place + 1] = [_Number(maps), *sizes]
            maps += 1
        arguments = launch.arguments(_Number(stream), tensors)
        numbers = [value if isinstance(value, _Number) else constant(value) for value in arguments]
        launches.append((native.launch, _pick([number.value for number in numbers])))
    return Calls(encoders, constants, launches, driver.active.get_current_stream)


class _Number(NamedTuple):
    """Where an argument is among all values; anything else is a constant."""

    value: int


def _pick(numbers: Sequence[int]) -> Pick:
    # Of one number, itemgetter gives no tuple.
    return operator.itemgetter(*numbers) if len(numbers) > 1 else lambda values: (values[numbers[0]],)
