"""What a measurement has to say about where it was made."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

from anabranch.cli.failure import Failure


def device(name: str | None) -> torch.device:
    """The device of that name, or the GPU if there is one.

    Raises:
        Failure: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        raise Failure(f"there is no device named {name!r}; try cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise Failure(f"anabranch runs on cpu and cuda, not on {found.type}")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise Failure(f"{name} is not here: torch {torch.__version__} sees {count} CUDA devices")
    return found


def device_name(where: torch.device) -> str:
    """What the processor or GPU calls itself."""
    return torch.cuda.get_device_name(where) if where.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many threads are worth having: torch's choice, within what this process may use, at most 8."""
    cores = torch.get_num_threads()
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    try:  # a container's share of the processor
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return min(cores, 8)


def commit() -> str | None:
    """The commit of the checkout this package runs from, with a plus sign if files differ from it."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        # A package installed inside some other repository is not a checkout of this one.
        git("ls-files", "--error-unmatch", "machine.py")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
