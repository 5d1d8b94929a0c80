"""Environment variables that every call asks for."""

from __future__ import annotations

import os
from functools import cache


def variable(name: str) -> str | None:
    """``os.environ.get(name)``, which raises and catches an error where the variable is not set."""
    # What os.environ is made over; where there is nothing of the kind, it is asked itself.
    stored = getattr(os.environ, "_data", None)
    if stored is not None and _stored_as(name) not in stored:
        return None
    return os.environ.get(name)


@cache
def _stored_as(name: str) -> object:
    return os.environ.encodekey(name)
