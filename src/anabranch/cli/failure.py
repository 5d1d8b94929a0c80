"""Failing in one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Failure(Exception):  # noqa: N818 - what users did or have, not an error in the program
    """Something the user can put right. Its text is one line, all that they see."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong with files while writing ``path`` into a Failure."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Failure(f"cannot write {path}: the disk is full") from error
        raise Failure(f"cannot write {path}: {error.strerror or error}") from error
