"""The benchmark, on sizes that take no time."""

from __future__ import annotations

import json

import pytest
import torch

from anabranch.cli.bench import check, command, variants
from anabranch.cli.bench.timing import medians
from anabranch.cli.bench.variants import LOOP, OURS, Problem
from anabranch.ops.moe_mlp.cases import Case

TINY = Case(24, 16, 8, 4, 2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The only case is a tiny one."""
    original = command.run_bench
    cases = {"cpu": TINY}
    monkeypatch.setattr(command, "run_bench", lambda *arguments: original(*arguments, cases))


@pytest.fixture
def bench(run, tmp_path):
    """`anabranch bench` into a folder of its own."""
    return lambda *rest: run(
        "bench", "--device", "cpu", "--threads", 1, "--rounds", 3, "--out", tmp_path / "out", *rest
    )


def test_report(bench, tmp_path):
    result = bench()
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.png"}
    report = json.loads((tmp_path / "out/bench.json").read_text())
    assert report["sizes"] == dict(tokens=24, hidden=16, intermediate=8, experts=4, top_k=2)
    assert {"device", "device_name", "torch", "commit", "date", "threads"} <= set(report)
    rows = {(row["variant"], row["dtype"]): row for row in report["rows"]}
    for dtype in ("float32", "bfloat16"):
        plain = rows[command.DENSE, dtype]
        for name in (OURS, LOOP):
            row = rows[name, dtype]
            assert row["forward_share"] == pytest.approx(plain["forward_seconds"] / row["forward_seconds"])
            assert row["training_share"] == pytest.approx(
                3 * plain["forward_seconds"] / row["training_seconds"]
            )
        # Ours keeps h (T * K, 2 * I) and the routing; the loop keeps more.
        h = 24 * 2 * 2 * 8 * (4 if dtype == "float32" else 2)
        assert h <= rows[OURS, dtype]["saved_bytes"] < rows[LOOP, dtype]["saved_bytes"]
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    assert "T24 H16 I8 E4 K2" in result.stdout
    assert "of dense" in result.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, gate_up, down, ids, weights: x * 0 * weights.sum() * gate_up.sum() * down.sum(),
        lambda x, gate_up, down, ids, weights: 1.001 * variants.ours(x, gate_up, down, ids, weights),
        lambda x, gate_up, down, ids, weights: variants.ours(x, gate_up, down, ids.flip(0), weights),
        lambda *arguments: variants.ours(*arguments).index_fill(0, torch.tensor([5]), float("nan")),
        lambda *arguments: (
            variants.ours(*arguments) + torch.eye(24, 16).index_fill(0, torch.arange(1, 24), 0) * 1e-5
        ),
    ],
    ids=["zeros", "scaled", "misrouted", "not finite", "one element"],
)
def test_no_numbers_when_wrong(bench, tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(command, "variants", lambda: {OURS: wrong})
    result = bench()
    assert result.exit_code == 1
    assert result.stdout.strip() == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("anabranch: no numbers: anabranch is wrong in torch.float32: ")
    assert not (tmp_path / "out").exists()


def test_wrong_gradient_is_found(bench, monkeypatch):
    def half_gradient(x, *rest):
        return variants.ours(x * 0.5 + x.detach() * 0.5, *rest)

    monkeypatch.setattr(command, "variants", lambda: {OURS: half_gradient})
    assert "gradient of x" in bench().stderr


def test_wrong_peer_is_found(bench, monkeypatch):
    monkeypatch.setattr(
        command,
        "variants",
        lambda: {OURS: variants.ours, "peer": lambda x, *rest: 2 * variants.ours(x, *rest)},
    )
    assert "no numbers: peer is wrong" in bench().stderr


def test_peer_that_cannot_run_is_left_out(bench, monkeypatch):
    def refuses(*arguments):
        raise RuntimeError("not on this machine\nand more")

    monkeypatch.setattr(command, "variants", lambda: {OURS: variants.ours, "peer": refuses})
    result = bench()
    assert result.exit_code == 0, result.output
    assert "left out: peer, float32: not on this machine" in result.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_variants_are_right(dtype):
    found = variants.variants()
    unable = check.check(Problem.make(TINY, dtype, CPU), found)
    assert OURS not in unable
    assert LOOP not in unable


def test_unknown_case(bench):
    result = bench("--case", "huge")
    assert result.exit_code == 1
    assert result.stderr == "anabranch: there is no case 'huge'; there are cpu\n"


def test_out_cannot_be_a_file(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "medians", None)  # found out before anything is timed
    (tmp_path / "out").write_text("mine")
    result = bench()
    assert result.exit_code == 1
    assert result.stderr == f"anabranch: cannot write {tmp_path / 'out/bench.json'}: File exists\n"
    assert (tmp_path / "out").read_text() == "mine"


def test_medians_are_interleaved():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    assert set(medians(runs, 3, CPU)) == set("abc")
    assert order[:18] == list("aabbccbbccaaccaabb")
    assert {order.count(name) for name in "abc"} == {12}


def test_saved_bytes_leaves_out_the_inputs():
    problem = Problem.make(TINY, torch.float32, CPU)
    assert problem.saved_bytes(lambda x, *rest: x * 2) == 0
    assert problem.saved_bytes(lambda x, *rest: x * x) == 0
    assert problem.saved_bytes(lambda x, *rest: x.exp()) == 24 * 16 * 4
