"""Errors that speak of the function which the user called, and of its arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")


def speaks_of(
    arguments: dict[str, str] | None = None, name: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Rewords what the functions under an adapter raise: its name for theirs, its ``arguments`` for theirs."""
    names = arguments or {}
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    words = re.compile(rf"(?<![\w.])(?:{'|'.join(longest_first)})(?!\w)") if names else None

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_dynamo_compiling():
                # What is raised again loses its text in traced code.
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except (ArgumentError, ArgumentTypeError, UnsupportedError) as error:
                _, _, rest = str(error).partition(": ")
                if words is not None:
                    rest = words.sub(lambda match: names[match[0]], rest)
                error.args = (f"{name or function.__name__}: {rest}",)
                raise

        return call

    return decorate
