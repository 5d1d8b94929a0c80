"""What the demo shows: sizes, a running mean, a table that says how to read it, and a curve of like with like."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from anabranch.cli.demo import command, measure, progress, report, train
from anabranch.cli.demo.config import SMALLEST
from anabranch.cli.demo.data import Corpus, LeftOut, load_corpus
from anabranch.cli.demo.progress import TrainingProgress, running_mean

SUMMARY = report.Summary(
    val_bits_per_byte=2.25,
    zlib_bits_per_byte=2.5,
    tokens_per_second=1000.0,
    loop_ratio=0.96,
    experts_share=0.5,
    step_seconds=0.1,
    loop_step_seconds=0.105,
    compared_step_seconds=0.11,
    saved_bytes=3 * 2**20,
    loop_saved_bytes=2**23,
    parameters_total=100,
    parameters_active=50,
    steps=4,
    seconds=1.0,
    text="a text",
    seed=0,
    threads=1,
    device="cpu",
    device_name="a processor",
    torch="2",
    commit=None,
    date="2000-01-01",
)


def printed(show, width=200, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    show(console)
    return console.file.getvalue()


def test_table_says_how_to_read_it():
    shown = printed(lambda console: report.show_report(console, SUMMARY, ("prompt", "text")))
    assert "validation (lower is better)" in shown
    assert "zlib on the same bytes" in shown
    assert "0.96x the speed of a plain loop over experts" in shown
    assert "110.0 ms, with the loop 105.0 ms" in shown
    assert "3.0 MiB, with the loop 8.0 MiB" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("with layers as small as these")]
    assert "plain loop" in line
    assert "docs/perf/cpu.md" in line
    on_gpu = dataclasses.replace(SUMMARY, device="cuda")
    assert "docs/perf" not in printed(lambda console: report.show_report(console, on_gpu, ("prompt", "text")))


def test_table_fits_a_terminal():
    for width in (60, 80):
        shown = printed(lambda console: report.show_report(console, SUMMARY, ("prompt", "text")), width)
        table = shown[shown.index("anabranch demo") : shown.index("with layers")]
        assert "\u2026" not in table
        assert max(map(len, table.splitlines())) <= width


@pytest.mark.parametrize(
    ("train_bytes", "held_out", "shown"),
    [
        (16_000_000, 131_072, "16.0 MB to train on, 131.1 kB held out"),
        (23_740, 1_234, "23.7 kB to train on, 1.2 kB held out"),
    ],
)
def test_sizes(train_bytes, held_out, shown):
    parts = (torch.zeros(count, dtype=torch.uint8) for count in (train_bytes, held_out))
    corpus = Corpus("a text", *parts, 2, LeftOut())
    said = printed(lambda console: command._say_corpus(console, corpus))
    assert said == f"text: a text, 2 files; {shown}\n"


def test_what_was_left_out_is_said():
    corpus = Corpus("a text", torch.zeros(9), torch.zeros(9), 2, LeftOut(files=1))
    said = printed(lambda console: command._say_corpus(console, corpus))
    assert said.splitlines()[1] == "left out: 1 file could not be read"


def test_running_mean_does_not_lag():
    assert running_mean([8.0]) == (8.0, 1)
    assert running_mean([8.0] * 24 + [4.0] * 6) == (4.0, 6)
    assert running_mean([8.0] * 300 + [5.0] * 10 + [4.0] * 10) == (4.5, progress.MEAN_OF)


def test_progress_goes_on_where_the_run_did():
    """The mean after a resumption is what it would have been without an interruption."""
    losses = [float(value) for value in range(100, 0, -1)]

    def show(console, done):
        history, seconds = losses[:done], []
        with TrainingProgress(console, history, seconds, 100, 1) as shown:
            for loss in losses[done:]:
                history.append(loss)
                seconds.append(0.01)
                shown.advance()

    whole, resumed = (printed(lambda console, done=done: show(console, done)) for done in (0, 94))
    last = "step 100/100  10.500 bits/byte (mean of 20 steps)"
    assert whole.splitlines()[-1].startswith(last)
    assert resumed.splitlines()[0].startswith("step 95/100  15.000 bits/byte (mean of 19 steps)")
    assert resumed.splitlines()[-1].startswith(last)


def test_progress_bar_fits_a_terminal():
    history, seconds = [2.0] * 999, []
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with TrainingProgress(console, history, seconds, 1000, 20) as shown:
        history.append(2.0)
        seconds.append(0.1)
        shown.advance()
    assert "\u2026" not in console.file.getvalue()
    assert "1000/1000  2.000 bits/byte (mean of 20 steps)" in console.file.getvalue()


def test_speed_is_of_the_middle_step():
    """Whatever comes between steps, as validation and saving do, or a step that something held up."""
    history, seconds = [], []

    def show(console):
        with TrainingProgress(console, history, seconds, 3, 20) as shown:
            for took in (0.5, 0.1, 0.1):
                history.append(2.0)
                seconds.append(took)
                shown.advance()

    assert "  200 tokens/s  " in printed(show).splitlines()[-1]


def test_what_is_kept_for_the_backward():
    x = torch.randn(3, 4, requires_grad=True)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Sigmoid(), torch.nn.Linear(5, 2))
    assert (
        measure.saved_bytes(layer, (x,)) == 3 * 5 * 4
    )  # the sigmoid, for both its neighbours; no x, no parameter


def test_every_point_of_the_curve_is_of_the_same_windows(text):
    trainer = train.Trainer(SMALLEST, load_corpus(text, SMALLEST.context), 0, torch.device("cpu"))
    trainer.steps = 25
    assert trainer.run(lambda: None, lambda: False)
    checks = trainer.history.validation
    assert [step for step, _ in checks] == [*range(2, 25, 2), 25]
    assert checks[-1][1] == trainer.evaluate(train.CHECK_WINDOWS)[0]
    assert checks[-1][1] != trainer.evaluate()[0]  # or the test could not tell them apart
    (axes,) = report.loss_curve(SUMMARY, trainer.history, SMALLEST).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(lines["validation, the same part each time"]) == [value for _, value in checks]
    assert list(lines["validation, all of it: 2.25"]) == [2.25]
