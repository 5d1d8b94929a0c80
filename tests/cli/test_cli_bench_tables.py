"""The tables of the benchmark: every number whole, whatever the width, and a legend of what is shown."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from anabranch.cli.bench.report import Explained, Line, Measured, Report, Row
from anabranch.cli.bench.tables import show_report

NAMES = ("anabranch", "torch grouped_mm, compiled")


def row(name, scale):
    seconds = 1.23456 * scale
    return Row(
        variant=name,
        forward_seconds=seconds,
        training_seconds=3 * seconds,
        forward_tflops=123.4,
        training_tflops=45.67,
        forward_of_dense=0.51,
        training_of_dense=0.52,
        forward_of_limit=0.53,
        training_of_limit=0.54,
        replay_seconds=None,
        host_seconds=None,
        saved_bytes=987 * 2**20,
        errors={"output": 6.5e-3},
        rounds=3,
    )


def cell(part="shape", routing="random", tokens=1024, exponent=0.0):
    return Measured(
        part=part,
        shape="cpu",
        sizes=dict(T=tokens, H=512, I=256, E=32, K=4),
        active_experts=32,
        dtype="float32",
        routing=routing,
        exponent=exponent,
        dense_forward_seconds=0.5,
        dense_training_seconds=1.5,
        copy_bytes_per_second=1e9,
        forward_limit_seconds=0.6,
        training_limit_seconds=1.6,
        rows=[row(name, tokens / 1024) for name in NAMES],
        refused={},
        left_out={},
    )


def shown(width, cells=(), explained=(), rounds=3):
    report = Report("cpu", "a processor", 2, None, rounds, False, "2", {}, None, "2000-01-01")
    report.cells, report.explained = list(cells), list(explained)
    console = Console(file=io.StringIO(), width=width)
    show_report(console, report)
    text = console.file.getvalue()
    assert "\u2026" not in text
    return text


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (120, {"TFLOP/s", "error"}),
        (86, {"error"}),
        (80, set()),
        (30, set()),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_whole_numbers(width, columns):
    text = shown(width, [cell()])
    assert {name for name in ("TFLOP/s", "error") if name in text} == columns
    for number in ("1234.56", "3703.68", "987.0", "51%", "52%", "500.00", "1500.00"):
        assert f" {number} " in text
    assert (" 45.67 " in text, " 6.5e-03 " in text) == ("TFLOP/s" in columns, "error" in columns)
    if width >= 80:
        table = [line for line in text.splitlines() if line[:1] in "│┃"]
        assert max(map(len, table)) <= width


def test_routing_is_in_the_title():
    text = shown(80, [cell(), cell(routing="zipf 1.2")])
    titles = re.findall(r"^moe_mlp, cpu, T1024 H512 I256 E32 K4, (.*), float32", text, re.MULTILINE)
    assert titles == ["random routing", "zipf 1.2 routing"]


def test_the_legend_explains_what_is_shown():
    def explained(text):
        return [name for name in ("of dense", "of limit", "keeps", "error") if f"\n{name}: " in text]

    assert explained(shown(120, [cell()])) == ["of dense", "keeps", "error"]
    assert explained(shown(80, [cell()])) == ["of dense", "keeps"]
    assert explained(shown(120, [cell(), cell("tokens")])) == ["of dense", "of limit", "keeps", "error"]
    line = Line("down", ["kernel"], 0.5, 0.25, "bytes")
    assert explained(shown(120, explained=[Explained("cpu", "forward", 1.0, [line])])) == ["of limit"]


@pytest.mark.parametrize("width", [40, 80])
def test_points_of_a_sweep_go_to_as_many_tables_as_it_takes(width):
    tokens = [2**power for power in range(10, 19)]
    text = shown(width, [cell("tokens", tokens=count) for count in tokens])
    assert re.findall(r" T(\d+) ", text) == [str(count) for count in tokens]
    for count in tokens:
        assert text.count(f" {1234.56 * count / 1024:.3f} ") == len(NAMES)
    assert text.count("by numbers of tokens") > 1


@pytest.mark.parametrize("width", [60, 100])
def test_names_of_kernels_give_way_to_numbers(width):
    line = Line("gradient of the rows of x", ["a_kernel", "another_kernel"], 0.123456, 0.1, "bytes")
    text = shown(width, explained=[Explained("qwen", "forward", 1.0, [line])])
    for number in ("123.456", "100.000", "81%", "100%"):
        assert f" {number} " in text


def test_says_when_time_ran_out():
    assert "medians of 3 interleaved rounds" in shown(80, [cell()])
    assert "time ran out" not in shown(80, [cell()])
    text = shown(80, [cell()], rounds=30)
    assert "medians of 3 to 3 of 30 interleaved rounds" in text
    assert "time ran out: some medians are of 3 rounds of 30" in text
    assert "--seconds gives more" in text
