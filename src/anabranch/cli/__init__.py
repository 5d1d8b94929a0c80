"""The command line: demo, doctor, bench and tune. Needs the ``cli`` extra."""

from __future__ import annotations

import importlib.util
import io
import os
import sys

EXTRA = ("typer", "rich", "matplotlib", "safetensors")
"""What the ``cli`` extra installs; nothing outside this package imports any of it."""


def main() -> None:
    """The entry point of ``anabranch``."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(f'anabranch: {", ".join(missing)} missing: pip install "anabranch[cli]"', file=sys.stderr)
        raise SystemExit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text to show may hold what a terminal's encoding lacks
    if sys.argv[1:2] == ["demo"]:
        _wait_asleep()
    from anabranch.cli.app import app

    app()


def _wait_asleep() -> None:
    """Starts over with OpenMP threads that sleep while they wait, unless the user chose how they do.

    By default they spin. On cores that other programs use as well, the threads spun for are then kept from
    running: a training step on two busy cores took eight times as long, against a quarter more on idle ones.
    torch reads this while it is loaded. A benchmark keeps the default, which is what a user's program has.
    """
    if "OMP_WAIT_POLICY" not in os.environ and sys.platform == "linux":
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
