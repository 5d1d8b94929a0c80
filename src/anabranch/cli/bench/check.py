"""No number without a right result: every variant is compared with fp64 before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.cli import peers
from anabranch.cli.bench.variants import DIFFERENTIABLE, OURS, Problem, Variant
from anabranch.cli.failure import Failure
from anabranch.testing.budget import assert_within_budget

NAMES = ("output", *(f"gradient of {name}" for name in DIFFERENTIABLE))
# Peers round where they like; what matters is that they do the same work.
PEER_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def check(problem: Problem, variants: dict[str, Variant]) -> dict[str, str]:
    """Compares output and gradients with an fp64 loop; ours within twice the error of a loop in its dtype.

    Returns:
        why a peer cannot run here at all, by name. It is then left out.

    Raises:
        Failure: a result is wrong.
    """
    dtype = problem.x.dtype
    truth = problem.to(torch.float64).train(peers.moe_loop)
    baseline = problem.train(peers.moe_loop)
    unable = {}
    for name, variant in variants.items():
        try:
            results = problem.train(variant)
        except (RuntimeError, NotImplementedError) as error:
            if name == OURS:
                raise
            unable[name] = str(error).splitlines()[0]
            continue
        for label, actual, right, plain in zip(NAMES, results, truth, baseline, strict=True):
            try:
                _compare(name, actual, right, plain, dtype)
            except AssertionError as error:
                raise Failure(f"no numbers: {name} is wrong in {dtype}: {label}: {error}") from error
    return unable


def _compare(name: str, actual: Tensor, right: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    if name == OURS:
        assert_within_budget(actual, right, plain)
        return
    error = float((actual.double() - right).norm() / right.norm())
    assert error <= PEER_ERROR[dtype], f"{error:.1e} off, more than {PEER_ERROR[dtype]:.0e}"
