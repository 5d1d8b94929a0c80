"""No number without a right result: every variant is compared with fp64 before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.cli import peers
from anabranch.cli.bench.variants import DIFFERENTIABLE, OURS, Problem, Variant
from anabranch.cli.failure import Failure

NAMES = ("output", *(f"gradient of {name}" for name in DIFFERENTIABLE))
# Peers round where they like; what matters is that they do the same work.
PEER_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def check(problem: Problem, variants: dict[str, Variant]) -> dict[str, str]:
    """Compares output and gradients with an fp64 loop.

    Returns:
        why a peer cannot run here at all, by name. It is then left out.

    Raises:
        Failure: a result is wrong.
    """
    dtype = problem.x.dtype
    truth = problem.to(torch.float64).train(peers.moe_loop)
    baseline = problem.train(peers.moe_loop)
    terms = max(problem.gate_up.shape[1:] + problem.ids.shape[:1])
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
            excess = _excess(name, actual, right, plain, terms, dtype)
            if excess is not None:
                raise Failure(f"no numbers: {name} is wrong in {dtype}: {label}: {excess}")
    return unable


def _excess(
    name: str, actual: Tensor, right: Tensor, plain: Tensor, terms: int, dtype: torch.dtype
) -> str | None:
    """How a result is too far off, or None. Peers by a flat relative error of the whole.

    Ours: its root mean square within twice the loop's, and no element beyond eight times the loop's worst. Errors of
    ``sqrt(terms)`` roundings of the fp32 accumulator are granted to any order of summation; the loop's may be lucky.
    """
    wrong, loop = (value.double() - right for value in (actual, plain))
    size = _rms(right)
    if name != OURS:
        return _above("off", _rms(wrong), PEER_ERROR[dtype] * size)
    usual = max(_rms(loop), terms**0.5 * 2.0**-24 * size)
    limit = 2 * usual + torch.finfo(actual.dtype).eps / 2 * size
    worst = 8 * max(float(loop.abs().max()), usual)
    return _above("off", _rms(wrong), limit) or _above("one element off", float(wrong.abs().max()), worst)


def _above(what: str, error: float, limit: float) -> str | None:
    # A NaN is not within any limit.
    return None if error <= limit else f"{what} by {error:.1e}, more than {limit:.1e}"


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
