"""Configurations as text, for operators' schemas, and as JSON, for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

C = TypeVar("C")


def to_text(config: Any) -> str:
    """``block_m=128,block_n=256,...``: every field of a dataclass of integers and booleans."""
    # Traced by torch.compile, which cannot read a dataclass's vars() in torch 2.11.
    return ",".join([f"{name}={int(getattr(config, name))}" for name in type(config).__dataclass_fields__])


def from_text(cls: type[C], text: str) -> C:
    """The configuration that :func:`to_text` wrote."""
    values = dict(part.split("=") for part in text.split(","))
    return from_json(cls, {name: int(value) for name, value in values.items()})


def from_json(cls: type[C], value: Mapping[str, Any]) -> C:
    """The configuration that is ``vars()`` of it in JSON.

    Raises:
        ValueError: it is not one of these.
    """
    fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    known = {name: field.type in ("bool", bool) for name, field in fields.items()}
    try:
        return cls(**{name: bool(v) if known[name] else int(v) for name, v in value.items()})
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # the last: infinity
        raise ValueError(f"not a {cls.__name__}: {value!r}") from error
