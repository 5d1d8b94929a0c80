"""Every operation forward and backward under compute-sanitizer: `make sanitize`.

Small odd shapes, dropped choices, counts that claim too much and rows that are nobody's; no memory is cached, so that
an access past the end of a tensor is one past the end of its allocation. Exits with 1 if a tool finds anything, and
with 2 where there is no tool; COMPUTE_SANITIZER names it. JOBS processes share the work.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from anabranch.testing import usable_backends
from anabranch.testing.conformance import CHECKS
from anabranch.testing.steps import STEPS, results

TOOLS = {"memcheck": ("--leak-check", "no"), "racecheck": ("--racecheck-report", "all")}
GARBAGE = ("rows_past_the_last_expert", "counts_that_claim_too_much", "dropped_and_repeated_choices")
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9


def cases(part: int, parts: int) -> None:
    """What the tools watch; one of several parts of it."""
    steps = [(step, dtype) for step in STEPS.values() for dtype in (torch.bfloat16, torch.float32)]
    for step, dtype in steps[part::parts]:
        results(step, step.inputs(dtype, "cuda"))
    kernels = sorted({"hopper", "triton"}.intersection(usable_backends("grouped_gemm", "cuda")))
    checks = [(name, backend) for name in GARBAGE for backend in kernels]
    for name, backend in checks[part::parts]:
        CHECKS[name](backend, torch.bfloat16, "cuda")
    torch.cuda.synchronize()


def together(tool: Sequence[str], parts: int) -> list[int]:
    """The exit codes of all parts, run side by side, with what each printed if it failed."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*tool, sys.executable, os.path.abspath(__file__)]
    running = [
        subprocess.Popen(
            [*command, str(part), str(parts)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for part in range(parts)
    ]  # fmt: skip
    codes = []
    for process in running:
        said, _ = process.communicate()
        codes.append(process.returncode)
        if process.returncode:
            print(said)
    return codes


def main() -> int:
    tool = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer") or USUAL
    if not shutil.which(tool):
        print(f"there is no {tool}; name it with COMPUTE_SANITIZER=...", file=sys.stderr)
        return 2
    parts = int(os.environ.get("JOBS", "1"))
    # Once without a tool, which leaves every kernel compiled.
    if any(together((), parts)):
        return 1
    failed = False
    for name, options in TOOLS.items():
        start = time.perf_counter()
        codes = together((tool, "--tool", name, *options, "--error-exitcode", str(FOUND)), parts)
        verdict = f"exits {codes}" if any(codes) else "nothing"
        print(f"{name}: {verdict}, {time.perf_counter() - start:.0f} s", flush=True)
        failed = failed or any(codes)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        cases(int(sys.argv[1]), int(sys.argv[2]))
    else:
        sys.exit(main())
