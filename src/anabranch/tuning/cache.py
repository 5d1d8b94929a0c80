"""Results on disk: a JSON file for each GPU, Triton and driver, which any number of processes may write."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from anabranch.tuning.environment import variable
from anabranch.tuning.key import Place

FORMAT = 1
"""Raised when kernels or keys change so much that older results say nothing."""

Results = Mapping[str, Mapping[str, Any]]
"""Key as text -> ``config`` and the measured times."""


def folder() -> Path:
    """ANABRANCH_CACHE_DIR, or the user's cache."""
    given = os.environ.get("ANABRANCH_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"


def file_of(place: Place) -> Path:
    """Where a place's results are."""
    return _file(*map(variable, _DECIDES), place)


_DECIDES = ("ANABRANCH_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "USERPROFILE")
"""The variables that :func:`folder` goes by."""


@lru_cache(64)
def _file(*variables_and_place: Any) -> Path:
    """Remembered, as a call may ask for it in between launches."""
    return folder() / variables_and_place[-1].file


def document(results: Results, **measured: Any) -> dict[str, Any]:
    """What a file holds."""
    return {"format": FORMAT, "measured": measured, "results": dict(sorted(results.items()))}


def parse(text: str) -> Results:
    """The results in a file's text; none if an older or newer format wrote it.

    Raises:
        ValueError: no such file would say that.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        raise ValueError("it holds no results")
    if value["format"] != FORMAT:
        return {}
    results = value.get("results")
    if not isinstance(results, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("config"), dict) for entry in results.values()
    ):
        raise ValueError("its results are not configurations by key")
    return results


class Cache:
    """The files as this process last read them, and what it found itself. A file that has changed is read again.

    Attributes:
        decided: what lookups have come to, forgotten whenever anything they were based on changes.
        poll: how many seconds pass before a file is asked whether it has changed; a launch should not wait for a disk.
    """

    def __init__(self, poll: float = 1.0) -> None:
        self.decided: dict[Any, Any] = {}
        self.poll = poll
        self._found: dict[tuple[Place, str], Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._read: dict[tuple[str | None, Place], tuple[float, Any, Results]] = {}

    def found(self, place: Place, key: str) -> Mapping[str, Any] | None:
        """What this process found for a key, whether or not it could be written."""
        return self._found.get((place, key))

    def remember(self, place: Place, key: str, entry: Mapping[str, Any]) -> None:
        """Keeps what this process found."""
        self._found[place, key] = entry
        self.decided = {}

    def results(self, place: Place) -> Results:
        """What is stored for a place: nothing if there is no file, or, with one warning, if it is corrupt."""
        which = variable("ANABRANCH_CACHE_DIR"), place
        now = time.monotonic()
        known = self._read.get(which)
        if known is not None and now < known[0]:
            return known[2]
        path = file_of(place)
        with self._lock:
            stamp = _stamp(path)
            known = self._read.get(which)
            if known is None or known[1] != stamp:
                known = now, stamp, _load(path) if stamp else {}
                self.decided = {}
            self._read[which] = now + self.poll, *known[1:]
        return known[2]

    def add(self, place: Place, results: Results) -> None:
        """Adds results to a place's file, beside what other processes wrote there.

        Raises:
            OSError: it could not be written. The file is as it was.
        """
        path = file_of(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            merged = {**(_load(path, warn=False) if path.exists() else {}), **results}
            write(path, document(merged, **vars(place)))
        self._read.clear()


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON aside and renames it when it is on the disk."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _stamp(path: Path) -> Any:
    """Differs after every write: a new file took the old one's place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _load(path: Path, warn: bool = True) -> Results:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if warn:
            message = f"anabranch ignores the tuning results in {path}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes that add results. Without file locks, the last to write wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
