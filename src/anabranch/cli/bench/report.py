"""The benchmark's table, picture and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from anabranch.cli.bench.variants import OURS
from anabranch.cli.files import write_aside, write_json

COLOURS = {OURS: "#0b6e8a"}
LETTERS = {"tokens": "T", "hidden": "H", "intermediate": "I", "experts": "E", "top_k": "K"}
PEER, INK, MUTED = "#a9c4cd", "#1b2a33", "#9aa7ae"


@dataclass(frozen=True)
class Row:
    """One variant in one dtype. Seconds are medians, shares are of the dense products' speed in this run."""

    variant: str
    dtype: str
    forward_seconds: float
    training_seconds: float
    forward_share: float
    training_share: float
    saved_bytes: int | None


@dataclass(frozen=True)
class Report:
    """bench.json."""

    case: str
    sizes: dict[str, int]
    rows: list[Row]
    left_out: dict[str, str]
    device: str
    device_name: str
    threads: int
    omp_wait_policy: str | None
    rounds: int
    torch: str
    commit: str | None
    date: str

    @property
    def title(self) -> str:
        """Sizes by their letters."""
        return "moe_mlp, " + " ".join(f"{LETTERS[name]}{size}" for name, size in self.sizes.items())

    @property
    def place(self) -> str:
        """Where and with what it was made."""
        threads = f", {self.threads} threads" if self.device == "cpu" else ""
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.device_name}{threads}, torch {self.torch}{commit}, {self.date}"


def write_report(out: Path, report: Report) -> None:
    """Writes bench.png and bench.json, each whole or not at all.

    Raises:
        Failure: one of them could not be written.
    """
    picture = draw(report)
    write_aside(out / "bench.png", lambda path: picture.savefig(path, format="png"))
    write_json(out / "bench.json", asdict(report))


def show_report(console: Console, report: Report) -> None:
    """Prints the table."""
    table = Table(title=report.title, title_justify="left", caption=report.place, caption_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("dtype")
    for name in ("fwd ms", "of dense", "fwd+bwd ms", "of dense", "keeps MiB"):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            row.variant,
            row.dtype,
            f"{1e3 * row.forward_seconds:.2f}",
            f"{row.forward_share:.0%}",
            f"{1e3 * row.training_seconds:.2f}",
            f"{row.training_share:.0%}",
            "" if row.saved_bytes is None else f"{row.saved_bytes / 2**20:.1f}",
            style="bold" if row.variant == OURS else None,
        )
    console.print(table)
    console.print(
        "of dense: share of the speed of the two products alone, which fwd+bwd counts three times\n"
        "keeps: memory saved for the backward beyond the inputs",
        highlight=False,
        soft_wrap=True,
    )
    for name, reason in report.left_out.items():
        console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True, markup=False)


def draw(report: Report) -> Figure:
    """Shares of the dense products' speed, as bars: a panel for each dtype and direction."""
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    figure = Figure(figsize=(9.0, 0.9 + 1.7 * len(dtypes)), dpi=150, layout="constrained")
    grid = figure.subplots(len(dtypes), 2, squeeze=False, sharex=True)
    for line, dtype in zip(grid, dtypes, strict=True):
        rows = [row for row in report.rows if row.dtype == dtype and row.saved_bytes is not None][::-1]
        names = [row.variant for row in rows]
        for axes, title, values in (
            (line[0], "forward", [row.forward_share for row in rows]),
            (line[1], "forward + backward", [row.training_share for row in rows]),
        ):
            bars = axes.barh(names, values, color=[COLOURS.get(name, PEER) for name in names], height=0.62)
            axes.bar_label(bars, [f"{value:.0%}" for value in values], padding=3, color=INK, fontsize=9)
            axes.axvline(1, color=MUTED, linestyle="--", linewidth=1)
            axes.set_title(f"{dtype}, {title}", loc="left", color=INK, fontsize=10)
            axes.set_xlim(0, 1.15 * max(1.0, *values))
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_formatter("{x:.0%}")
    for axes in grid[:, 1]:
        axes.set_yticklabels([])
    figure.suptitle(f"{report.title}: share of the dense products' speed", x=0.01, ha="left", color=INK)
    figure.supxlabel(report.place, x=0.01, ha="left", fontsize=8, color=MUTED)
    return figure
