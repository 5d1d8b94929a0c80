"""What explain says of a call, and of what is no operation."""

import pytest
import torch

from anabranch import ExpertLayout, explain, grouped_gemm, rope_index
from anabranch.errors import ArgumentError
from anabranch.testing import randn

LAYOUT = ExpertLayout.from_counts(torch.tensor([2]), 2)


def test_says_what_runs_and_what_does_not():
    found = explain(grouped_gemm, randn(2, 3), randn(1, 4, 3), LAYOUT)
    assert found.function == "grouped_gemm"
    assert found.backend == "eager"
    assert list(found.refusals) == ["hopper", "triton"]
    assert found.padding is None
    text = str(found).splitlines()
    assert text[0] == "grouped_gemm runs on: eager"
    assert text[1] == f"  not hopper: {found.refusals['hopper']}"
    assert text[-1] == "  kept for the backward beyond the arguments: 0 bytes"


def test_the_reference_is_asked_for_by_name():
    found = explain(grouped_gemm, randn(2, 3), randn(1, 4, 3), LAYOUT, backend="reference")
    assert (found.backend, found.refusals) == ("reference", {})


def test_arguments_are_checked_as_the_call_does():
    with pytest.raises(ArgumentError, match="grouped_gemm: x: expected shape"):
        explain(grouped_gemm, randn(5, 3), randn(1, 4, 3), LAYOUT)


def test_arguments_that_are_missing_or_unknown():
    with pytest.raises(TypeError) as caught:
        explain(grouped_gemm, randn(2, 3), randn(1, 4, 3))
    assert str(caught.value) == "grouped_gemm() missing a required argument: 'layout'"
    with pytest.raises(TypeError, match=r"^grouped_gemm\(\) got an unexpected keyword argument 'rows'"):
        explain(grouped_gemm, randn(2, 3), randn(1, 4, 3), LAYOUT, rows=2)


def test_a_module_goes_by_its_class():
    with pytest.raises(ArgumentError) as caught:
        explain(torch.nn.Sequential(torch.nn.Linear(2, 2)), randn(1, 2))
    expected = "explain: fn: expected an operation of anabranch that has backends, got Sequential"
    assert str(caught.value) == expected


@pytest.mark.parametrize("fn", [torch.mm, rope_index, ExpertLayout.from_topk, explain])
def test_what_has_no_backends(fn):
    with pytest.raises(
        ArgumentError, match="explain: fn: expected an operation of anabranch that has backends"
    ):
        explain(fn)
