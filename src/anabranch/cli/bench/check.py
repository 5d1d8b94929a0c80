"""No number without a right result: every variant is compared with what is right before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.cli.bench.peers import reason
from anabranch.cli.bench.problem import DIFFERENTIABLE, Problem, Results, View, truth
from anabranch.cli.bench.variants import Variant
from anabranch.testing.memory import poison

NAMES = ("output", *(f"gradient of {name}" for name in DIFFERENTIABLE))
# Peers round where they like; what matters is that they do the same work.
PEER_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
FEW, LENIENCE = 256, 4
"""Of so few numbers the mean error is chance: so much more is granted. The weights of one token have K."""


@dataclass
class Checked:
    """What may be timed of one variant, and why not the rest."""

    view: View | None = None
    trains: bool = False
    wrong: str | None = None
    unable: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    """Relative, in the root of the mean square, by :data:`NAMES`."""


def check(
    problem: Problem, variants: Iterable[Variant], *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Checked]:
    """Compares output and gradients of each, in memory that held NaN, with :func:`truth`.

    A first call may take a variant long; ``say`` hears of it before.
    """
    right = truth(problem)
    plain = problem.reference(problem.x.dtype)
    found = {}
    for variant in variants:
        if variant.tunes:
            say(f"{variant.name}: its first call on this shape compiles and tunes")
        found[variant.name] = _check_one(problem, variant, right, plain)
    return found


def _check_one(problem: Problem, variant: Variant, right: Results, plain: Results) -> Checked:
    result = Checked()
    try:
        view = problem.view(variant)
        poison(problem.x.device, *right)
        out = view.forward()
        result.wrong = _judge(variant, result, [out], right[:1], plain[:1], problem)
    except Exception as error:  # a peer may fail in any way: it is left out, and the rest goes on
        result.unable = reason(error)
        return result
    if result.wrong:
        return result
    result.view = view
    try:
        poison(problem.x.device, *right)
        results = view.results()
        result.wrong = _judge(variant, result, results, right, plain, problem)
    except Exception as error:
        result.unable = f"no training: {reason(error)}"
        return result
    result.trains = not result.wrong
    if result.wrong:
        result.view = None
    return result


def _judge(
    variant: Variant,
    result: Checked,
    actual: Iterable[Tensor],
    right: Iterable[Tensor],
    plain: Iterable[Tensor],
    problem: Problem,
) -> str | None:
    """Notes the errors; returns what is too far off, or None."""
    terms = max(problem.gate_up.shape[1:] + problem.ids.shape[:1])
    verdict = None
    for label, value, truth_, loop in zip(NAMES, actual, right, plain, strict=False):
        if value.shape != truth_.shape:
            return f"{label}: its shape is {tuple(value.shape)}"
        size = _rms(truth_)
        wrong, usual = _difference(value, truth_), _difference(loop, truth_)
        result.errors[label] = _rms(wrong) / size if size else _rms(wrong)
        excess = _excess(variant, wrong, usual, size, terms, problem.x.dtype)
        verdict = verdict or (f"{label}: {excess}" if excess else None)
        del wrong, usual
    return verdict


def _excess(
    variant: Variant, wrong: Tensor, loop: Tensor, size: float, terms: int, dtype: torch.dtype
) -> str | None:
    """How a result is too far off, or None. Peers by a flat relative error of the whole.

    Ours: its root mean square within twice the loop's, and no element beyond eight times the loop's worst. Errors of
    ``sqrt(terms)`` roundings of the fp32 accumulator are granted to any order of summation; the loop's may be lucky.
    """
    lenience = LENIENCE if wrong.numel() < FEW else 1
    if not variant.is_ours:
        return _above("off", _rms(wrong), lenience * PEER_ERROR[dtype] * size)
    usual = max(_rms(loop), terms**0.5 * 2.0**-24 * size)
    limit = lenience * (2 * usual + torch.finfo(dtype).eps / 2 * size)
    worst = 8 * max(float(loop.abs().max()), usual)
    return _above("off", _rms(wrong), limit) or _above("one element off", float(wrong.abs().max()), worst)


def _above(what: str, error: float, limit: float) -> str | None:
    # A NaN is not within any limit.
    return None if error <= limit else f"{what} by {error:.1e}, more than {limit:.1e}"


def _difference(value: Tensor, right: Tensor) -> Tensor:
    return value.to(right.dtype).sub_(right) if value.dtype != right.dtype else value - right


def _rms(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value)) / max(1, value.numel()) ** 0.5
