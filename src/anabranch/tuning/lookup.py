"""Which configuration a launch gets: a stored result, one searched for now if that is asked for, or the heuristic's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from anabranch.errors import ArgumentError
from anabranch.tuning import key as keys
from anabranch.tuning.cache import Cache
from anabranch.tuning.environment import variable
from anabranch.tuning.key import Key, Place
from anabranch.tuning.search import NothingToCheck, Trial, search
from anabranch.tuning.spec import from_json
from anabranch.tuning.tables import shipped

C = TypeVar("C")
R = TypeVar("R")

HEURISTIC = "heuristic"
"""As an operation's ``config``: what would be chosen if nothing had ever been tuned."""
MODES = ("0", "1", "again")
"""Of ANABRANCH_AUTOTUNE: neither look nor search; search what is not stored; search everything once a process.
Unset: look, but never search."""

_cache = Cache()
_searching = threading.RLock()


class Product(Protocol):
    """What is about to be launched, as the tuner sees it."""

    @property
    def op(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def key(self) -> Key: ...

    def refusal(self, config: Any) -> str | None:
        """Why a configuration cannot run here, or None if it can."""

    def trial(self, default: Any) -> Trial: ...


def choose(product: Product, default: C, *, may_search: bool = True) -> C:
    """The configuration to launch a product with; ``default`` is the heuristic's."""
    mode = _mode()
    if mode != "0" and not may_search:
        mode = None
    place = None if mode == "0" else keys.place(product.device)
    if place is None:
        return default
    stored = _cache.results(place)
    if mode is None and not (stored or shipped(product.op, place)):
        return default
    key = product.key()
    decided = _cache.decided  # before anything is read: a change puts another in its place
    found = decided.get((place, key, mode), default)
    if found is default:
        found = _decide(place, key, mode, product, default)
        # A product that is still to be searched for is not decided.
        if mode is None or found is not None:
            decided[place, key, mode] = found
    return default if found is None else found


def standing(device: torch.device) -> object | None:
    """What lookups without a search stand on: as long as it is the same object, :func:`choose` finds what it found.

    None while searching is allowed, as then it may find something at any call.
    """
    mode = _mode()
    place = None if mode == "0" else keys.place(device)
    if place is None:
        return HEURISTIC
    if mode is not None:
        return None
    _cache.results(place)  # notices changes
    return _cache.decided


class Settled:
    """What a plan came to by the tuner, kept for as long as that :func:`standing` lasts."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[object, Any] = (None, None)  # one pair, as several threads may be here

    def get(self, device: torch.device, find: Callable[[], R]) -> R:
        """What was found last, if it stands; or else what ``find`` gives."""
        now = standing(device)
        known, found = self._last
        if now is None or known is not now:
            found = find()
            self._last = now, found
        result: R = found
        return result


def _decide(place: Place, key: Key, mode: str | None, product: Product, default: C) -> C | None:
    """The best configuration known, or None for the heuristic's."""
    found = _look(place, key, mode)
    if found is None and mode is not None and _may_search(product.device):
        with _searching:  # one at a time: two would time each other
            found = _look(place, key, mode) or _search(place, key, product, default)
    if found is None:
        return None
    try:
        config = from_json(type(default), found["config"])
    except ValueError:
        return None
    return None if product.refusal(config) else config


def _mode() -> str | None:
    mode = variable("ANABRANCH_AUTOTUNE") or None
    if mode is not None and mode not in MODES:
        expected = "unset or one of " + ", ".join(MODES)
        raise ArgumentError("tuning", "ANABRANCH_AUTOTUNE", expected=expected, got=repr(mode))
    return mode


def _look(place: Place, key: Key, mode: str | None) -> Any:
    text = str(key)
    found = _cache.found(place, text)
    if found is not None or mode == "again":
        return found
    return _cache.results(place).get(text) or shipped(key.op, place).get(text)


def _may_search(device: torch.device) -> bool:
    """A search synchronises and allocates, which neither a graph being captured nor a trace can hold."""
    if torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _search(place: Place, key: Key, product: Product, default: C) -> Mapping[str, Any] | None:
    """Searches and stores. Where that fails, this process does not try again."""
    try:
        with torch.no_grad():
            outcome = search(product.trial(default))
    except NothingToCheck:
        return None  # the next call may have data that tells
    except (AssertionError, torch.OutOfMemoryError) as error:
        entry: dict[str, Any] = {"config": dict(vars(default))}
        _cache.remember(place, str(key), entry)
        _warn(f"anabranch keeps the heuristic's tiles for {key}: {error}")
        return entry
    entry = outcome.entry()
    _cache.remember(place, str(key), entry)
    try:
        _cache.add(place, {str(key): entry})
    except OSError as error:
        _warn(f"anabranch cannot store tuning results, each process will search again: {error}")
    return entry


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
