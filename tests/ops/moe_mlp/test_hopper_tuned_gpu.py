"""All that the tuner may try for Hopper's products of a step, on a real GPU: right, at sizes no tile divides."""

from dataclasses import replace

import pytest
import torch

from anabranch import moe_mlp
from anabranch.epilogues import resolve
from anabranch.testing import assert_same, randn, routing
from anabranch.tuning import lookup
from anabranch.tuning.cache import Cache, folder
from anabranch.tuning.key import place
from anabranch.tuning.search import search

pytestmark = [pytest.mark.op("moe_mlp", "hopper"), pytest.mark.no_poison]

CASES = {
    # T, H, I, E, K, dropped, options
    "plain": (700, 512, 384, 7, 2, 0.0, {}),
    "ragged": (333, 264, 200, 5, 3, 0.2, dict(activation="geglu", weight_on="input")),
    "interleaved": (
        333, 320, 264, 5, 2, 0.1,
        dict(activation="gpt_oss", gate_layout="interleaved", transpose_weight=True),
    ),
    "narrow": (333, 128, 120, 5, 2, 0.1, dict(activation="gelu")),
    # More tiles of every product and gradient than an H200 has multiprocessors: 132.
    "many": (1100, 512, 520, 80, 4, 0.1, {}),
}  # fmt: skip
KINDS = {"hopper_forward", "hopper_weight_gradient", "hopper_gate_gradient"}


def make(case):
    T, H, I, E, K, dropped, given = CASES[case]  # noqa: E741
    g = torch.Generator().manual_seed(0)
    N = I * resolve("test", given.get("activation", "swiglu")).columns
    up, down = randn(E, N, H, scale=H**-0.5, generator=g), randn(E, H, I, scale=I**-0.5, generator=g)
    if given.get("transpose_weight"):
        up, down = up.mT.contiguous(), down.mT.contiguous()
    inputs = [value.bfloat16() for value in (randn(T, H, generator=g), up, down)] + [torch.rand(T, K) + 0.1]
    ids = routing(T, E, K, dropped=dropped, generator=g)
    return [v.requires_grad_() for v in inputs], ids, randn(T, H, generator=g).bfloat16(), given


def run(inputs, ids, grad, given):
    out = moe_mlp(*inputs[:3], ids, inputs[3], backend="hopper", **given)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """A cache of its own; the outcomes of searches that try everything, and call what is not the heuristic's faster."""
    found = []

    def clock(runs, rounds):
        return {config: 1.0 + (index == 0) for index, config in enumerate(runs)}

    def searched(trial):
        outcome = search(replace(trial, family=lambda config: config), clock)
        found.append((len(trial.candidates), outcome))
        return outcome

    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "0")
    monkeypatch.setattr(lookup, "_cache", Cache(poll=0))
    monkeypatch.setattr(lookup, "search", searched)
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_candidate_is_right_and_what_is_found_is_run(case, tuned, monkeypatch):
    problem = make(case)
    plain = run(*problem)
    assert tuned == []
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "1")
    found = run(*problem)
    kinds = {outcome.key.kind for _, outcome in tuned}
    assert kinds >= KINDS
    for candidates, outcome in tuned:
        assert outcome.rejected == {}, str(outcome.key)
        assert outcome.best != outcome.default
        assert candidates > 3
    assert (folder() / place(problem[1].device).file).exists()
    monkeypatch.delenv("ANABRANCH_AUTOTUNE")
    searches = len(tuned)
    again = run(*problem)
    assert len(tuned) == searches
    names = ("out", "x", "gate_up", "down", "expert_weights")
    for name, a, b, c in zip(names, plain, found, again, strict=True):
        assert_same(b, c, name=name)
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(a.detach().abs().max()))
