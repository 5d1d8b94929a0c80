"""Shared by the tests of the command line."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch.cli.app import app

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture
def run(monkeypatch):
    """Runs a command line in this process; returns click's result."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)

    return run


@pytest.fixture
def start():
    """Starts a command line in a process of its own."""

    def start(*arguments, **changes):
        environment = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "200", **changes}
        return subprocess.Popen(
            [sys.executable, "-m", "anabranch.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


@pytest.fixture
def text(tmp_path):
    """A file with enough text for the smallest model, and for the real one."""
    words = random.Random(0).choices(["river", "branch", "leaves", "and", "joins", "again", "\n"], k=6000)
    path = tmp_path / "river.txt"
    path.write_text(" ".join(words))
    return path
