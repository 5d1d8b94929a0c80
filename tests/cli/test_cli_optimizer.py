"""The demo's optimizers and their schedule."""

from __future__ import annotations

import pytest
import torch

from anabranch.cli.demo.config import SMALLEST
from anabranch.cli.demo.model import Transformer
from anabranch.cli.demo.optimizer import Optimizers, orthogonal, schedule


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 12, 8)])
def test_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape) * 1e-3))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_experts_are_orthogonalised_apart():
    matrices = torch.randn(3, 6, 4)
    together = orthogonal(matrices)
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(orthogonal(matrix), result)


def test_every_parameter_has_one_optimizer():
    model = Transformer(SMALLEST)
    optimizers = Optimizers(model, SMALLEST)
    groups = [g for optimizer, _ in optimizers.peaks for g in optimizer.param_groups]
    owned = [parameter for group in groups for parameter in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    in_muon = {optimizers.names[p] for g in optimizers.muon.param_groups for p in g["params"]}
    assert "blocks.0.moe.experts.gate_up" in in_muon
    assert not any(name.startswith(("embed", "head", "norm")) for name in in_muon)


def test_schedule():
    rates = [schedule(step, 100, SMALLEST) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[0] < 0.2
    assert 3 <= peak <= 8
    assert rates[peak] > 0.95
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert SMALLEST.final_rate <= rates[-1] < 2 * SMALLEST.final_rate
