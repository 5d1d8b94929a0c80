"""Every operation forward and backward under compute-sanitizer: `make sanitize`.

Small odd shapes, dropped choices, counts that claim too much and rows that are nobody's; no memory is cached, so that
an access past the end of a tensor is one past the end of its allocation. Exits with 1 if a tool finds anything, and
with 2 where there is no tool; COMPUTE_SANITIZER names it.
"""

import os
import shutil
import subprocess
import sys
import time

import torch

from anabranch.testing import usable_backends
from anabranch.testing.conformance import CHECKS
from anabranch.testing.steps import STEPS, results

TOOLS = {"memcheck": ("--leak-check", "no"), "racecheck": ("--racecheck-report", "all")}
GARBAGE = ("rows_past_the_last_expert", "counts_that_claim_too_much", "dropped_and_repeated_choices")
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9


def cases() -> None:
    """What the tools watch."""
    for dtype in (torch.bfloat16, torch.float32):
        for step in STEPS.values():
            results(step, step.inputs(dtype, "cuda"))
    for backend in {"hopper", "triton"}.intersection(usable_backends("grouped_gemm", "cuda")):
        for name in GARBAGE:
            CHECKS[name](backend, torch.bfloat16, "cuda")
    torch.cuda.synchronize()


def main() -> int:
    tool = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer") or USUAL
    if not shutil.which(tool):
        print(f"there is no {tool}; name it with COMPUTE_SANITIZER=...", file=sys.stderr)
        return 2
    this = [sys.executable, os.path.abspath(__file__), "--cases"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Once without a tool, which leaves every kernel compiled.
    subprocess.run(this, env=environment, check=True)
    failed = []
    for name, options in TOOLS.items():
        start = time.perf_counter()
        watched = [tool, "--tool", name, *options, "--error-exitcode", str(FOUND), *this]
        code = subprocess.run(watched, env=environment).returncode
        print(f"{name}: {'nothing' if code == 0 else f'exit {code}'}, {time.perf_counter() - start:.0f} s")
        if code:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    if "--cases" in sys.argv:
        cases()
    else:
        sys.exit(main())
