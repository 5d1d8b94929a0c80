"""What the hopper backend computes, at sizes that tiles do not divide: several of them, and parts of one, each way."""

import pytest
import torch

from anabranch import moe_mlp
from anabranch.epilogues import resolve
from anabranch.testing import assert_same, assert_within_budget, randn, routing

pytestmark = [pytest.mark.op("moe_mlp", "hopper"), pytest.mark.no_poison]

NAMES = ("x", "gate_up", "down", "expert_weights", "gate_up_bias", "down_bias")
CASES = {
    # T, H, I, E, K, routing, dropped, options
    "plain": (700, 512, 384, 7, 2, "random", 0.0, {}),
    "ragged": (333, 264, 136, 5, 3, "zipf", 0.2, {}),
    "empty": (300, 320, 264, 8, 2, "every_other", 0.0, {}),
    "one": (300, 256, 512, 4, 1, "one_expert", 0.0, {}),
    "transposed": (333, 328, 200, 5, 2, "random", 0.1, dict(transpose_weight=True)),
    "transposed_gathered": (333, 512, 200, 5, 2, "random", 0.1, dict(transpose_weight=True)),
    "gpt_oss": (
        333, 320, 200, 5, 2, "random", 0.1,
        dict(activation="gpt_oss", gate_layout="interleaved", transpose_weight=True),
    ),
    "interleaved": (333, 256, 264, 5, 2, "random", 0.0, dict(activation="geglu", gate_layout="interleaved")),
    "input": (333, 256, 136, 5, 2, "duplicates", 0.1, dict(weight_on="input")),
    # Enough rows an expert for halves past its end to be multiplied too.
    "steady": (3300, 256, 272, 2, 1, "random", 0.02, {}),
    # More tiles of every product and gradient than an H200 has multiprocessors: 132.
    "many": (1100, 512, 520, 80, 4, "random", 0.1, {}),
    "plain_activation": (333, 512, 264, 5, 2, "random", 0.1, dict(activation="gelu")),
}  # fmt: skip


def make(case, dtype, bias):
    T, H, I, E, K, kind, dropped, given = CASES[case]  # noqa: E741
    g = torch.Generator().manual_seed(0)
    N = I * resolve("test", given.get("activation", "swiglu")).columns
    up, down = randn(E, N, H, scale=H**-0.5, generator=g), randn(E, H, I, scale=I**-0.5, generator=g)
    if given.get("transpose_weight"):
        up, down = up.mT.contiguous(), down.mT.contiguous()
    inputs = [randn(T, H, generator=g).to(dtype), up.to(dtype), down.to(dtype), torch.rand(T, K) + 0.1]
    if bias:
        inputs += [randn(E, N, generator=g).to(dtype), randn(E, H, generator=g).to(dtype)]
    ids = routing(T, E, K, kind, dropped=dropped, generator=g)
    return [v.requires_grad_() for v in inputs], ids, randn(T, H, generator=g).to(dtype), given


def run(inputs, ids, grad, given, backend, dtype=None, **options):
    if dtype is not None:
        inputs = [v.detach().to(dtype).requires_grad_() for v in inputs]
    biases = dict(zip(("gate_up_bias", "down_bias"), inputs[4:], strict=False))
    out = moe_mlp(*inputs[:3], ids, inputs[3], backend=backend, **biases, **given, **options)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, bias, dtype):
    inputs, ids, grad, given = make(case, dtype, bias)
    found = run(inputs, ids, grad, given, "hopper")
    truth = run(inputs, ids, grad, given, "eager", torch.float64)
    plain = run(inputs, ids, grad, given, "eager")
    if given.get("weight_on") == "input":
        # <d(w x), x> of rounded d(w x), which plain PyTorch here keeps in fp32: its error counts twice.
        plain[4] = truth[4] + 2 * (plain[4] - truth[4])
    for name, *values in zip(("out", *NAMES), found, truth, plain, strict=False):
        assert_within_budget(*values, name=name, rows=name in ("out", "x"))


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_changes_no_bit(case):
    given = make(case, torch.bfloat16, True)
    expected = run(*given, "hopper")
    for name, a, b in zip(("out", *NAMES), run(*given, "hopper", save="inputs"), expected, strict=True):
        assert a.any(), name
        assert_same(a, b, name=name)


def test_repeats_to_the_bit():
    inputs, ids, grad, given = make("ragged", torch.bfloat16, True)
    first = run(inputs, ids, grad, given, "hopper")
    for again in (run(inputs, ids, grad, given, "hopper") for _ in range(3)):
        for name, a, b in zip(("out", *NAMES), again, first, strict=True):
            assert_same(a, b, name=name)


@pytest.mark.parametrize("save", ["activations", "inputs"])
def test_computes_only_what_is_needed(save):
    inputs, ids, grad, given = make("ragged", torch.bfloat16, True)
    everything = run(inputs, ids, grad, given, "hopper")
    for i, (value, expected) in enumerate(zip(inputs, everything[1:], strict=True)):
        alone = [v.detach().requires_grad_(i == j) for j, v in enumerate(inputs)]
        biases = dict(gate_up_bias=alone[4], down_bias=alone[5])
        out = moe_mlp(*alone[:3], ids, alone[3], backend="hopper", save=save, **biases, **given)
        (found,) = torch.autograd.grad(out, [alone[i]], grad)
        assert_same(found, expected, name=NAMES[i])
        assert found.shape == value.shape
