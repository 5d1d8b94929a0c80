"""The errors anabranch raises, all worded alike: ``op: argument: expected ..., got ...``."""

__all__ = ["ArgumentError", "ArgumentTypeError", "UnsupportedError"]


class _Worded(Exception):  # noqa: N818 - the three below are the errors
    """What the three errors share: how they are made, and that they can be pickled."""

    def __init__(self, op: str, argument: str, *, expected: str, got: object) -> None:
        super().__init__(f"{op}: {argument}: expected {expected}, got {got}")

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), str(self))


def _again(cls: type[Exception], message: str) -> Exception:
    error = cls.__new__(cls, message)
    error.args = (message,)
    return error


class ArgumentError(_Worded, ValueError):
    """An argument has a wrong value or shape, whatever the backend."""


class ArgumentTypeError(_Worded, TypeError):
    """An argument has a wrong type or dtype, whatever the backend."""


class UnsupportedError(_Worded, NotImplementedError):
    """The call is well formed, but what was asked for cannot serve it here."""
