"""What is installed, what can run here, and why the rest cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

import anabranch
import anabranch.ops
from anabranch.cli import machine
from anabranch.dispatch import ORDER, unavailable
from anabranch.tuning.lookup import MODES

PACKAGES = {
    "triton": "the triton and hopper backends",
    "typer": "the command line",
    "rich": "the command line",
    "matplotlib": "the command line",
    "safetensors": "the command line",
}
"""Optional packages, and what needs them."""

SWITCHES = (
    "ANABRANCH_AUTOTUNE",
    "ANABRANCH_CACHE_DIR",
    "ANABRANCH_CHECK_VALUES",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
)
"""Environment variables that matter, shown where they are set."""

KNOWN = {"ANABRANCH_AUTOTUNE": MODES, "ANABRANCH_CHECK_VALUES": ("0", "1")}
"""The values that mean something, of variables with few of them; an empty one is as good as none."""

NAMED_OTHERWISE = {"route": "ExpertLayout"}
"""What users call the operations that no public function is named after."""


def show_doctor(console: Console) -> None:
    """Prints everything."""
    console.print(_table("this machine", machine_facts()))
    console.print(_table("packages", package_facts()))
    for device in devices():
        usable = Table("operation", "functions", *ORDER, title=f"backends on {device}", title_justify="left")
        for op in operations():
            cells = (unavailable(op, backend, device) for backend in ORDER)
            marks = ("[green]usable[/]" if cell is None else "[dim]no[/]" for cell in cells)
            usable.add_row(op, functions(op), *marks)
        console.print(usable)
        for op in operations(backends=False):
            text = f"  {op} ({functions(op)}): plain PyTorch on any device, no backends"
            console.print(text, highlight=False, soft_wrap=True, markup=False)
        for backend in ORDER:
            for reason, ops in reasons(backend, device).items():
                which = "" if len(ops) == len(operations()) else f" ({', '.join(ops)})"
                console.print(f"  {backend}: {reason}{which}", highlight=False, soft_wrap=True, markup=False)


def machine_facts() -> dict[str, str]:
    """Versions, processor and GPUs."""
    facts = {
        "anabranch": anabranch.__version__ + (f" at {commit}" if (commit := machine.commit()) else ""),
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "processor": f"{machine.cpu_name()}, {machine.usable_cores()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "this torch is built without",
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            facts[f"cuda:{index}"] = f"{name}, compute capability {major}.{minor}"
    else:
        facts["GPU"] = "torch sees none"
    facts |= {name: switch(name, os.environ[name]) for name in SWITCHES if name in os.environ}
    return facts


def switch(name: str, value: str) -> str:
    """The value of an environment variable, and what is wrong with it."""
    known = KNOWN.get(name)
    if known is None or value in ("", *known):
        return value
    return f"{value!r} is not a value it knows: unset, or one of {', '.join(known)}"


def package_facts() -> dict[str, str]:
    """Each optional package's version, or what lacks without it."""
    facts = {}
    for name, purpose in PACKAGES.items():
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = f"not installed; {purpose} would need it"
    return facts


def devices() -> Iterator[torch.device]:
    """The CPU and each GPU."""
    yield torch.device("cpu")
    if torch.cuda.is_available():
        yield from (torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def operations(backends: bool = True) -> list[str]:
    """The ops that have backends, or those that have none."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(anabranch.ops.__path__)
        if module.ispkg
        and (importlib.util.find_spec(f"anabranch.ops.{module.name}.backends") is not None) == backends
    )


def functions(op: str) -> str:
    """The public names of an operation."""
    home = f"anabranch.ops.{op}.api"
    names = [name for name in anabranch.__all__ if getattr(anabranch, name).__module__ == home]
    return ", ".join(names) or NAMED_OTHERWISE.get(op, op)


def reasons(backend: str, device: torch.device) -> dict[str, list[str]]:
    """Each reason why a backend is not usable on a device, and the ops it holds for."""
    found: dict[str, list[str]] = {}
    for op in operations():
        reason = unavailable(op, backend, device)
        if reason is not None:
            found.setdefault(reason, []).append(op)
    return found


def _table(title: str, facts: dict[str, str]) -> Table:
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table
