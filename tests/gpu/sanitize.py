"""Every operation forward and backward under compute-sanitizer: `make sanitize`.

Small odd shapes, dropped choices, counts that claim too much and rows that are nobody's; no memory is cached, so that
an access past the end of a tensor is one past the end of its allocation. Memcheck watches every kernel, racecheck the
project's own, whose names end in _kernel. The two run side by side in JOBS processes, which take case after case.

Exits with 1 if a tool finds anything or has not seen every case after LIMIT seconds, and with 2 where there is no tool;
COMPUTE_SANITIZER names it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from findings import HandOver, read
from triton import knobs

from anabranch.testing import usable_backends
from anabranch.testing.conformance import CHECKS
from anabranch.testing.steps import STEPS, results

JOBS = int(os.environ.get("JOBS", "2"))
LIMIT = float(os.environ.get("LIMIT", "1800"))
GRACE = 15  # seconds for the case that a process is at when the time is up
FOUND = 9
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
WATCH = ("--error-exitcode", str(FOUND), "--print-limit", "0", "--show-backtrace", "no")
TOOLS = {
    "memcheck": ("--leak-check", "no"),
    "racecheck": (
        *("--racecheck-report", "hazard", "--kernel-name", "regex=_kernel$"),
        *("--racecheck-num-workers", str(max(2, (os.cpu_count() or 2) // JOBS))),
    ),
}
GARBAGE = ("rows_past_the_last_expert", "counts_that_claim_too_much", "dropped_and_repeated_choices")
LINES = 40


def cases() -> dict[str, Callable[[], Any]]:
    """What the tools watch, the longest first."""
    made: dict[str, Callable[[], Any]] = {}
    for backend in sorted({"hopper", "triton"}.intersection(usable_backends("grouped_gemm", "cuda"))):
        for name in GARBAGE:
            made[f"{name} {backend}"] = lambda n=name, b=backend: CHECKS[n](b, torch.bfloat16, "cuda")
    for name, step in STEPS.items():
        for dtype in (torch.bfloat16, torch.float32):
            made[f"{name} {dtype}"] = lambda s=step, d=dtype: results(s, s.inputs(d, "cuda"))
    return made


def work(folder: Path, until: float) -> None:
    """Runs cases that no other process has taken, while there is time; says which, and which kernels they load."""
    knobs.runtime.kernel_load_end_hook.add(tell)
    for number, (name, case) in enumerate(cases().items()):
        if time.time() > until:
            break
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        print("at", name, flush=True)
        case()
        torch.cuda.synchronize()
        print("done", name, flush=True)


def tell(module: Any, function: Any, name: str, files: Mapping[str, str], key: str) -> None:
    """Prints a kernel's name, shared memory and warps, those of partitions too, and the warps that start it."""
    made = json.loads(Path(files[f"{name}.json"]).read_text())
    # A cache may have been shipped without it: then nothing of the kernel is excused.
    ttgir = files.get(f"{name}.ttgir")
    starters = re.search(r'"ttg.num-warps" = (\d+)', Path(ttgir).read_text()) if ttgir else None
    print("kernel", name, made["shared"], made["num_warps"], starters[1] if starters else 0, flush=True)


class Tool:
    """Processes that share the cases, watched by one tool or, with no command, by none."""

    def __init__(self, name: str, command: Sequence[str], parts: int, folder: Path, until: float) -> None:
        self.name, self.until, self.start = name, until, time.time()
        (folder / "taken").mkdir(parents=True)
        self.logs = [folder / f"{part}.log" for part in range(parts)] if command else []
        self.said = [folder / f"{part}.txt" for part in range(parts)]
        self.parts = []
        for part, path in enumerate(self.said):
            log = ("--log-file", str(self.logs[part])) if command else ()
            child = (sys.executable, os.path.abspath(__file__), str(folder / "taken"), str(until))
            with path.open("w") as said:
                self.parts.append(
                    subprocess.Popen(
                        [*command, *log, *child], stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                    )
                )  # fmt: skip

    def ended(self) -> bool:
        """Whether all have ended; those whose time is long up are made to."""
        running = [process for process in self.parts if process.poll() is None]
        if time.time() > self.until + GRACE:
            for process in running:
                os.killpg(process.pid, signal.SIGKILL)
        return not running

    def verdict(self, names: Sequence[str]) -> bool:
        """Prints what was found and which cases were not seen; whether both are nothing."""
        said = [path.read_text(errors="replace") for path in self.said]
        done, kernels = set(), defaultdict(set)
        for line in "\n".join(said).splitlines():
            if line.startswith("done "):
                done.add(line.removeprefix("done "))
            elif loaded := re.fullmatch(r"kernel (\w+) (\d+) (\d+) (\d+)", line):
                kernels[loaded[1]].add(HandOver(*map(int, loaded.groups()[1:])))
        logs = [path.read_text(errors="replace") if path.exists() else "" for path in self.logs]
        excused, found = read("\n".join(logs), kernels)
        codes = [process.returncode for process in self.parts]
        if FOUND in codes and not found and not excused:
            found["error of which the tool's report says nothing that can be read"] += 1
        broken = [
            part
            for part, code in enumerate(codes)
            if code not in (0, FOUND) or (logs and "SUMMARY: " not in logs[part])
        ]
        missed = [each for each in names if each not in done]
        print(
            f"{self.name}: {'NOT FINISHED, ' if missed or broken else ''}{found.total() or 'nothing'} found in"
            f" {len(done)} of {len(names)} cases, {len(kernels)} of the project's kernels;"
            f" {time.time() - self.start:.0f} s"
        )
        if excused:
            print(
                f"  not counted: {excused} hazards of the bytes by which warp_specialize starts its partitions;"
            )
            print("  the compiler puts barriers between their writes and reads (findings.py says how)")
        for what, count in found.most_common(LINES):
            print(f"  {count} x {what}"[:400])
        if len(found) > LINES:
            print(f"  and {len(found) - LINES} more such lines")
        if missed:
            print(f"  not seen: {', '.join(missed[:4])}{' and others' if len(missed) > 4 else ''}")
        for part in broken[:4]:
            print(
                f"  one of {len(broken)} processes that went wrong ended with {codes[part]}; the last it said:"
            )
            print(*(f"    {line}"[:200] for line in said[part].splitlines()[-6:]), sep="\n")
        sys.stdout.flush()
        return not (found or missed or broken)


def together(tools: Sequence[Tool], names: Sequence[str]) -> bool:
    """Gives each tool's verdict as soon as it is known; whether all are good."""
    waiting, good = list(tools), True
    while waiting:
        for tool in [each for each in waiting if each.ended()]:
            waiting.remove(tool)
            good = tool.verdict(names) and good
        time.sleep(0.2)
    return good


def main() -> int:
    tool = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer") or USUAL
    if not shutil.which(tool):
        print(f"there is no {tool}; name it with COMPUTE_SANITIZER=...", file=sys.stderr)
        return 2
    names, start = list(cases()), time.time()
    with tempfile.TemporaryDirectory() as name:
        # Once without a tool, which leaves every kernel compiled.
        together([Tool("compiled", (), JOBS, Path(name, "none"), start + LIMIT / 2)], names)
        running = [
            Tool(
                each, (tool, "--tool", each, *WATCH, *own), max(1, JOBS // 2), Path(name, each), start + LIMIT
            )
            for each, own in TOOLS.items()
        ]
        return 0 if together(running, names) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), float(sys.argv[2]))
    else:
        sys.exit(main())
