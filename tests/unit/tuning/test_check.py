"""The tuner's check: an fp32 sum may go in any order, but may not lose bits."""

import pytest
import torch

from anabranch.testing import randn
from anabranch.tuning import Sample
from anabranch.tuning.check import Check

ROWS, N, TERMS = 32, 48, 1024


def summed(x, w, block):
    """x @ w.T in fp32, so many terms at a time."""
    total = torch.zeros(ROWS, N)
    for a, b in zip(x.split(block, 1), w.split(block, 1), strict=True):
        total = total + a @ b.T
    return total


def low(value):
    """Ten bits of a fraction, as TF32 has them."""
    return (value.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@pytest.fixture(params=[1e-3, 1.0, 30.0], ids=str)
def problem(request):
    x, w = randn(ROWS, TERMS, scale=request.param), randn(N, TERMS)
    truth = x.double() @ w.double().T
    # As exact a baseline as there can be.
    return x, w, Sample("y", torch.arange(ROWS), truth, truth.float(), TERMS)


@pytest.mark.parametrize("first", [1, 256])
def test_a_sum_in_another_order_is_right(problem, first):
    x, w, sample = problem
    check = Check([summed(x, w, first)], [sample])
    for block in (1, 16, TERMS):
        assert check.refusal([summed(x, w, block)]) is None


def test_fewer_bits_are_refused(problem):
    x, w, sample = problem
    wrong = summed(low(x), low(w), 64)
    assert "out of bounds" in Check([summed(x, w, 1)], [sample]).refusal([wrong])
    with pytest.raises(AssertionError, match="out of bounds"):
        Check([wrong], [sample])


def test_without_a_number_of_terms_only_the_baseline_counts(problem):
    x, w, sample = problem
    plain = Sample(sample.name, sample.rows, sample.truth, sample.baseline)
    with pytest.raises(AssertionError, match="out of bounds"):
        Check([summed(x, w, 1)], [plain])
