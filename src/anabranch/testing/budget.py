"""Comparing results with a reference, within bounds that are derived rather than guessed.

Both assertions fail on a NaN or an infinity, on a wrong shape, and whenever a result of zeros would have
passed although the reference is not zero: then the bound says nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_component_wise", "assert_same", "assert_within_budget", "in_any_order"]


def rounding(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """How far rounding to ``dtype`` may move each element: half a unit in the last place."""
    info = torch.finfo(dtype)
    return (reference.abs() * (info.eps / 2)).clamp(min=info.tiny * info.eps / 2)


def assert_within_budget(
    actual: Tensor,
    reference: Tensor,
    baseline: Tensor,
    *,
    name: str = "result",
    rows: bool = True,
    scale: Tensor | None = None,
) -> None:
    """Demands that ``actual`` is at most twice as wrong as ``baseline``, and one rounding more.

    The baseline's largest error, over the whole tensor, is doubled. With ``rows`` it is also taken relative
    to the largest magnitude in its row (the last dimension) and scaled back by each row's own, so that rows
    of small numbers are held to small errors, and rows whose reference is all zero must be exactly zero. A
    row counts as at least 1/64 of the largest, for it may be small by cancellation. With ``scale`` errors are
    relative to that instead, element by element.

    Args:
        actual: the result under test.
        reference: the truth, fp64, from inputs rounded to the tested dtype.
        baseline: the same in plain PyTorch, written independently, in the precision of ``actual``.
        name: what to call the result in the message.
        rows: whether to bound each row by its own scale.
        scale: magnitudes that errors are proportional to (as ``|x| @ |w|`` for ``x @ w``), fp64.
    """
    _comparable(name, actual, reference)
    _comparable(name, baseline, reference, "baseline")
    reference = reference.detach()
    if reference.numel() == 0:
        return
    wrong = (baseline.detach().to(reference) - reference).abs()
    _finite(f"{name}'s baseline", wrong)
    bound = (2 * wrong.max()).expand(reference.shape)
    band = rounding(reference, actual.dtype)
    if scale is None and rows and reference.dim() > 0:
        scale = _row_scale(reference)
    if scale is not None:
        scale = scale.to(reference.device)
        bound = torch.minimum(bound, 2 * _ratio(wrong, scale).max() * scale)
        band = torch.where(scale > 0, band, 0)
    _within(name, actual, reference, bound + band)


def in_any_order(baseline: Tensor, reference: Tensor, terms: int) -> Tensor:
    """The baseline, but no nearer to the truth than an fp32 sum of ``terms`` terms in another order may end.

    A library's sum in blocks is more exact than one that goes from the first term to the last, and both are
    right. The latter is a random walk of as many roundings: sqrt(terms) of them, of numbers as large as the largest
    result in the row (the last dimension), which counts as at least 1/64 of the largest of all. TF32, whose
    products are off by 2**-11, ends up far beyond. In other precisions the baseline is returned as it is: half
    precision rounds its results more coarsely than that.

    Args:
        baseline: plain PyTorch's result.
        reference: the truth, fp64.
        terms: how many terms each element adds up.
    """
    if baseline.dtype != torch.float32 or reference.numel() == 0:
        return baseline
    scale = _row_scale(reference.detach())
    walk = terms**0.5 * 2.0**-24 * scale
    lucky = (baseline.detach().to(reference) - reference).abs() < walk
    return torch.where(lucky, reference + walk, baseline.to(reference))


def assert_component_wise(
    actual: Tensor,
    reference: Tensor,
    magnitude: Tensor,
    length: int,
    *,
    name: str = "result",
    constant: float = 2.0,
    roundings: int = 1,
) -> None:
    """Demands the error bound of a dot product of ``length`` terms, element by element.

    ``|actual - reference| <= roundings * u * |reference| + constant * length * v * magnitude``, with u the
    unit roundoff of the result's dtype, v that of the accumulator's (2**-24, or 2**-53 for fp64).

    Args:
        actual: the result under test.
        reference: the truth, fp64, from inputs rounded to the tested dtype.
        magnitude: ``|x| @ |w|``, the same product of absolute values, fp64.
        length: how many terms are added up.
        name: what to call the result in the message.
        constant: slack for operations beside the sum.
        roundings: how many times the contract allows a result to be rounded.
    """
    _comparable(name, actual, reference)
    _comparable(name, magnitude, reference, "magnitude")
    if reference.numel() == 0:
        return
    unit = 2.0**-53 if actual.dtype == torch.float64 else 2.0**-24
    bound = constant * length * unit * magnitude.detach().to(reference.device)
    # What is structurally zero has no magnitude, and then no rounding either.
    band = torch.where(magnitude == 0, 0, roundings * rounding(reference.detach(), actual.dtype))
    _within(name, actual, reference.detach(), bound + band)


def assert_same(actual: Tensor, expected: Tensor, *, name: str = "result") -> None:
    """Demands the same dtype, shape and bits (any NaN equals any NaN, but 0 does not equal a tiny number)."""
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if not bool(same.all()):
        where = tuple(torch.nonzero(~same)[0].tolist())
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} elements differ, the first at {where}: "
            f"{actual[where].item()!r}, expected {expected[where].item()!r}"
        )


def _row_scale(reference: Tensor) -> Tensor:
    """The largest magnitude in each row, but at least 1/64 of the largest of all; 0 where a row is all zero."""
    scale = reference.abs().amax(-1, keepdim=True) if reference.dim() > 0 else reference.abs()
    return torch.where(scale > 0, scale.clamp(min=float(scale.max()) / 64), 0)


def _ratio(wrong: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, wrong / scale.where(scale > 0, 1), 0)


def _comparable(name: str, value: Tensor, reference: Tensor, role: str = "actual") -> None:
    assert reference.dtype == torch.float64, f"{name}: the reference must be float64, not {reference.dtype}"
    assert value.is_floating_point(), f"{name}: {role} has dtype {value.dtype}, which is not floating"
    assert value.shape == reference.shape, (
        f"{name}: {role} has shape {tuple(value.shape)}, the reference {tuple(reference.shape)}"
    )
    _finite(f"{name}'s reference", reference)


def _finite(name: str, value: Tensor) -> None:
    assert bool(value.isfinite().all()), f"{name} is not finite"


def _within(name: str, actual: Tensor, reference: Tensor, bound: Tensor) -> None:
    if bool((reference != 0).any()) and bool((reference.abs() <= bound).all()):
        raise AssertionError(f"{name}: the bound is so wide that zeros would pass; the test says nothing")
    error = (actual.detach().to(reference) - reference).abs()
    # NaN compares false, so it lands among the failures.
    failed = ~(error <= bound)
    if not bool(failed.any()):
        return
    excess = torch.where(failed, error / bound, 0).nan_to_num(nan=torch.inf)
    excess = excess.where(~(failed & error.isnan()), torch.inf)
    flat = int(excess.reshape(-1).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), reference.shape))
    raise AssertionError(
        f"{name}: {int(failed.sum())} of {failed.numel()} elements are out of bounds, the worst at {where}: "
        f"{actual[where].item():.9g}, expected {reference[where].item():.9g}; "
        f"error {error[where].item():.3g} = {excess[where].item():.3g} x its bound {bound[where].item():.3g}"
    )
