"""The tables that the command prints."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from anabranch.cli.bench.report import Explained, Measured, Report, Row
from anabranch.cli.bench.variants import OURS

LEGEND = """\
of dense: share of the speed of plain products of the same sizes, two for a forward and six with the backward
of limit: the same, or where that takes longer the share of the speed of a copy of the least bytes that must move
keeps: memory for the backward beyond inputs and output · error: the largest relative one of output and gradients
ms: medians of interleaved rounds\
"""


def show_report(console: Console, report: Report) -> None:
    """Prints everything."""
    shapes = [cell for cell in report.cells if cell.part == "shape"]
    for _, group in groupby(shapes, key=lambda cell: (cell.shape, cell.dtype)):
        console.print(shape_table(list(group)))
    for part in ("tokens", "skew"):
        cells = [cell for cell in report.cells if cell.part == part]
        if cells:
            console.print(sweep_table(part, cells))
    for phase in report.explained:
        console.print(explain_table(phase))
    flushed = ", the L2 cache flushed before each" if report.l2_flushed else ""
    _say(console, f"{report.place}\n{LEGEND}{flushed}")
    show_reasons(console, report)


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


def shape_table(cells: list[Measured]) -> Table:
    """A row for each variant, columns for each routing."""
    first = cells[0]
    table = Table(title=f"moe_mlp, {first.shape}, {first.title}, {first.dtype}", title_justify="left")
    table.add_column("", no_wrap=True)
    for cell in cells:
        for name in (f"{cell.routing}\nfwd ms", "TFLOP/s", "of dense", "fwd+bwd ms", "TFLOP/s", "of dense"):
            table.add_column(name, justify="right", vertical="bottom")
    for name in ("keeps MiB", "error"):
        table.add_column(name, justify="right", vertical="bottom")
    dense: list[str] = []
    for cell in cells:
        flops = 6e-12 * cell.sizes["T"] * cell.sizes["K"] * cell.sizes["H"] * cell.sizes["I"]
        for seconds, factor in ((cell.dense_forward_seconds, 1), (cell.dense_training_seconds, 3)):
            dense += [
                f"{1e3 * seconds:.2f}",
                f"{factor * flops / seconds:.{_digits(flops / seconds)}f}",
                "100%",
            ]
    table.add_row("dense products", *dense, "", "", style="dim")
    for name in dict.fromkeys(row.variant for cell in cells for row in cell.rows):
        found = [cell.row(name) for cell in cells]
        values = [text for row in found for text in _speeds(row)]
        rows = [row for row in found if row]
        errors = [error for row in rows for error in row.errors.values()]
        kept = next((row.saved_bytes for row in rows if row.saved_bytes is not None), None)
        table.add_row(
            name,
            *values,
            "" if kept is None else f"{kept / 2**20:.1f}",
            f"{max(errors):.1e}" if errors else "",
            style="bold" if name.startswith(OURS) else None,
        )
    return table


def _digits(tflops: float) -> int:
    return 0 if tflops >= 100 else 2


def _speeds(row: Row | None) -> list[str]:
    if row is None:
        return [""] * 6
    found = []
    for seconds, tflops, share in (
        (row.forward_seconds, row.forward_tflops, row.forward_of_dense),
        (row.training_seconds, row.training_tflops, row.training_of_dense),
    ):
        if seconds is None or tflops is None or share is None:
            found += ["", "", ""]
        else:
            found += [f"{1e3 * seconds:.2f}", f"{tflops:.{_digits(tflops)}f}", f"{share:.0%}"]
    return found


def sweep_table(part: str, cells: list[Measured]) -> Table:
    """A row for each variant and quantity, a column for each point."""
    first = cells[0]
    by = "numbers of tokens" if part == "tokens" else "exponents of Zipf's law"
    table = Table(title=f"moe_mlp, {first.shape}, by {by}, {first.dtype}", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for cell in cells:
        table.add_column(f"T{cell.tokens}" if part == "tokens" else f"{cell.exponent:g}", justify="right")

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
    table = Table(title=title, title_justify="left")
    for name in ("what", "kernel"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "share", "limit ms", "of limit", "bound by"):
        table.add_column(name, justify="right")
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


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
