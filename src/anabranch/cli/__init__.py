"""The command line: demo, doctor, bench and tune. Needs the ``cli`` extra."""

from __future__ import annotations

import ctypes
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
    if sys.argv[1:2] in (["demo"], ["bench"]):
        _keep_freed_memory()
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
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        except OSError:  # this user may not start it: slower, on busy cores, is better than not at all
            del os.environ["OMP_WAIT_POLICY"]


def _keep_freed_memory() -> None:
    """Lets the C library keep memory that is freed, unless the user's environment says how it is to behave.

    By default glibc hands large tensors back to the system, and every step's gradients are paged in anew: on a virtual
    machine that was up to half of a training step of the benchmark. Whoever trains on a CPU has this set, or another
    allocator.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if sys.platform != "linux" or chosen:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)
