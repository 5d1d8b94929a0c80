"""The errors anabranch raises, all worded alike: ``op: argument: expected ..., got ...``."""

from torch.compiler import is_dynamo_compiling

__all__ = ["ArgumentError", "ArgumentTypeError", "UnsupportedError"]


class _Worded(Exception):  # noqa: N818 - the three below are the errors
    """What the three errors share: how they are made, and that they can be pickled."""

    def __init__(self, op: str, argument: str, *, expected: str, got: object) -> None:
        text = f"{op}: {argument}: expected {expected}, got {got}"
        if is_dynamo_compiling():
            # A compiler reports the arguments of the constructor, so it gets one whose argument is the text.
            raise _TRACED[type(self)](text)
        super().__init__(text)

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


_TRACED: dict[type[Exception], type[Exception]] = {
    kind: type(kind.__name__, (kind,), {"__init__": Exception.__init__, "__doc__": kind.__doc__})
    for kind in (ArgumentError, ArgumentTypeError, UnsupportedError)
}
"""Each error as traced code raises it: made of its text alone. None of them outlives the trace."""
