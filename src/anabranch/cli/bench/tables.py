"""The tables that the command prints."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from anabranch.cli.bench.report import Explained, Measured, Report
from anabranch.cli.bench.variants import OURS

LEGEND = {
    "of dense": "share of the speed of plain products of the same sizes, two for a forward and six with the backward",
    "of limit": "as of dense, or where that takes longer the share of the speed of a copy of the least bytes that "
    "must move",
    "keeps": "memory for the backward beyond inputs and output",
    "error": "the largest relative one of output and gradients",
}
"""What the columns mean."""

FEW = 5
"""Rounds below which a median is hardly one."""

WIDE = 10_000
"""Columns: more than any table takes."""

DROPPED = ((), ("TFLOP/s",), ("TFLOP/s", "error"))
"""Columns of a shape that a narrow terminal does without: the first choice that fits it. bench.json has all."""


def show_report(console: Console, report: Report) -> None:
    """Prints everything. No number is shortened, however narrow the terminal is."""
    shown: set[str] = set()
    for cell in report.cells:
        if cell.part == "shape":
            dropped = next((some for some in DROPPED if _fits(console, shape_table(cell, some))), DROPPED[-1])
            _print(console, shape_table(cell, dropped))
            shown |= {"of dense", "keeps", "error"} - set(dropped)
    for part in ("tokens", "skew"):
        cells = [cell for cell in report.cells if cell.part == part]
        for some in _groups(console, part, cells):
            _print(console, sweep_table(part, some))
            shown.add("of limit")
    for phase in report.explained:
        _print(console, explain_table(phase))
        shown.add("of limit")
    flushed = ", the L2 cache flushed before each" if report.l2_flushed else ""
    legend = "".join(f"{name}: {text}\n" for name, text in LEGEND.items() if name in shown)
    done = [row.rounds for cell in report.cells for row in cell.rows if row.rounds]
    fewest = min(done, default=report.rounds)
    rounds = f"{report.rounds}" if fewest >= report.rounds else f"{fewest} to {max(done)} of {report.rounds}"
    _say(console, f"{report.place}\n{legend}ms: medians of {rounds} interleaved rounds{flushed}")
    if fewest < min(FEW, report.rounds):
        text = f"time ran out: some medians are of {fewest} rounds of {report.rounds} and say little on a busy machine"
        console.print(Text(f"{text}; --seconds gives more", "yellow"), soft_wrap=True)
    show_reasons(console, report)


def _fits(console: Console, table: Table) -> bool:
    return Measurement.get(console, console.options.update_width(WIDE), table).maximum <= console.width


def _print(console: Console, table: Table) -> None:
    """Words may go to the next line; where numbers alone need more room than there is, lines are longer."""
    least = Measurement.get(console, console.options.update_width(WIDE), table).minimum
    table.width = least if least > console.width else None
    console.print(table, crop=False)


def _groups(console: Console, part: str, cells: list[Measured]) -> Iterator[list[Measured]]:
    """The points of a sweep, as many at a time as a table has room for."""
    while cells:
        count = len(cells)
        while count > 1 and not _fits(console, sweep_table(part, cells[:count])):
            count -= 1
        yield cells[:count]
        cells = cells[count:]


def show_reasons(console: Console, report: Report) -> None:
    """What was refused, in red, and what was left out; the same reason once."""
    refused: dict[tuple[str, str], list[str]] = {}
    left_out: dict[tuple[str, str], list[str]] = {}
    for cell in report.cells:
        where = f"{cell.shape} T{cell.tokens} {cell.routing} {cell.dtype}"
        for name, why in cell.refused.items():
            refused.setdefault((name, why), []).append(where)
        for name, why in cell.left_out.items():
            left_out.setdefault((name, why), []).append(where)
    for (name, why), places in refused.items():
        console.print(
            Text(f"wrong, not timed: {name}: {why} ({'; '.join(places)})", "bold red"), soft_wrap=True
        )
    for name, why in report.absent.items():
        _say(console, f"left out: {name}: {why}")
    for (name, why), places in left_out.items():
        _say(console, f"left out: {name}: {why} ({'; '.join(places)})")
    for what in report.skipped:
        _say(console, f"skipped: {what}")


def shape_table(cell: Measured, dropped: Collection[str] = ()) -> Table:
    """A row for each variant."""
    table = _table(f"moe_mlp, {cell.shape}, {cell.title}, {cell.routing} routing, {cell.dtype}")
    table.add_column("", overflow="fold")
    speeds = [name for name in ("ms", "TFLOP/s", "of dense") if name not in dropped]
    names = [f"{phase} {name}" if name == "ms" else name for phase in ("fwd", "fwd+bwd") for name in speeds]
    for name in (*names, "keeps MiB", *(["error"] if "error" not in dropped else [])):
        # Narrow, as the numbers are.
        _number(table, name.replace(" ", "\n"))
    flops = 6e-12 * cell.sizes["T"] * cell.sizes["K"] * cell.sizes["H"] * cell.sizes["I"]
    seconds = cell.dense_forward_seconds, cell.dense_training_seconds
    dense = [
        _speed(speeds, took, times * flops / took, 1.0) for took, times in zip(seconds, (1, 3), strict=True)
    ]
    table.add_row("dense products", *dense[0], *dense[1], style="dim")
    for row in cell.rows:
        values = [
            *_speed(speeds, row.forward_seconds, row.forward_tflops, row.forward_of_dense),
            *_speed(speeds, row.training_seconds, row.training_tflops, row.training_of_dense),
            "" if row.saved_bytes is None else f"{row.saved_bytes / 2**20:.1f}",
        ]
        if "error" not in dropped:
            values.append(f"{max(row.errors.values()):.1e}" if row.errors else "")
        table.add_row(row.variant, *values, style="bold" if row.variant.startswith(OURS) else None)
    return table


def _speed(speeds: list[str], seconds: float | None, tflops: float | None, share: float | None) -> list[str]:
    if seconds is None or tflops is None or share is None:
        return [""] * len(speeds)
    digits = 0 if tflops >= 100 else 2
    texts = {"ms": f"{1e3 * seconds:.2f}", "TFLOP/s": f"{tflops:.{digits}f}", "of dense": f"{share:.0%}"}
    return [texts[name] for name in speeds]


def sweep_table(part: str, cells: list[Measured]) -> Table:
    """A row for each variant and quantity, a column for each point."""
    first = cells[0]
    by = "numbers of tokens" if part == "tokens" else "exponents of Zipf's law"
    table = _table(f"moe_mlp, {first.shape}, by {by}, {first.dtype}")
    table.add_column("", overflow="fold")
    table.add_column("", no_wrap=True, min_width=len("replayed ms"))
    for cell in cells:
        _number(table, f"T{cell.tokens}" if part == "tokens" else f"{cell.exponent:g}")

    def line(name: str, what: str, values: list[str]) -> None:
        if any(values):
            table.add_row(name, what, *values, style="bold" if name.startswith(OURS) else None)

    for name in dict.fromkeys(row.variant for cell in cells for row in cell.rows):
        rows = [cell.row(name) for cell in cells]
        line(name, "fwd ms", [_ms(row.forward_seconds if row else None) for row in rows])
        line("", "replayed ms", [_ms(row.replay_seconds if row else None) for row in rows])
        line("", "host ms", [_ms(row.host_seconds if row else None) for row in rows])
        line("", "of limit", [_percent(row.forward_of_limit if row else None) for row in rows])
        line("", "fwd+bwd ms", [_ms(row.training_seconds if row else None) for row in rows])
    return table


def explain_table(phase: Explained) -> Table:
    """A row for each kernel."""
    busy = sum(line.seconds for line in phase.lines)
    title = (
        f"{phase.shape}, {phase.phase}: {1e3 * phase.seconds:.3f} ms, of which kernels run {1e3 * busy:.3f}"
    )
    table = _table(title)
    for name in ("what", "kernel"):
        table.add_column(name, overflow="fold")
    for name in ("ms", "share", "limit ms", "of limit", "bound by"):
        _number(table, name.replace(" ", "\n"))
    for line in phase.lines:
        limit = line.limit_seconds
        table.add_row(
            line.what or "not known",
            ", ".join(dict.fromkeys(name[:48] for name in line.kernels))[:60],
            f"{1e3 * line.seconds:.3f}",
            _percent(line.seconds / busy if busy else None),
            _ms(limit),
            _percent(limit / line.seconds if limit and line.seconds else None),
            line.bound or "",
            style=None if line.what else "dim",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")


def _number(table: Table, name: str) -> None:
    # What wraps gives way first, and that is words.
    table.add_column(name, justify="right", vertical="bottom", no_wrap=True)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
