"""`anabranch tune` where there is no GPU: what it refuses, and what it does with the outcomes of searches."""

import json

import pytest
import torch

from anabranch.cli import tune
from anabranch.tuning import GroupedGemmConfig, Key, search
from anabranch.tuning.key import Place

WRONG = {
    "no GPU": ((), "tiles are tuned on the GPU that they are for"),
    "no such op": (("--op", "rope"), "there is no tuning of 'rope'; there is of moe_mlp and grouped_gemm"),
    "no such dtype": (("--dtype", "int8"), "there is no dtype 'int8'; there are bf16, fp16, fp32"),
    "no such shape": (
        ("--shape", "gpt"),
        "expected a name (cpu, qwen, sonic, mixtral) or T,H,I,E,K as numbers, got 'gpt'",
    ),
    "four numbers": (("--shape", "1,2,3,4"), "as numbers, got '1,2,3,4'"),
    "zero": (("--shape", "1,2,3,0,1"), "as numbers, got '1,2,3,0,1'"),
    "K above E": (("--shape", "8,8,8,2,3"), "K = 3 is more than E = 2"),
    "tokens": (("--tokens", "16,x"), "expected numbers of tokens, got '16,x'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals(run, wrong, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, message = WRONG[wrong]
    result = run("tune", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("anabranch: ")
    assert message in line


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which every search finds the same; the names of the keys that are to be found."""
    names = ["up", "down"]
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tune.machine, "device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(tune, "place", lambda device: Place("Imaginary", "sm_90", "3.6", "1"))

    def run_case(op, case, dtype, device):
        assert tune.os.environ["ANABRANCH_AUTOTUNE"] == "again"
        for name in names:
            key = Key("grouped_gemm", name, "bfloat16", case.hidden, 8, case.experts, 16)
            best, default = GroupedGemmConfig(64, 128, 64, 4, 3), GroupedGemmConfig(128, 128, 64, 8, 3)
            outcome = search.Outcome(
                key, best, 1e-4, default, 1.5e-4, {GroupedGemmConfig(16, 16, 16, 1, 1): "too small"}
            )
            search._tell(search.Progress(key, 0, 2))
            search._tell(search.Progress(key, 2, 2, outcome))

    monkeypatch.setattr(tune, "run_case", run_case)
    return names


def test_outcomes_are_shown_and_written(run, gpu, tmp_path, monkeypatch):
    monkeypatch.delenv("ANABRANCH_AUTOTUNE", raising=False)
    table = tmp_path / "table.json"
    result = run("tune", "--shape", "64,32,16,4,2", "--out", table)
    assert result.exit_code == 0, result.output
    assert "grouped_gemm.up bfloat16 N=32 K=8 E=4 rows<=16" in result.stdout
    assert "1.50" in result.stdout
    assert "refused: too small" in result.stdout
    written = json.loads(table.read_text())
    assert written["measured"]["device"] == "Imaginary"
    assert len(written["results"]) == 2
    gpu[:] = ["gradient"]
    assert run("tune", "--shape", "64,32,16,4,2", "--out", table).exit_code == 0
    results = json.loads(table.read_text())["results"]
    assert [text.split()[0] for text in results] == [
        f"grouped_gemm.{name}" for name in ("down", "gradient", "up")
    ]
    entry = {"microseconds": 100.0, "heuristic_microseconds": 150.0}
    config = vars(GroupedGemmConfig(64, 128, 64, 4, 3))
    assert all(result == {"config": config, **entry} for result in results.values())
    assert "ANABRANCH_AUTOTUNE" not in tune.os.environ


def test_another_file_is_not_overwritten(run, gpu, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    result = run("tune", "--out", path)
    assert result.exit_code == 1
    assert "is there and is no table of results" in result.stderr
    assert path.read_text() == "mine"


@pytest.mark.parametrize("op", tune.OPS)
def test_a_layer_runs_with_what_serves_it_and_with_triton(op, monkeypatch):
    from anabranch.ops.moe_mlp.cases import Case

    backends, original = [], getattr(tune.anabranch, op)

    def noted(*arguments, backend, **options):
        backends.append((backend, torch.is_grad_enabled()))
        return original(*arguments, **options)

    monkeypatch.setattr(tune.anabranch, op, noted)
    tune.run_case(op, Case(12, 16, 24, 4, 2), torch.float32, torch.device("cpu"))
    each = 1 if op == "moe_mlp" else 2
    expected = [(None, False), (None, True), ("triton", False), ("triton", True)]
    assert backends == [run for run in expected for _ in range(each)]
