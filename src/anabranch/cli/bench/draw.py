"""The picture: shares of the ceilings, memory, and the sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anabranch.cli.bench.variants import OURS

if TYPE_CHECKING:
    from anabranch.cli.bench.report import Measured, Report, Row

INK, MUTED, ACCENT = "#1b2a33", "#9aa7ae", "#0b6e8a"
PEER = "#a9c4cd"
LINES = ("#c2703d", "#5b8c5a", "#8a6fb0", "#b8a03a", "#b0566f", "#6f7f88", "#3d8fc2", "#7a5c3d", "#444444")
Value = Callable[["Row"], "float | None"]


def draw(report: Report) -> Figure:
    """A line of bars for each shape, dtype and routing, then a line of curves for each sweep."""
    bars = [cell for cell in report.cells if cell.part == "shape" and cell.rows]
    sweeps = [
        (part, cells)
        for part in ("tokens", "skew")
        if len(cells := [cell for cell in report.cells if cell.part == part and cell.rows]) > 1
    ]
    most = max((len(cell.rows) for cell in bars), default=1)
    heights = [0.7 + 0.24 * most] * len(bars) + [3.2] * len(sweeps)
    figure = Figure(figsize=(13.0, 0.8 + sum(heights or [1.0])), dpi=130, layout="constrained")
    lines = max(1, len(heights))
    grid = figure.subplots(lines, 3, squeeze=False, gridspec_kw={"height_ratios": heights or [1.0]})
    for axes, cell in zip(grid, bars, strict=False):
        title = f"{cell.shape}, {cell.routing}, {cell.dtype}"
        _bars(axes[0], cell, f"{title}: forward", lambda row: row.forward_of_limit, "{:.0%}", 1.0)
        _bars(axes[1], cell, "forward + backward", lambda row: row.training_of_limit, "{:.0%}", 1.0)
        _bars(axes[2], cell, "kept for the backward, MiB", _mebibytes, "{:.4g}", None)
        for one in axes[1:]:
            one.set_yticklabels([])
    for axes, (part, cells) in zip(grid[len(bars) :], sweeps, strict=True):
        _curves(axes, part, cells)
    figure.suptitle("moe_mlp: share of what this machine could do at best", x=0.01, ha="left", color=INK)
    figure.supxlabel(report.place, x=0.01, ha="left", fontsize=8, color=MUTED)
    return figure


def _mebibytes(row: Row) -> float | None:
    return None if row.saved_bytes is None else row.saved_bytes / 2**20


def _bars(axes: Axes, cell: Measured, title: str, value: Value, label: str, mark: float | None) -> None:
    rows = cell.rows[::-1]
    values = [value(row) for row in rows]
    known = [number or 0.0 for number in values]
    colours = [ACCENT if row.variant.startswith(OURS) else PEER for row in rows]
    made = axes.barh([row.variant for row in rows], known, color=colours, height=0.66)
    labels = ["" if number is None else label.format(number) for number in values]
    axes.bar_label(made, labels, padding=3, color=INK, fontsize=8)
    if mark is not None:
        axes.axvline(mark, color=MUTED, linestyle="--", linewidth=1)
    axes.set_title(title, loc="left", color=INK, fontsize=9)
    axes.set_xlim(0, 1.18 * max(mark or 0.0, *known, 1e-9))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=7)


def _curves(axes: list[Axes], part: str, cells: list[Measured]) -> None:
    names = list(dict.fromkeys(row.variant for cell in cells for row in cell.rows))
    others = [name for name in names if not name.startswith(OURS)]
    panels: list[tuple[str, Value]] = [
        ("forward, share of the limit", lambda row: row.forward_of_limit),
        ("forward + backward, share of the limit", lambda row: row.training_of_limit),
        ("forward, ms", lambda row: None if row.forward_seconds is None else 1e3 * row.forward_seconds),
    ]
    for one, (title, value) in zip(axes, panels, strict=True):
        for name in names:
            points = [
                (cell.tokens if part == "tokens" else cell.exponent, number)
                for cell in cells
                if (row := cell.row(name)) and (number := value(row)) is not None
            ]
            ours = name.startswith(OURS)
            colour = ACCENT if ours else LINES[others.index(name) % len(LINES)]
            if points:
                style = {OURS: "o-"}.get(name, "o:" if ours else "o-")
                width = 2.2 if ours else 1.1
                one.plot(*zip(*sorted(points), strict=True), style, ms=3, label=name, color=colour, lw=width)
        one.set_title(f"{cells[0].shape}, {title}", loc="left", color=INK, fontsize=9)
        one.set_xlabel("tokens" if part == "tokens" else "exponent of Zipf's law, 0 is random", fontsize=8)
        if part == "tokens":
            one.set_xscale("log", base=2)
        if title.endswith("ms"):
            one.set_yscale("log")
        else:
            one.set_ylim(bottom=0)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=7)
    axes[0].legend(fontsize=7, frameon=False)
