"""Tuning from the command line: the products of a layer are searched for as training and inference launch them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import anabranch
from anabranch.cli import machine
from anabranch.cli.failure import Failure
from anabranch.cli.files import write_json
from anabranch.ops.moe_mlp.cases import BENCHMARKS, Case
from anabranch.tuning import Outcome
from anabranch.tuning.cache import document, folder, parse
from anabranch.tuning.key import place
from anabranch.tuning.spec import to_text

OPS = ("moe_mlp", "grouped_gemm")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LETTERS = "T,H,I,E,K"
BACKENDS = (None, "triton")
"""Whose products are tuned: those of the backend that serves a layer unasked, and Triton's, which serves the rest."""


@dataclass(frozen=True)
class Options:
    """What to tune."""

    op: str
    shape: str
    tokens: str | None
    dtype: str
    device: str | None
    out: Path | None


def run_tune(options: Options, console: Console) -> list[Outcome]:
    """Searches, prints what was found, and stores it.

    Raises:
        Failure: something the user can put right.
    """
    cases = shapes(options)
    if options.op not in OPS:
        raise Failure(f"there is no tuning of {options.op!r}; there is of {' and '.join(OPS)}")
    if options.dtype not in DTYPES:
        raise Failure(f"there is no dtype {options.dtype!r}; there are {', '.join(DTYPES)}")
    device = machine.device(options.device)
    if device.type != "cuda":
        raise Failure(
            f"tiles are tuned on the GPU that they are for, not on {device}: is there a CUDA device?"
        )
    device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    earlier = read_table(options.out)
    found: list[Outcome] = []
    with listening(console, found), searching():
        for case in cases:
            run_case(options.op, case, DTYPES[options.dtype], device)
    show(console, found)
    where = place(device)
    assert where is not None
    console.print(f"stored in {folder() / where.file}", highlight=False, soft_wrap=True, markup=False)
    if options.out is not None:
        results = {**earlier, **{str(outcome.key): outcome.entry() for outcome in found}}
        write_json(
            options.out, document(results, **vars(where), date=machine.today(), commit=machine.commit())
        )
        console.print(f"{options.out}: {len(results)} results", highlight=False, soft_wrap=True, markup=False)
    return found


def shapes(options: Options) -> list[Case]:
    """The cases that --shape and --tokens name.

    Raises:
        Failure: they name none.
    """
    case = BENCHMARKS.get(options.shape)
    if case is None:
        expected = f"a name ({', '.join(BENCHMARKS)}) or {LETTERS} as numbers"
        T, H, I, E, K = numbers(options.shape, expected, 5)  # noqa: E741
        case = Case(T, H, I, E, K)
    if case.top_k > case.experts:
        raise Failure(f"K = {case.top_k} is more than E = {case.experts}")
    if options.tokens is None:
        return [case]
    return [replace(case, tokens=count) for count in numbers(options.tokens, "numbers of tokens")]


def numbers(text: str, expected: str, count: int | None = None) -> list[int]:
    """Positive numbers with commas between them."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts) or len(parts) != (
        count or len(parts)
    ):
        raise Failure(f"expected {expected}, got {text!r}")
    return [int(part) for part in parts]


def read_table(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """What a table holds already: results are added to it."""
    if path is None or not path.exists():
        return {}
    try:
        return dict(parse(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise Failure(f"{path} is there and is no table of results: {error}") from None


def run_case(op: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Inference and a training step: each product they launch is tuned at its first launch.

    A backend that comes again, as Triton where nothing is before it, finds its products tuned.
    """
    T, H, I, E, K = case.tokens, case.hidden, case.intermediate, case.experts, case.top_k  # noqa: E741
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(*shape, dtype=dtype, device=device, generator=generator)
        return value.mul_(scale).requires_grad_()

    x, up, down = draw(T, H), draw(E, 2 * I, H, scale=H**-0.5), draw(E, H, I, scale=I**-0.5)
    weights = torch.rand(T, K, device=device, generator=generator).add_(0.1).requires_grad_()
    ids = torch.rand(T, E, device=device, generator=generator).topk(K).indices
    layout = anabranch.ExpertLayout.from_topk(ids, E)

    def run(backend: str | None) -> Tensor:
        if op == "moe_mlp":
            return anabranch.moe_mlp(x, up, down, ids, weights, backend=backend)
        a = anabranch.grouped_gemm(x, up, layout, gather=True, activation=case.activation, backend=backend)
        return anabranch.grouped_gemm(a, down, layout, scatter=True, scale=weights, backend=backend)

    for backend in BACKENDS:
        with torch.no_grad():
            run(backend)
        out = run(backend)
        out.backward(torch.randn(out.shape, dtype=dtype, device=device, generator=generator))


@contextmanager
def searching() -> Iterator[None]:
    """Asks for a search of everything launched, in backward threads too."""
    before = os.environ.get("ANABRANCH_AUTOTUNE")
    os.environ["ANABRANCH_AUTOTUNE"] = "again"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ANABRANCH_AUTOTUNE"]
        else:
            os.environ["ANABRANCH_AUTOTUNE"] = before


@contextmanager
def listening(console: Console, found: list[Outcome]) -> Iterator[None]:
    """Shows the searches of the context as they go, and gathers what they find."""
    logger = logging.getLogger("anabranch.tuning")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars = {}

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                step = getattr(record, "tuning", None)
                if step is None:
                    return
                if step.key not in bars:
                    bars[step.key] = progress.add_task(str(step.key), total=step.total)
                progress.update(bars[step.key], completed=step.done, total=step.total)
                if step.outcome is not None:
                    found.append(step.outcome)
                    progress.remove_task(bars[step.key])

        handler, level = Handler(), logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


def show(console: Console, found: list[Outcome]) -> None:
    """Prints the results, and why candidates were refused."""
    table = Table(title="tuned", title_justify="left")
    for name in ("product", "tiles"):
        table.add_column(name, overflow="fold")
    for name in ("µs", "heuristic's", "ratio", "refused"):
        table.add_column(name, justify="right", no_wrap=True)  # where it is narrow, words go to the next line
    for outcome in found:
        table.add_row(
            str(outcome.key),
            "the heuristic's" if outcome.best == outcome.default else to_text(outcome.best),
            f"{outcome.seconds * 1e6:.1f}",
            f"{outcome.default_seconds * 1e6:.1f}",
            f"{outcome.default_seconds / outcome.seconds:.2f}",
            str(len(outcome.rejected)),
        )
    console.print(table)
    reasons = dict.fromkeys(reason for outcome in found for reason in outcome.rejected.values())
    for reason in list(reasons)[:10]:
        console.print(f"refused: {reason}", highlight=False, soft_wrap=True, markup=False)
