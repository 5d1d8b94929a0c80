"""What doctor says, and the command line without its extra."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import anabranch
from anabranch import cli, dispatch
from anabranch.cli import doctor

CPU = torch.device("cpu")


def anabranch_functions():
    """Every public name that is an operation's, and the layout that route makes."""
    return {
        name for name in anabranch.__all__ if getattr(anabranch, name).__module__.startswith("anabranch.ops.")
    } | {"ExpertLayout"}


def test_output(run):
    result = run("doctor")
    assert result.exit_code == 0
    for shown in (
        anabranch.__version__,
        torch.__version__,
        "safetensors",
        "backends on cpu",
        *anabranch_functions(),
    ):
        assert shown in result.stdout
    assert "hopper: it runs on CUDA tensors, not on cpu" in result.stdout


def test_all_operations_run_eagerly():
    assert {"grouped_gemm", "moe_mlp", "rope"} <= set(doctor.operations())
    assert all(doctor.unavailable(op, "eager", CPU) is None for op in doctor.operations())


def test_operations_have_functions():
    assert doctor.functions("multi_gemm") == "dual_gemm, multi_gemm"
    assert doctor.functions("route") == "ExpertLayout"
    assert doctor.operations(backends=False) == ["positions"]
    named = {
        name
        for backends in (True, False)
        for op in doctor.operations(backends)
        for name in doctor.functions(op).split(", ")
    }
    assert named == anabranch_functions()


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("ANABRANCH_CHECK_VALUES", "1", True),
        ("ANABRANCH_CHECK_VALUES", "", True),
        ("ANABRANCH_CHECK_VALUES", "yes", False),
        ("ANABRANCH_AUTOTUNE", "again", True),
        ("ANABRANCH_AUTOTUNE", "maybe", False),
        ("OMP_WAIT_POLICY", "anything", True),
    ],
)
def test_unknown_values_are_pointed_out(monkeypatch, name, value, known):
    monkeypatch.setenv(name, value)
    shown = doctor.machine_facts()[name]
    assert (shown == value) == known
    assert known or shown.startswith(f"{value!r} is not a value it knows: unset, or one of 0, 1")


def test_every_variable_is_shown_and_documented():
    package = Path(anabranch.__file__).parent
    read = {
        name for path in package.rglob("*.py") for name in re.findall(r"ANABRANCH_[A-Z_]+", path.read_text())
    }
    page = (package.parents[1] / "docs/tuning.md").read_text()
    table = page.partition("## Environment variables")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == read
    assert read == {name for name in doctor.SWITCHES if name.startswith("ANABRANCH_")}


def test_packages_are_of_use():
    """Each optional package is one that the extra installs or that the package itself imports."""
    sources = [path.read_text() for path in Path(anabranch.__file__).parent.rglob("*.py")]
    for name in doctor.PACKAGES:
        assert any(re.search(rf"^\s*(import|from) {name}\b", source, re.MULTILINE) for source in sources), (
            name
        )


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"anabranch {anabranch.__version__}\n")


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


def test_demo_runs_where_nothing_may_be_started(monkeypatch):
    def refused(path, arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(cli.os, "environ", {})
    monkeypatch.setattr(cli.os, "execv", refused)
    cli._wait_asleep()
    assert "OMP_WAIT_POLICY" not in cli.os.environ


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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(("command", "before", "calls"), [
    ("demo", {}, 2), ("bench", {}, 2), ("doctor", {}, 0), ("bench", {"MALLOC_ARENA_MAX": "1"}, 0),
])  # fmt: skip
def test_freed_memory_is_kept_where_steps_are_timed(command, before, calls, monkeypatch):
    from anabranch.cli import app

    asked = []
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    library = SimpleNamespace(mallopt=lambda *what: asked.append(what))
    monkeypatch.setattr(cli.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(cli, "_wait_asleep", lambda: None)
    monkeypatch.setattr(cli.sys, "argv", ["anabranch", command])
    monkeypatch.setattr(app, "app", lambda: None)
    cli.main()
    assert len(asked) == calls
