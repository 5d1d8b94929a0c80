"""What was measured, as it is written to bench.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from anabranch.cli.bench.draw import draw
from anabranch.cli.files import write_aside, write_json


@dataclass(frozen=True)
class Row:
    """One variant of a cell. Seconds are medians; of_dense and of_limit are shares of the speed of the cell's ceilings.

    ``training`` is forward and backward. None is what was not, or could not be, measured.
    """

    variant: str
    forward_seconds: float | None
    training_seconds: float | None
    forward_tflops: float | None
    training_tflops: float | None
    forward_of_dense: float | None
    training_of_dense: float | None
    forward_of_limit: float | None
    training_of_limit: float | None
    replay_seconds: float | None
    host_seconds: float | None
    saved_bytes: int | None
    errors: dict[str, float]
    rounds: int


@dataclass(frozen=True)
class Measured:
    """One cell: all variants on one problem."""

    part: str
    shape: str
    sizes: dict[str, int]
    active_experts: int
    dtype: str
    routing: str
    exponent: float
    dense_forward_seconds: float
    dense_training_seconds: float
    copy_bytes_per_second: float
    forward_limit_seconds: float
    training_limit_seconds: float
    rows: list[Row]
    refused: dict[str, str]
    left_out: dict[str, str]

    @property
    def tokens(self) -> int:
        """T."""
        return self.sizes["T"]

    @property
    def title(self) -> str:
        """Sizes by their letters."""
        return " ".join(f"{letter}{size}" for letter, size in self.sizes.items())

    def row(self, variant: str) -> Row | None:
        """The row of a variant, if it was measured."""
        return next((row for row in self.rows if row.variant == variant), None)


@dataclass(frozen=True)
class Line:
    """One kernel of a step, or several that do one thing. ``limit_seconds`` is None where it is not known."""

    what: str | None
    kernels: list[str]
    seconds: float
    limit_seconds: float | None
    bound: str | None


@dataclass(frozen=True)
class Explained:
    """One phase of a step of ours, kernel by kernel; ``seconds`` of the phase as a whole, gaps included."""

    shape: str
    phase: str
    seconds: float
    lines: list[Line]


@dataclass
class Report:
    """bench.json."""

    device: str
    device_name: str
    threads: int
    omp_wait_policy: str | None
    rounds: int
    l2_flushed: bool
    torch: str
    versions: dict[str, str]
    commit: str | None
    date: str
    cells: list[Measured] = field(default_factory=list)
    explained: list[Explained] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Where and with what it was made."""
        many = "thread" if self.threads == 1 else "threads"
        threads = f", {self.threads} {many}" if self.device == "cpu" else ""
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.device_name}{threads}, torch {self.torch}{commit}, {self.date}"


def write_report(out: Path, report: Report) -> None:
    """Writes bench.png and bench.json, each whole or not at all.

    Raises:
        Failure: one of them could not be written.
    """
    if any(cell.rows for cell in report.cells):
        picture = draw(report)
        write_aside(out / "bench.png", lambda path: picture.savefig(path, format="png"))
    write_json(out / "bench.json", asdict(report))
