"""Collects what every kernel takes into build/aot-RELEASE.json, and prints the sums of it at the end of the run."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

# A cache of its own, so that the times are those of compiling, and in the checkout, where `make clean` finds it.
BUILD = Path(__file__).parents[2] / "build"
os.environ.setdefault("TRITON_CACHE_DIR", str(BUILD / "triton"))

COLUMNS = ("kernels", "registers", "spilling", "shared", "seconds")


def _rows(report):
    return json.loads(dict(report.user_properties).get("kernels", "[]"))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and _rows(report)
    ]
    if not reports:
        return
    everything = {report.nodeid.rpartition("::")[2]: _rows(report) for report in reports}
    BUILD.mkdir(exist_ok=True)
    triton = version("triton")
    table = BUILD / f"aot-{triton}.json"
    table.write_text(json.dumps(everything, indent=1))
    terminalreporter.section(
        f"Triton {triton}: kernels, most registers, how many spill, most shared memory, seconds"
    )
    width = max(map(len, everything))
    terminalreporter.write_line(" ".join([" " * width, *(f"{name:>9}" for name in COLUMNS)]))
    for name, kernels in sorted(everything.items()):
        values = (
            len(kernels),
            max(kernel["registers"] or 0 for kernel in kernels),
            sum(bool(kernel["spilled"]) for kernel in kernels),
            max(kernel["shared"] for kernel in kernels),
            round(sum(kernel["seconds"] for kernel in kernels), 1),
        )
        terminalreporter.write_line(" ".join([f"{name:{width}}", *(f"{value:>9}" for value in values)]))
    terminalreporter.write_line(f"{table} has each kernel.")
