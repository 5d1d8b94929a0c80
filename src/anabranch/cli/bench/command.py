"""The benchmark from its options to its report."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from anabranch.cli import machine
from anabranch.cli.bench import peers
from anabranch.cli.bench.explain import explain
from anabranch.cli.bench.problem import Problem
from anabranch.cli.bench.report import Report, write_report
from anabranch.cli.bench.run import measure
from anabranch.cli.bench.shapes import ZIPF, Cell, plan
from anabranch.cli.bench.tables import show_report
from anabranch.cli.bench.timing import Clock
from anabranch.cli.bench.variants import OURS, Variant, own
from anabranch.cli.failure import Failure
from anabranch.cli.files import check_room, write_json
from anabranch.ops.moe_mlp.cases import BENCHMARKS, Case

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
EXPONENTS = {"cpu": (0.0,), "cuda": (0.0, ZIPF)}
SHAPES = {"cpu": "cpu", "cuda": "qwen"}
WEIGHTS = {"shape": 1.0, "tokens": 0.25, "skew": 0.5}
"""How the time is shared out."""
TOO_LONG = "it would tune for each number of tokens, and no time is left for that"
PACKAGES = (
    "triton",
    "transformers",
    "sonic-moe",
    "quack-kernels",
    "liger-kernel",
    "moe-ops",
    "unsloth",
    "scattermoe",
)


@dataclass(frozen=True)
class Options:
    """What the command line takes; see ``anabranch bench --help``."""

    device: str | None = None
    shapes: Sequence[str] = ()
    tokens: str | None = None
    skew: str | None = None
    backends: str | None = None
    peers: str | None = None
    explain: bool = False
    seconds: float = 240.0
    rounds: int = 30
    threads: int = 2
    out: Path = Path("runs/bench")


def run_bench(options: Options, console: Console, cases: Mapping[str, Case] = BENCHMARKS) -> Report:
    """Checks, times and reports.

    Raises:
        Failure: a result of ours was wrong, or something the user can put right.
    """
    clock = Clock(options.seconds)
    device = machine.device(options.device)
    if options.explain and device.type != "cuda":
        raise Failure("--explain reads the kernels that a GPU ran: is there a CUDA device?")
    shapes = options.shapes or (SHAPES[device.type],)
    cells = plan(shapes, options.tokens, options.skew, DTYPES[device.type], EXPONENTS[device.type], cases)
    variants = own(options.backends)
    # Rather now than after the measurements.
    check_room(options.out / "bench.json", 2**20)
    with console.status("importing peers"):
        others, absent = peers.load(peers.select(options.peers, device.type))
    report = _report(options, device, absent)
    bench = _Bench(options, device, variants + others, report, console, clock)
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with _threads(options.threads), current:
        shaped = [cell for cell in cells if cell.part == "shape"]
        bench.measure(shaped, cells[len(shaped) :])
        if options.explain:
            bench.explain(shaped)
        bench.measure(cells[len(shaped) :])
    write_report(options.out, report)
    show_report(console, report)
    console.print(f"{options.out}: bench.json, bench.png", highlight=False, soft_wrap=True, markup=False)
    _fail_if_wrong(report)
    return report


class _Bench:
    """Fills a report, cell by cell, while there is time."""

    def __init__(
        self,
        options: Options,
        device: torch.device,
        variants: Sequence[Variant],
        report: Report,
        console: Console,
        clock: Clock,
    ) -> None:
        self.options, self.device, self.variants = options, device, variants
        self.report, self.console, self.clock = report, console, clock
        self.said: set[str] = set()

    def measure(self, cells: Sequence[Cell], later: Sequence[Cell] = ()) -> None:
        """Measures cells, and leaves those that come later their part of the time."""
        for index, cell in enumerate(cells):
            if self.clock.left() < 0 and self.report.cells:
                self.report.skipped.append(f"{cell.title}: no time left")
                continue
            # Half of its part of the time is for what comes before its timing.
            coming = sum(WEIGHTS[other.part] for other in (*cells[index:], *later))
            with self.console.status(f"{cell.title}: checking, then timing"):
                self._measure_one(cell, 0.5 * WEIGHTS[cell.part] / coming)
            _free(self.device)

    def _measure_one(self, cell: Cell, share: float) -> None:
        def say(text: str) -> None:
            text = f"{cell.shape}, {cell.case.tokens} tokens: {text}"
            if text not in self.said:
                self.console.print(text, highlight=False, soft_wrap=True, markup=False, style="dim")
            self.said.add(text)

        taking = [variant for variant in self.variants if self._takes_part(variant, cell)]
        try:
            found = measure(cell, taking, self.device, self.options.rounds, self.clock, share, say)
        except RuntimeError as error:  # memory is short, or a kernel broke the GPU
            self.report.skipped.append(f"{cell.title}: {peers.reason(error)}")
            return
        for variant in self.variants:
            if variant not in taking:
                found.left_out[variant.name] = TOO_LONG
        self.report.cells.append(found)
        # What was measured outlives what may go wrong later.
        write_json(self.options.out / "bench.json", asdict(self.report))

    def _takes_part(self, variant: Variant, cell: Cell) -> bool:
        """A sweep over tokens is many shapes: whoever tunes for each needs much of the time left."""
        plenty = self.clock.left() > self.options.seconds / 4
        return cell.part != "tokens" or not variant.tunes or plenty

    def explain(self, cells: Sequence[Cell]) -> None:
        """Kernels of the cells with random routing."""
        for cell in cells:
            if cell.exponent:
                continue
            try:
                problem = Problem.make(cell.case, cell.dtype, self.device)
                self.report.explained += explain(problem, self.variants[0], cell.shape)
            except Exception as error:  # a profiler that does not work here costs its own numbers alone
                self.report.skipped.append(f"kernels of {cell.title}: {peers.reason(error)}")
            _free(self.device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        with suppress(RuntimeError):  # a kernel may have broken the GPU; what was measured is still reported
            torch.cuda.empty_cache()


def _fail_if_wrong(report: Report) -> None:
    for cell in report.cells:
        for name, why in cell.refused.items():
            if name.startswith(OURS):
                raise Failure(f"no numbers: {name} is wrong in {cell.dtype} on {cell.shape}: {why}")
        for name, why in cell.left_out.items():
            if name == OURS:
                raise Failure(f"{name} failed on {cell.shape}: {why}")


def _report(options: Options, device: torch.device, absent: dict[str, str]) -> Report:
    return Report(
        device=device.type,
        device_name=machine.device_name(device),
        threads=options.threads,
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        rounds=options.rounds,
        l2_flushed=device.type == "cuda",
        torch=torch.__version__,
        versions=_versions(),
        commit=machine.commit(),
        date=machine.today(),
        absent=absent,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
