"""No tiles without right numbers: what a candidate has to agree with before it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.testing import assert_within_budget, in_any_order
from anabranch.tuning.search import Sample

CHUNK = 2**24
"""Elements compared at a time."""


class Check:
    """The results of the heuristic's tiles, found right, and how far another's may be from them.

    On the rows of the samples, the error against fp64 is held to twice that of plain PyTorch in the same
    precision, or of an fp32 sum in another order than its, and one rounding. Everywhere else a result is held to the
    heuristic's: two results within that budget differ by at most twice as much.
    """

    def __init__(self, results: Sequence[Tensor], samples: Sequence[Sample]) -> None:
        """Takes the heuristic's results.

        Raises:
            AssertionError: they are wrong themselves.
        """
        self.samples = samples = [
            replace(sample, baseline=in_any_order(sample.baseline, sample.truth, sample.terms))
            for sample in samples
        ]
        self.expected = [_rows(value).clone() for value in results]
        self.relative = []
        for expected, sample in zip(self.expected, samples, strict=True):
            assert bool(expected.isfinite().all()), f"{sample.name}: it is not finite"
            _against_truth(expected, sample)
            self.relative.append(_worst(sample))

    def refusal(self, results: Sequence[Tensor]) -> str | None:
        """Why results are wrong, or None if they are right."""
        checked = zip(map(_rows, results), self.expected, self.samples, self.relative, strict=True)
        for actual, expected, sample, relative in checked:
            try:
                _against_truth(actual, sample)
            except AssertionError as error:
                return str(error)
            floor = float(expected.abs().max()) / 64 if expected.numel() else 0.0
            for a, b in _chunks(actual, expected):
                scale = b.abs().amax(-1, keepdim=True)
                scale = torch.where(scale > 0, scale.clamp(min=floor), 0)
                info = torch.finfo(actual.dtype)
                rounding = torch.where(scale > 0, (b.abs() * info.eps).clamp(min=info.tiny * info.eps), 0)
                # NaN compares false, so it lands among the failures.
                wrong = int((~((a - b).abs() <= 4 * relative * scale + 2 * rounding)).sum())
                if wrong:
                    return f"{sample.name}: {wrong} elements are far from what the heuristic's tiles give"
        return None


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _against_truth(actual: Tensor, sample: Sample) -> None:
    assert_within_budget(actual[sample.rows], sample.truth, sample.baseline, name=sample.name)


def _worst(sample: Sample) -> float:
    """The baseline's largest error relative to the largest magnitude in its row."""
    if sample.truth.numel() == 0:
        return 0.0
    scale = sample.truth.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale.clamp(min=float(scale.max()) / 64), torch.inf)
    return float(((sample.baseline.double() - sample.truth).abs() / scale).max())


def _chunks(*values: Tensor) -> Iterator[list[Tensor]]:
    """The same rows of each, in more than their own precision."""
    wide = torch.float64 if values[0].dtype == torch.float32 else torch.float32
    step = max(1, CHUNK // max(values[0].shape[1], 1))
    for start in range(0, values[0].shape[0], step):
        yield [value[start : start + step].to(wide) for value in values]
