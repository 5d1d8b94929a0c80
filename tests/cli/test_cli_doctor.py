"""What doctor says, and the command line without its extra."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anabranch
from anabranch import cli, dispatch
from anabranch.cli import doctor

CPU = torch.device("cpu")


def test_output(run):
    result = run("doctor")
    assert result.exit_code == 0
    for shown in (
        anabranch.__version__,
        torch.__version__,
        "transformers",
        "backends on cpu",
        "grouped_gemm",
    ):
        assert shown in result.stdout
    assert "hopper: it runs on CUDA tensors, not on cpu" in result.stdout


def test_all_operations_run_eagerly():
    assert {"grouped_gemm", "moe_mlp", "rope"} <= set(doctor.operations())
    assert all(doctor.unavailable(op, "eager", CPU) is None for op in doctor.operations())


def test_reasons_are_given_once(monkeypatch):
    monkeypatch.setattr(doctor, "operations", lambda: ["moe_mlp", "nothing"])
    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    monkeypatch.setattr(dispatch, "_module", lambda op, backend: None if op == "nothing" else dispatch)
    assert doctor.reasons("triton", CPU) == {"it has no kernel for this operation": ["nothing"]}


def test_missing_package(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", {"no-such-package": "nothing"})
    assert doctor.package_facts() == {"no-such-package": "not installed; nothing would need it"}


def test_without_the_extra():
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name in ('typer', 'rich') else find(name, *rest)\n"
        "sys.modules['typer'] = sys.modules['rich'] = None\n"
        "sys.argv = ['anabranch', 'doctor']\n"
        "from anabranch.cli import main; main()"
    )
    src = Path(anabranch.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(src)},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == 'anabranch: typer, rich missing: pip install "anabranch[cli]"\n'


@pytest.mark.parametrize(("before", "restarts"), [({}, True), ({"OMP_WAIT_POLICY": "active"}, False)])
def test_demo_makes_threads_sleep(monkeypatch, before, restarts):
    started = []
    monkeypatch.setattr(cli.os, "environ", dict(before))
    monkeypatch.setattr(cli.os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(cli.sys, "orig_argv", ["python", "-m", "anabranch.cli", "demo"])
    cli._wait_asleep()
    assert started == ([[sys.executable, "-m", "anabranch.cli", "demo"]] if restarts else [])
    assert cli.os.environ["OMP_WAIT_POLICY"] == ("passive" if restarts else "active")


def test_process(start):
    process = start("--help")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert all(command in output for command in ("demo", "doctor", "bench"))


def test_output_of_any_encoding(monkeypatch):
    """What a terminal cannot show, such as the demo's sample, becomes question marks."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["anabranch", "doctor"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("anabranch.cli.app.app", lambda: print("\N{REPLACEMENT CHARACTER}", flush=True))
    cli.main()
    assert raw.getvalue() == b"?\n"
