"""The benchmark from its options to its report."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from anabranch.cli import machine
from anabranch.cli.bench.check import check
from anabranch.cli.bench.report import LETTERS, Report, Row, show_report, write_report
from anabranch.cli.bench.timing import medians
from anabranch.cli.bench.variants import Problem, Variant, dense, variants
from anabranch.cli.failure import Failure
from anabranch.cli.files import check_room
from anabranch.ops.moe_mlp.cases import BENCHMARKS, Case

DENSE = "dense products"
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def run_bench(
    device_name: str | None,
    case_name: str | None,
    out: Path,
    threads: int,
    rounds: int,
    console: Console,
    cases: dict[str, Case] = BENCHMARKS,
) -> Report:
    """Checks, times and reports.

    Raises:
        Failure: a result was wrong, or something the user can put right.
    """
    device = machine.device(device_name)
    case_name = case_name or ("cpu" if device.type == "cpu" else "qwen")
    if case_name not in cases:
        raise Failure(f"there is no case {case_name!r}; there are {', '.join(cases)}")
    # Rather now than after the measurements.
    check_room(out / "bench.json", 2**20)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows: list[Row] = []
        left_out: dict[str, str] = {}
        for dtype in DTYPES[device.type]:
            with console.status(f"{case_name} in {_short(dtype)}: checking, then timing"):
                found, unable = _run(cases[case_name], dtype, device, rounds)
            rows += found
            left_out |= {f"{name}, {_short(dtype)}": reason for name, reason in unable.items()}
    finally:
        torch.set_num_threads(threads_before)
    report = Report(
        case=case_name,
        sizes={name: getattr(cases[case_name], name) for name in LETTERS},
        rows=rows,
        left_out=left_out,
        device=device.type,
        device_name=machine.device_name(device),
        threads=threads,
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        rounds=rounds,
        torch=torch.__version__,
        commit=machine.commit(),
        date=machine.today(),
    )
    write_report(out, report)
    show_report(console, report)
    console.print(f"{out}: bench.json, bench.png", highlight=False, soft_wrap=True, markup=False)
    return report


def _run(
    case: Case, dtype: torch.dtype, device: torch.device, rounds: int
) -> tuple[list[Row], dict[str, str]]:
    problem = Problem.make(case, dtype, device)
    compared: dict[str, Variant] = variants()
    unable = check(problem, compared)
    compared = {name: variant for name, variant in compared.items() if name not in unable}

    runs: dict[str, Callable[[], object]] = {DENSE: dense(problem)}
    for name, variant in compared.items():
        runs[f"{name}, forward"] = partial(problem.forward, variant)
        runs[f"{name}, training"] = partial(problem.train, variant)
    times = medians(runs, rounds, device)

    plain = times[DENSE]
    rows = [Row(DENSE, _short(dtype), plain, 3 * plain, 1.0, 1.0, None)]
    for name, variant in compared.items():
        forward, training = times[f"{name}, forward"], times[f"{name}, training"]
        rows.append(
            Row(
                name,
                _short(dtype),
                forward,
                training,
                plain / forward,
                3 * plain / training,
                problem.saved_bytes(variant),
            )
        )
    return rows, unable


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
