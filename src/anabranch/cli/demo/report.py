"""The demo's end: a table, a sample, two pictures, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from anabranch.cli.demo.config import Config
from anabranch.cli.demo.train import History
from anabranch.cli.files import write_aside, write_json

SUMMARY = "summary.json"
FILES = (SUMMARY, "sample.txt", "loss.png", "experts.png")
"""What the report is made of."""

ON_SPEED = (
    "with layers as small as these a plain loop over experts can be as fast on a CPU; "
    "how larger ones fare is in docs/perf/cpu.md"
)

INK, MUTED, TRAIN, VALIDATION, WHOLE = "#1b2a33", "#9aa7ae", "#8fb8c9", "#0b6e8a", "#c8553d"


@dataclass(frozen=True)
class Summary:
    """summary.json. ``step_seconds`` is the median of the training's steps, and ``tokens_per_second`` goes by it;
    ``seconds`` is of everything. Of a run that was interrupted both are of the part since it was resumed.

    ``loop_ratio`` and ``experts_share`` are of medians taken in turns after the training: a step as it is,
    ``compared_step_seconds``, the same step with a plain loop over experts, ``loop_step_seconds``, and the experts
    alone. The saved bytes are what the experts of all layers, or such loops, keep for the backward beyond their inputs.
    """

    val_bits_per_byte: float
    zlib_bits_per_byte: float
    tokens_per_second: float
    loop_ratio: float
    experts_share: float
    step_seconds: float
    loop_step_seconds: float
    compared_step_seconds: float
    saved_bytes: int
    loop_saved_bytes: int
    parameters_total: int
    parameters_active: int
    steps: int
    seconds: float
    text: str
    seed: int
    threads: int
    device: str
    device_name: str
    torch: str
    commit: str | None
    date: str


def write_report(
    out: Path, summary: Summary, history: History, load: Tensor, sample: tuple[str, str], config: Config
) -> None:
    """Writes the pictures, the sample and, last, summary.json; each whole or not at all.

    Raises:
        Failure: one of them could not be written.
    """
    curve, heat = loss_curve(summary, history, config), load_map(load)
    write_aside(out / "loss.png", lambda path: curve.savefig(path, format="png"))
    write_aside(out / "experts.png", lambda path: heat.savefig(path, format="png"))
    write_aside(out / "sample.txt", lambda path: path.write_text("".join(sample), encoding="utf-8"))
    write_json(out / SUMMARY, asdict(summary))


def show_report(console: Console, summary: Summary, sample: tuple[str, str]) -> None:
    """Prints the sample and the table."""
    console.print(Panel(Text.assemble((sample[0], "dim"), sample[1]), title="a sample (the prompt is dim)"))
    table = Table(show_header=False, title="anabranch demo", title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = {
        "validation (lower is better)": f"{summary.val_bits_per_byte:.3f} bits/byte",
        "zlib on the same bytes": f"{summary.zlib_bits_per_byte:.3f} bits/byte",
        "parameters, total": f"{summary.parameters_total:,}",
        "parameters, active per token": f"{summary.parameters_active:,}",
        "training": f"{summary.steps} steps, {summary.tokens_per_second:,.0f} tokens/s",
        "a step, median": f"{1e3 * summary.step_seconds:.1f} ms",
        "share of the step in the experts": f"{summary.experts_share:.0%}",
        "compared, in turns": f"{summary.loop_ratio:.2f}x the speed of a plain loop over experts",
        "a step then": f"{1e3 * summary.compared_step_seconds:.1f} ms, "
        f"with the loop {1e3 * summary.loop_step_seconds:.1f} ms",
        "experts keep for the backward": f"{summary.saved_bytes / 2**20:.1f} MiB, "
        f"with the loop {summary.loop_saved_bytes / 2**20:.1f} MiB",
        "device": f"{summary.device} ({summary.device_name}), {summary.threads} threads",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if summary.device == "cpu":
        console.print(ON_SPEED, highlight=False, soft_wrap=True)


def loss_curve(summary: Summary, history: History, config: Config) -> Figure:
    """Bits per byte over the bytes trained on."""
    figure, axes = _figure(8.0, 4.5)
    losses = history.train
    seen = [step * config.tokens_per_step / 1e6 for step in range(1, len(losses) + 1)]
    axes.plot(seen, losses, color=TRAIN, linewidth=0.8, alpha=0.7, label="training, each step")
    checks = [(step * config.tokens_per_step / 1e6, value) for step, value in history.validation]
    label = "validation, the same part each time"
    axes.plot(*zip(*checks, strict=True), color=VALIDATION, marker="o", markersize=4, label=label)
    # No point of the curve: these are other bytes, easier or harder ones.
    axes.plot(
        [seen[-1]],
        [summary.val_bits_per_byte],
        color=WHOLE,
        linestyle="none",
        marker="D",
        markersize=6,
        label=f"validation, all of it: {summary.val_bits_per_byte:.2f}",
    )
    axes.axhline(
        summary.zlib_bits_per_byte,
        color=MUTED,
        linestyle="--",
        linewidth=1,
        label=f"zlib -9: {summary.zlib_bits_per_byte:.2f}",
    )
    axes.set_ylim(0, max(4.0, min(8.2, 1.02 * max(losses))))
    axes.set_xlim(0, 1.09 * seen[-1])
    axes.set_xlabel("million bytes seen")
    axes.set_ylabel("bits per byte")
    axes.set_title(summary.text, loc="left", color=INK)
    axes.grid(axis="y", color="#e7ecee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    return figure


def load_map(load: Tensor) -> Figure:
    """Each layer's tokens by expert, as multiples of an even share."""
    layers, experts = load.shape
    figure, axes = _figure(1.6 + 0.75 * experts, 1.6 + 0.62 * layers)
    relative = (load * experts).tolist()
    most = max(2.0, *map(max, relative))
    image = axes.imshow(relative, cmap="YlGnBu", vmin=0, vmax=most, aspect="auto")
    for layer in range(layers):
        for expert in range(experts):
            value = relative[layer][expert]
            dark = value > 0.6 * most
            colour = "white" if dark else INK
            axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(experts))
    axes.set_yticks(range(layers))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title("share of the tokens, 1 is even", loc="left", color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # A Figure of its own, not pyplot's: no state, no display.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    return figure, axes
