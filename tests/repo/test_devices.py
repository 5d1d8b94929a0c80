"""On a GPU, tests/conftest.py makes there what a test makes, and nothing of anabranch's."""

import types

import pytest
import torch

from anabranch.testing import here, randn

pytestmark = pytest.mark.op("permute")
CONSTANTS = {"nested": [torch.arange(3), (torch.ones(2, requires_grad=True), None, "text")]}
PLANTED = types.ModuleType("anabranch.ops.planted")
exec("import torch\ndef forgets():\n    return torch.zeros(3)", vars(PLANTED))


@pytest.mark.parametrize("given", [torch.zeros(2)], ids=["given"])
def test_all_that_a_test_makes_is_on_its_device(device, given):
    first, (second, none, text) = CONSTANTS["nested"]
    assert (none, text) == (None, "text")
    generator = torch.Generator().manual_seed(3)
    made = (
        first, second, given, torch.tensor([1.0]), torch.zeros(2), torch.ones((2,)), torch.full((2,), 3), torch.eye(2),
        torch.arange(4), torch.linspace(0, 1, 3), torch.rand(2, generator=generator), torch.randn(2),
        torch.randint(0, 3, (2,)), torch.randperm(4), randn(2),
    )  # fmt: skip
    assert {value.device.type for value in made} == {device}
    assert here().type == device
    assert torch.zeros(1, device="meta").is_meta
    assert second.requires_grad
    assert second.is_leaf
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    assert leaf.grad.device.type == device


def test_what_anabranch_makes_is_where_it_says():
    assert PLANTED.forgets().device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_each_backend_is_met_where_it_serves(backend, device, dtype):
    assert device == "cuda" or backend in ("eager", "reference")
    assert dtype == torch.float32 or backend in ("eager", "reference")
