"""What is on the screen while the demo trains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINES = 20  # where there is no terminal, a line this many times a run
MEAN_OF = 20  # steps, and fewer at the start, where the loss falls so fast that more of them would lag


def running_mean(losses: Sequence[float]) -> tuple[float, int]:
    """The mean of the last fifth of the losses, of at most MEAN_OF; and of how many that is."""
    count = min(MEAN_OF, max(1, len(losses) // 5))
    return statistics.fmean(losses[-count:]), count


class TrainingProgress:
    """A bar with loss, tokens/s and time left; plain lines where the output is no terminal."""

    def __init__(
        self,
        console: Console,
        losses: Sequence[float],
        seconds: Sequence[float],
        steps: int,
        tokens_per_step: int,
    ) -> None:
        """``losses`` has those of the steps made, and grows with them; so does ``seconds`` with those made here."""
        self.console, self.losses, self.seconds = console, losses, seconds
        self.steps, self.tokens = steps, tokens_per_step
        self.start = self.done = len(losses)
        self.begin = time.perf_counter()
        self.progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}  {task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self.task = self.progress.add_task("training", total=steps, completed=self.start, figures="")

    def __enter__(self) -> TrainingProgress:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    @property
    def tokens_per_second(self) -> float:
        """By the median of the steps since the start of this run: validating and saving are no part of a step."""
        return self.tokens / max(statistics.median(self.seconds), 1e-9)

    def advance(self) -> None:
        """Takes note of one more step."""
        self.done = len(self.losses)
        bits, count = running_mean(self.losses)
        rate = self.tokens_per_second
        elapsed = time.perf_counter() - self.begin
        left = (self.steps - self.done) * elapsed / (self.done - self.start)
        clock = f"{int(left) // 60}:{int(left) % 60:02d}"
        mean = f"mean of {count} step{'s' if count > 1 else ''}"
        figures = f"{bits:.3f} bits/byte ({mean})  {rate:,.0f} tokens/s  {clock} left"
        self.progress.update(self.task, completed=self.done, figures=figures)
        if not self.console.is_terminal and (
            self.done == self.steps or self.done % max(1, self.steps // LINES) == 0
        ):
            self.console.print(f"step {self.done}/{self.steps}  {figures}", highlight=False)
