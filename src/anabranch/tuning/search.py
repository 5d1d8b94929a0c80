"""The search: every candidate is run, checked, and only then timed against what the heuristic chose."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.tuning.key import Key
from anabranch.tuning.timing import medians
from anabranch.tuning.warm import warm

LOG = logging.getLogger("anabranch.tuning")
"""Told of every step at INFO; the record's ``tuning`` is a :class:`Progress`."""

QUICK, THOROUGH, FINALISTS = 3, 15, 5
"""Rounds for all, then rounds for a few."""
FAMILIES = 2
"""How many families are searched whole, beside the heuristic's, after one of each was tried."""
MARGIN = 0.02
"""How much faster than the heuristic's a candidate has to be: less is noise."""

Timer = Callable[[Mapping[Any, Callable[[], object]], int], Mapping[Any, float]]
"""Seconds of each run, from so many rounds."""


class NothingToCheck(Exception):  # noqa: N818 - a state of the call's data, not an error
    """The call's data cannot tell right from wrong: it is zero throughout, or not finite."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of a result, seen as a matrix of its last dimension, with the truth about them.

    Attributes:
        name: what to call the result.
        rows: which rows.
        truth: these rows in fp64.
        baseline: the same in plain PyTorch, in the result's precision.
        terms: how many terms each element adds up, in whatever order a candidate does; 0 if that is not to count.
    """

    name: str
    rows: Tensor
    truth: Tensor
    baseline: Tensor
    terms: int = 0


@dataclass(frozen=True, eq=False)
class Trial:
    """A call to be tuned for.

    Attributes:
        key: what the result will hold for.
        default: the heuristic's configuration.
        candidates: the others.
        family: what a configuration has in common with those that are about as fast.
        outputs: memory for the results like the call's own, which is never touched.
        run: writes the results into such memory with a configuration.
        samples: the truth, one for each output.
    """

    key: Key
    default: Any
    candidates: Sequence[Any]
    family: Callable[[Any], Hashable]
    outputs: Callable[[], Sequence[Tensor]]
    run: Callable[[Any, Sequence[Tensor]], None]
    samples: Callable[[], Sequence[Sample]]


@dataclass(frozen=True)
class Outcome:
    """What a search found. ``rejected`` has the reason for every candidate that could not win."""

    key: Key
    best: Any
    seconds: float
    default: Any
    default_seconds: float
    rejected: dict[Any, str]

    def entry(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "config": dict(vars(self.best)),
            "microseconds": round(self.seconds * 1e6, 2),
            "heuristic_microseconds": round(self.default_seconds * 1e6, 2),
        }


@dataclass(frozen=True)
class Progress:
    """Where a search is: ``done`` of ``total`` candidates are run and checked; ``outcome`` when it is over."""

    key: Key
    done: int
    total: int
    outcome: Outcome | None = None

    def __str__(self) -> str:
        if self.outcome is None:
            return f"{self.key}: {self.done} of {self.total}"
        ratio = self.outcome.default_seconds / self.outcome.seconds
        return f"{self.key}: {self.outcome.best}, {ratio:.2f} x the heuristic's speed"


def search(trial: Trial, timer: Timer | None = None) -> Outcome:
    """The fastest right configuration, as far as one of each family says which families are worth a look.

    Raises:
        NothingToCheck: the data cannot tell right from wrong.
        AssertionError: the heuristic's tiles give wrong results.
    """
    from anabranch.tuning.check import Check

    outputs = trial.outputs()
    _run(trial, trial.default, outputs)
    for value in outputs:
        if not bool(value.isfinite().all()) or not bool(value.any()):
            raise NothingToCheck
    check = Check(outputs, trial.samples())
    rejected: dict[Any, str] = {}

    def times(configs: Sequence[Any], rounds: int) -> Mapping[Any, float]:
        runs = {config: lambda config=config: trial.run(config, outputs) for config in configs}
        return timer(runs, rounds) if timer else medians(runs, rounds, outputs[0].device)

    def tried(configs: Sequence[Any], before: int, total: int) -> Mapping[Any, float]:
        """Seconds of those that are right, and of the heuristic's."""
        warm(trial, configs, outputs)
        for done, config in enumerate(configs, before):
            _tell(Progress(trial.key, done, total))
            reason = _attempt(trial, config, outputs) or check.refusal(outputs)
            if reason is not None:
                rejected[config] = reason
        return times([trial.default, *(c for c in configs if c not in rejected)], QUICK)

    first, others = _families(trial)
    _tell(Progress(trial.key, 0, len(first)))
    found = tried(list(first.values()), 0, len(first))
    ranked = sorted(first, key=lambda family: found.get(first[family], math.inf))
    best_families = {trial.family(trial.default), *ranked[:FAMILIES]}
    rest = [config for config in others if trial.family(config) in best_families]
    total = len(first) + len(rest)
    quick = {**found, **tried(rest, len(first), total)} if rest else found
    finalists = sorted((c for c in quick if c != trial.default), key=quick.__getitem__)[:FINALISTS]
    last = times([trial.default, *finalists], THOROUGH)
    best = min(last, key=last.__getitem__)
    if last[best] > (1 - MARGIN) * last[trial.default]:
        best = trial.default
    outcome = Outcome(trial.key, best, last[best], trial.default, last[trial.default], rejected)
    _tell(Progress(trial.key, total, total, outcome))
    return outcome


def _families(trial: Trial) -> tuple[dict[Hashable, Any], list[Any]]:
    """One candidate of each family, the most like the heuristic's, and all others."""

    def unlike(config: Any) -> int:
        return sum(value != getattr(trial.default, name) for name, value in vars(config).items())

    first: dict[Hashable, Any] = {}
    candidates = [config for config in dict.fromkeys(trial.candidates) if config != trial.default]
    for config in candidates:
        family = trial.family(config)
        if family not in first or unlike(config) < unlike(first[family]):
            first[family] = config
    return first, [config for config in candidates if config != first[trial.family(config)]]


def _run(trial: Trial, config: Any, outputs: Sequence[Tensor]) -> None:
    for value in outputs:
        value.fill_(math.nan)
    trial.run(config, outputs)


def _attempt(trial: Trial, config: Any, outputs: Sequence[Tensor]) -> str | None:
    """Why a candidate does not run, in one line, or None. Compilers fail in many ways; no memory is no such failure."""
    try:
        _run(trial, config, outputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _tell(progress: Progress) -> None:
    LOG.info("%s", progress, extra={"tuning": progress})
