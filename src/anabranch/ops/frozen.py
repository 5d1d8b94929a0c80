"""Frozen dataclasses, made without the __init__ that sets their fields one by one, at a price for each."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

C = TypeVar("C")


def frozen(cls: type[C], **fields: Any) -> C:
    """``cls(**fields)`` of a dataclass without slots whose other fields have defaults."""
    if is_dynamo_compiling():
        return cls(**fields)
    made = object.__new__(cls)
    made.__dict__.update(fields)
    return made
