"""What is on the screen while the demo trains."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINES = 20  # where there is no terminal, a line this many times a run


class TrainingProgress:
    """A bar with loss, tokens/s and time left; plain lines where the output is no terminal."""

    def __init__(self, console: Console, start: int, steps: int, tokens_per_step: int) -> None:
        self.console, self.start, self.steps, self.tokens = console, start, steps, tokens_per_step
        self.done, self.bits = start, 0.0
        self.begin = time.perf_counter()
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self.task = self.progress.add_task("training", total=steps, completed=start, figures="")

    def __enter__(self) -> TrainingProgress:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    @property
    def tokens_per_second(self) -> float:
        """Since the start of this run."""
        return (self.done - self.start) * self.tokens / max(time.perf_counter() - self.begin, 1e-9)

    def advance(self, bits: float) -> None:
        """Takes note of one more step."""
        # Smoothed as much as keeps the figure readable.
        self.bits = bits if self.done == self.start else 0.95 * self.bits + 0.05 * bits
        self.done += 1
        rate = self.tokens_per_second
        left = (self.steps - self.done) * self.tokens / rate
        clock = f"{int(left) // 60}:{int(left) % 60:02d}"
        figures = f"{self.bits:.3f} bits/byte  {rate:,.0f} tokens/s  {clock} left"
        self.progress.update(self.task, completed=self.done, figures=figures)
        if not self.console.is_terminal and (
            self.done == self.steps or self.done % max(1, self.steps // LINES) == 0
        ):
            self.console.print(f"step {self.done}/{self.steps}  {figures}", highlight=False)
