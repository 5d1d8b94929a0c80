"""The errors anabranch raises, all worded alike: ``op: argument: expected ..., got ...``."""

__all__ = ["ArgumentError", "ArgumentTypeError", "UnsupportedError"]


def _message(op: str, argument: str, expected: str, got: object) -> str:
    return f"{op}: {argument}: expected {expected}, got {got}"


def _again(cls: type[Exception], message: str) -> Exception:
    error = cls.__new__(cls, message)
    error.args = (message,)
    return error


class ArgumentError(ValueError):
    """An argument has a wrong value or shape, whatever the backend."""

    def __init__(self, op: str, argument: str, *, expected: str, got: object) -> None:
        super().__init__(_message(op, argument, expected, got))

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), str(self))


class ArgumentTypeError(TypeError):
    """An argument has a wrong type or dtype, whatever the backend."""

    def __init__(self, op: str, argument: str, *, expected: str, got: object) -> None:
        super().__init__(_message(op, argument, expected, got))

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), str(self))


class UnsupportedError(NotImplementedError):
    """The call is well formed, but what was asked for cannot serve it here."""

    def __init__(self, op: str, argument: str, *, expected: str, got: object) -> None:
        super().__init__(_message(op, argument, expected, got))

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), str(self))
