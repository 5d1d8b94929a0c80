"""Being asked to stop: by Ctrl-C, by a scheduler or a shutdown (SIGTERM), by a terminal that is closed (SIGHUP)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupted(Exception):  # noqa: N818 - no error
    """The demo was asked to stop. Its text says what was saved."""

    def __init__(self, text: str, number: int = signal.SIGINT) -> None:
        super().__init__(text)
        self.code = exit_code(number)
        """What a shell reports of a program that the signal ended."""


def exit_code(number: int) -> int:
    """Of a program that a signal ended."""
    return 128 + number


class Stop:
    """Set by the first signal. A second Ctrl-C interrupts at once; so does any signal once ``at_once`` is set."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_once = False

    def __call__(self) -> bool:
        return self.number is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        # A closed terminal may send SIGHUP twice, and SIGTERM after it: that must not break off the saving.
        again = self.number is not None and number == signal.SIGINT
        if self.number is None:
            self.number = number
        if again or self.at_once:
            raise KeyboardInterrupt(number)

    def interrupted(self, text: str) -> Interrupted:
        """What to raise for the signal that came."""
        return Interrupted(text, self.number or signal.SIGINT)


@contextmanager
def on_signals() -> Iterator[Stop]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP ask to stop instead of ending the process."""
    stop = Stop()
    before = {}
    for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
        # Started by nohup, a process is to outlive its terminal.
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop.handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # None is a handler that was not set in Python, and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
