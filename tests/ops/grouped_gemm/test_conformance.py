"""Every backend of grouped_gemm passes every check, and no broken one does."""

import itertools

import pytest
import torch

from anabranch.ops.grouped_gemm.cases import MODELS, SMALL
from anabranch.testing.broken import FAULTS, installed
from anabranch.testing.conformance import CHECKS, VARIANTS, check_case

on_every_device = pytest.mark.op("grouped_gemm")
DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


@on_every_device
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_check(check, dtype, backend, device):
    if (device, dtype) == ("cuda", "float16") and check.startswith("memory_layout"):
        pytest.skip("loads as bfloat16 does, in as many kernels")
    CHECKS[check](backend, DTYPES[dtype], device)


# Each case meets two combinations of flags; along the table all of them are met.
CASES = [
    (case, VARIANTS[(2 * index + turn) % len(VARIANTS)])
    for turn in (0, 1)
    for index, case in enumerate(SMALL)
]


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "flags"), CASES, ids=[f"{case}-{flags}" for case, flags in CASES])
def test_case(case, flags, dtype, backend, device):
    check_case(backend, DTYPES[dtype], device, case, flags)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_backend_is_rejected(fault):
    def rejects(check, dtype):
        try:
            check("eager", dtype, "cpu")
        except (AssertionError, RuntimeError):  # autograd itself notices some mutations
            return True
        return False

    with installed(fault):
        checks = itertools.product((torch.float32, torch.bfloat16), CHECKS.values())
        assert any(rejects(check, dtype) for dtype, check in checks)
    # The mistake was the backend's, and it is gone.
    CHECKS["every_variant"]("eager", torch.float32, "cpu")


def test_the_variants_meet_every_pair_of_flags():
    names = ("gather", "scatter", "bias", "scale", "activation", "transpose_weight")
    for first, second in itertools.combinations(names, 2):
        met = {(bool(getattr(f, first)), bool(getattr(f, second))) for f in VARIANTS}
        assert len(met) == 4, f"{first} and {second} meet only as {met}"


def test_cases_have_names_of_their_own():
    everything = (*MODELS, *SMALL)
    assert len({case.name for case in everything}) == len(everything)
    assert all(case.N % 2 == 0 for case in everything)
