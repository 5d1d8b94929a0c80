"""The benchmark, on sizes that take no time."""

from __future__ import annotations

import json

import pytest
import torch

from anabranch.cli.bench import command, peers
from anabranch.cli.bench.variants import OURS, Variant, ours
from anabranch.ops.moe_mlp.cases import Case

TINY = Case(24, 16, 8, 4, 2)
LOOP, GROUPED = peers.PEERS["loop"], peers.PEERS["grouped_mm"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The only named shape is a tiny one."""
    original = command.run_bench
    monkeypatch.setattr(command, "run_bench", lambda *arguments: original(*arguments, {"cpu": TINY}))


@pytest.fixture
def bench(run, tmp_path):
    """`anabranch bench` into a folder of its own."""
    return lambda *rest: run(
        "bench", "--device", "cpu", "--threads", 1, "--rounds", 3, "--out", tmp_path / "out", *rest
    )


@pytest.fixture
def report(tmp_path):
    """What was written."""
    return lambda: json.loads((tmp_path / "out/bench.json").read_text())


@pytest.fixture
def only(monkeypatch):
    """Replaces all variants."""

    def only(*variants):
        monkeypatch.setattr(command, "own", lambda backends: list(variants))
        monkeypatch.setattr(command.peers, "load", lambda names: ([], {}))

    return only


def test_report(bench, tmp_path, report):
    result = bench()
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.png"}
    assert {"device", "device_name", "torch", "commit", "date", "threads", "versions"} <= set(report())
    cells = report()["cells"]
    assert [cell["dtype"] for cell in cells] == ["float32", "bfloat16"]
    for cell in cells:
        assert cell["sizes"] == dict(T=24, H=16, I=8, E=4, K=2)
        assert cell["forward_limit_seconds"] >= cell["dense_forward_seconds"] > 0
        assert cell["training_limit_seconds"] >= cell["dense_training_seconds"] > 0
        rows = {row["variant"]: row for row in cell["rows"]}
        for name in (OURS, LOOP):
            row = rows[name]
            flops = 6 * 24 * 2 * 16 * 8
            for what, factor in (("forward", 1), ("training", 3)):
                seconds = row[f"{what}_seconds"]
                assert row[f"{what}_of_dense"] == pytest.approx(cell[f"dense_{what}_seconds"] / seconds)
                assert row[f"{what}_of_limit"] == pytest.approx(cell[f"{what}_limit_seconds"] / seconds)
                assert row[f"{what}_tflops"] == pytest.approx(factor * flops / seconds / 1e12)
            assert len(row["errors"]) == 5
            assert row["rounds"] == 3
            assert row["replay_seconds"] is None
        # Ours keeps h (T * K, 2 * I) and the routing; the loop keeps more.
        h = 24 * 2 * 2 * 8 * (4 if cell["dtype"] == "float32" else 2)
        assert h <= rows[OURS]["saved_bytes"] < rows[LOOP]["saved_bytes"]
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    assert "T24 H16 I8 E4 K2" in result.stdout
    assert "of dense" in result.stdout


def test_sweeps_and_shapes_by_numbers(bench, report):
    result = bench(
        "--shape", "cpu", "--shape", "12,8,4,4,2", "--tokens", "3,5", "--skew", "0,1.5", "--peers", "none"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    cells = report()["cells"]
    assert [(cell["part"], cell["sizes"]["T"], cell["routing"]) for cell in cells] == [
        *(("shape", tokens, "random") for tokens in (24, 24, 12, 12)),
        ("tokens", 3, "random"), ("tokens", 5, "random"), ("skew", 24, "random"), ("skew", 24, "zipf 1.5"),
    ]  # fmt: skip
    assert {row["variant"] for cell in cells for row in cell["rows"]} == {OURS}
    assert "by numbers of tokens" in result.stdout
    assert "by exponents of Zipf's law" in result.stdout


def test_backends_by_name(bench, report):
    result = bench("--backends", "eager,triton", "--peers", "grouped-mm,unsloth")
    assert result.exit_code == 0, result.output
    (cell, _) = report()["cells"]
    assert [row["variant"] for row in cell["rows"]] == [OURS, f"{OURS}, eager", GROUPED]
    assert "CUDA" in cell["left_out"][f"{OURS}, triton"]
    assert list(report()["absent"]) == ["unsloth"]
    assert "left out: unsloth: ModuleNotFoundError" in result.stdout


def zeros(x, gate_up, down, ids, weights):
    return x * 0 * weights.sum() * gate_up.sum() * down.sum()


def half_gradient(x, *rest):
    return ours(x * 0.5 + x.detach() * 0.5, *rest)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (zeros, "output"),
        (lambda *arguments: 1.001 * ours(*arguments), "output"),
        (lambda x, gate_up, down, ids, weights: ours(x, gate_up, down, ids.flip(0), weights), "output"),
        (lambda *arguments: ours(*arguments).index_fill(0, torch.tensor([5]), float("nan")), "output"),
        (
            lambda *arguments: (
                ours(*arguments) + torch.eye(24, 16).index_fill(0, torch.arange(1, 24), 0) * 1e-5
            ),
            "output",
        ),
        (half_gradient, "gradient of x"),
        (lambda *arguments: ours(*arguments)[:-1], "output: its shape is (23, 16)"),
    ],
    ids=["zeros", "scaled", "misrouted", "not finite", "one element", "half a gradient", "short"],
)
def test_ours_without_numbers_when_wrong(bench, report, only, wrong, what):
    only(Variant(OURS, wrong))
    result = bench()
    assert result.exit_code == 1
    assert result.stderr.startswith(f"anabranch: no numbers: anabranch is wrong in float32 on cpu: {what}")
    (cell, *_) = report()["cells"]
    assert cell["rows"] == []
    assert list(cell["refused"]) == [OURS]
    assert "wrong, not timed: anabranch" in result.stdout


@pytest.mark.parametrize(
    "wrong", [lambda x, *rest: 2 * ours(x, *rest), half_gradient, zeros], ids=["twice", "gradient", "zeros"]
)
def test_wrong_peer_is_refused_and_the_rest_is_timed(bench, report, only, wrong):
    only(Variant(OURS, ours), Variant("peer", wrong))
    result = bench()
    assert result.exit_code == 0, result.output
    for cell in report()["cells"]:
        assert [row["variant"] for row in cell["rows"]] == [OURS]
        assert list(cell["refused"]) == ["peer"]
    assert "wrong, not timed: peer" in result.stdout


def test_wrong_results_are_not_timed(bench, only, monkeypatch):
    calls = []

    def wrong(*arguments):
        calls.append(1)
        return zeros(*arguments)

    only(Variant(OURS, ours), Variant("peer", wrong))
    bench()
    assert len(calls) == 2  # its one check in each dtype


def test_peer_that_cannot_run_is_left_out(bench, only):
    def refuses(*arguments):
        raise RuntimeError("not on this machine\nand more")

    only(Variant(OURS, ours), Variant("peer", refuses))
    result = bench()
    assert result.exit_code == 0, result.output
    assert (
        "left out: peer: RuntimeError: not on this machine and more (cpu T24 random float32; "
        in result.stdout
    )


def test_peer_without_gradient_is_timed_forward(bench, report, only):
    def inference(*arguments):
        if torch.is_grad_enabled():
            raise NotImplementedError("inference only")
        return ours(*arguments)

    only(Variant(OURS, ours), Variant("peer", inference))
    result = bench()
    assert result.exit_code == 0, result.output
    for cell in report()["cells"]:
        row = cell["rows"][1]
        assert row["forward_seconds"] > 0
        assert row["training_seconds"] is row["training_tflops"] is row["saved_bytes"] is None
        assert cell["left_out"] == {"peer": "no training: NotImplementedError: inference only"}


def test_peer_that_fails_while_timed_is_left_out(bench, report, only):
    calls = []

    def tires(*arguments):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("tired")
        return ours(*arguments)

    only(Variant(OURS, ours), Variant("peer", tires))
    result = bench()
    assert result.exit_code == 0, result.output
    (cell, _) = report()["cells"]
    assert cell["rows"][0]["forward_seconds"] > 0
    assert cell["rows"][1]["forward_seconds"] is None
    assert cell["left_out"]["peer, forward"] == "RuntimeError: tired"


def test_peer_that_tunes_is_announced(bench, only):
    only(Variant(OURS, ours), Variant("peer", ours, tunes=True))
    message = "cpu, 24 tokens: peer: its first call on this shape compiles and tunes"
    assert bench("--skew", "0,1").stdout.splitlines().count(message) == 1


def test_no_time_left(bench, report, only, monkeypatch):
    only(Variant(OURS, ours))
    monkeypatch.setattr(command.Clock, "left", lambda clock: -1.0)
    result = bench()
    assert result.exit_code == 0, result.output
    assert [cell["dtype"] for cell in report()["cells"]] == ["float32"]
    assert report()["skipped"] == ["cpu, 24 tokens, random, bfloat16: no time left"]


def test_cell_that_fails_is_skipped(bench, report, only, monkeypatch):
    original = command.measure

    def fails_in_bf16(cell, *rest):
        if cell.dtype == torch.bfloat16:
            raise RuntimeError("out of memory")
        return original(cell, *rest)

    only(Variant(OURS, ours))
    monkeypatch.setattr(command, "measure", fails_in_bf16)
    result = bench()
    assert result.exit_code == 0, result.output
    assert "skipped: cpu, 24 tokens, random, bfloat16: RuntimeError: out of memory" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "huge"], "there is no shape 'huge'; there are cpu, or T,H,I,E,K as numbers"),
        (["--shape", "8,8,8,2,4"], "sizes are positive, and K at most E; got 8,8,8,2,4"),
        (["--shape", "8,8,0,2,1"], "sizes are positive, and K at most E; got 8,8,0,2,1"),
        (["--tokens", "1,x"], "--tokens takes numbers with commas between them, not '1,x'"),
        (["--tokens", "1.5"], "--tokens takes whole numbers above 0, not 1.5"),
        (["--skew", "-1"], "--skew takes numbers with commas between them, not '-1'"),
        (
            ["--backends", "cuda"],
            "there is no backend 'cuda'; there are hopper, triton, eager, reference",
        ),
        (["--explain"], "--explain reads the kernels that a GPU ran: is there a CUDA device?"),
    ],
)
def test_options_that_fail_in_one_line(bench, tmp_path, options, message):
    result = bench(*options)
    assert result.exit_code == 1
    assert result.stderr == f"anabranch: {message}\n"
    assert not (tmp_path / "out").exists()


def test_unknown_peer(bench):
    result = bench("--peers", "loop,nobody")
    assert result.exit_code == 1
    assert result.stderr.startswith("anabranch: there is no peer 'nobody'; there are loop, grouped_mm, ")


def test_out_cannot_be_a_file(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure", None)  # found out before anything is timed
    (tmp_path / "out").write_text("mine")
    result = bench()
    assert result.exit_code == 1
    assert result.stderr == f"anabranch: cannot write {tmp_path / 'out/bench.json'}: File exists\n"
    assert (tmp_path / "out").read_text() == "mine"
