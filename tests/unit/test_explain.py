"""What explain says of a call, and of what is no operation."""

import dataclasses

import pytest
import torch

from anabranch import ExpertLayout, explain, grouped_gemm, rope_index
from anabranch.errors import ArgumentError
from anabranch.explain import Explanation
from anabranch.nn import MoE
from anabranch.testing import randn

LAYOUT = ExpertLayout.from_counts(torch.tensor([2]), 2)
KEPT = "  kept for the backward beyond the arguments:"
OPERATIONS = "dual_gemm, grouped_gemm, moe_mlp, mrope, multi_gemm, permute, rope, topk_router, unpermute"
REFUSED = f"explain: fn: expected an operation of anabranch that has backends ({OPERATIONS})"


def test_says_what_runs_and_what_does_not():
    found = explain(grouped_gemm, randn(2, 3), randn(1, 4, 3), LAYOUT)
    assert found.function == "grouped_gemm"
    assert found.backend == "eager"
    assert list(found.refusals) == ["hopper", "triton"]
    assert found.padding is None
    text = str(found).splitlines()
    assert text[0] == "grouped_gemm runs on: eager"
    assert text[1] == f"  not hopper: {found.refusals['hopper']}"
    assert text[-1] == f"{KEPT} 0 bytes, as no argument requires grad, or gradients are off"
    assert (found.saved_bytes, found.needs_grad) == (0, False)


def test_nothing_to_keep_though_a_gradient_is_needed():
    x = randn(2, 3).requires_grad_()
    found = explain(grouped_gemm, x, randn(1, 4, 3), LAYOUT)
    assert found.needs_grad
    assert str(found).splitlines()[-1] == f"{KEPT} {found.saved_bytes:,} bytes"
    with torch.no_grad():
        assert not explain(grouped_gemm, x, randn(1, 4, 3), LAYOUT).needs_grad


def test_attributes_are_documented():
    for field in dataclasses.fields(Explanation):
        assert f"        {field.name}: " in Explanation.__doc__
        assert f"``{field.name}``" in explain.__doc__


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
    assert str(caught.value) == f"{REFUSED}, got Sequential"
    with pytest.raises(ArgumentError) as caught:
        explain(MoE(4, 4, 2, 1), randn(1, 4))
    assert str(caught.value) == f"{REFUSED}, got MoE"


@pytest.mark.parametrize("fn", [torch.mm, rope_index, ExpertLayout.from_topk, explain])
def test_what_has_no_backends(fn):
    with pytest.raises(
        ArgumentError, match="explain: fn: expected an operation of anabranch that has backends"
    ):
        explain(fn)
