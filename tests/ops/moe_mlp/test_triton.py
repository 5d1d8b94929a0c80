"""The Triton backend of moe_mlp, interpreted or on a GPU: every named case against the reference.

TRITON_INTERPRET=1 pytest tests/ops/moe_mlp/test_triton.py interprets it. bf16 is the conformance suite's, on a GPU.
"""

import os
from functools import lru_cache

import pytest
import torch

from anabranch import moe_mlp
from anabranch.epilogues import resolve
from anabranch.errors import UnsupportedError
from anabranch.ops.moe_mlp.cases import TESTS, Case
from anabranch.testing import assert_same, randn, routing, strided

pytestmark = [
    pytest.mark.op("moe_mlp", "triton"),
    # NumPy, which interprets, warns of NaN where a GPU does not, and of how the interpreter reads a scalar.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ("x", "gate_up", "down", "expert_weights", "gate_up_bias", "down_bias")
ALIGNED = {
    "gathered": Case(24, 32, 16, 4, 2, bias=True),
    "interleaved": Case(24, 32, 16, 4, 2, "gpt_oss", True, True, "interleaved", dropped=0.2),
    "on_input": Case(24, 32, 16, 4, 2, "gelu", weight_on="input", routing="empty_first"),
}
"""Sizes that the tensor memory accelerator takes."""


def make(case, dtype=torch.float32):
    """The differentiable inputs by name, the ids, and a gradient."""
    T, H, I, E = case.tokens, case.hidden, case.intermediate, case.experts  # noqa: E741
    N = I * resolve("test", case.activation).columns
    up, down = randn(E, N, H, dtype=dtype, scale=H**-0.5), randn(E, H, I, dtype=dtype, scale=I**-0.5)
    if case.transpose_weight:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    inputs = {
        "x": randn(T, H, dtype=dtype),
        "gate_up": up,
        "down": down,
        "expert_weights": torch.rand(T, case.top_k) + 0.1,
        "gate_up_bias": randn(E, N, dtype=dtype, scale=0.5) if case.bias else None,
        "down_bias": randn(E, H, dtype=dtype, scale=0.5) if case.bias else None,
    }
    ids = routing(T, E, case.top_k, case.routing, dropped=case.dropped)
    return inputs, ids, randn(T, H, dtype=dtype)


def run(case, inputs, ids, grad, backend, save=None):
    """The output and the gradients, by name."""
    leaves = {n: v.detach().requires_grad_() for n, v in inputs.items() if v is not None}
    out = moe_mlp(
        **{n: leaves.get(n) for n in NAMES},
        expert_ids=ids,
        activation=case.activation,
        transpose_weight=case.transpose_weight,
        gate_layout=case.gate_layout,
        weight_on=case.weight_on,
        save=save or case.save,
        backend=backend,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def check(case, inputs, ids, grad):
    """Each result's error against fp64 is a small number of roundings of its largest element."""
    actual = run(case, inputs, ids, grad, "triton")
    wide = {n: None if v is None else v.double() for n, v in inputs.items()}
    truth = run(case, wide, ids, grad, "reference")
    for name, value in actual.items():
        exact = truth[name]
        if name in inputs:
            assert value.dtype == inputs[name].dtype
        if not exact.numel():
            assert value.shape == exact.shape
            continue
        # A walk of as many roundings as there are terms in fp32; h, a, y and the sums round in half precision.
        terms = case.hidden + case.intermediate + case.tokens * case.top_k
        steps = terms**0.5 if grad.dtype == torch.float32 else 4.0
        bound = steps * torch.finfo(grad.dtype).eps * exact.abs().max()
        worst = (value.double() - exact).abs().max()
        assert worst <= bound, f"{name}: off by {worst}, {bound} allowed"
        assert bool(value.any()) == bool(exact.any()), name


@pytest.fixture
def hopper(monkeypatch):
    """The paths of a GPU with a tensor memory accelerator; what is interpreted of it are its descriptors."""
    from anabranch._backends.triton import device as facts

    if INTERPRETS:
        monkeypatch.setattr(facts, "capability", lambda _: (9, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", TESTS)
def test_values_and_gradients(name, dtype):
    check(TESTS[name], *make(TESTS[name], dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALIGNED)
def test_the_accelerators_paths(hopper, name, dtype):
    check(ALIGNED[name], *make(ALIGNED[name], dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALIGNED)
def test_what_is_kept_changes_no_bit(hopper, name, dtype):
    """The conformance suite's for the accelerator's paths, each with the tiles of the other way."""
    given = make(ALIGNED[name], dtype)
    expected = run(ALIGNED[name], *given, "triton", "activations")
    for key, value in run(ALIGNED[name], *given, "triton", "inputs").items():
        assert value.any(), key
        assert_same(value, expected[key], name=key)


@pytest.mark.parametrize(
    "layout", ["transposed", "offset", "padded", "every_second", "expanded", "expanded_columns"]
)
@pytest.mark.parametrize("which", ["x", "gate_up", "down", "expert_weights", "grad"])
def test_any_strides(which, layout):
    case = Case(7, 6, 4, 3, 2, bias=True)
    inputs, ids, grad = make(case)
    if which == "grad":
        grad = strided(grad, layout)
    else:
        inputs[which] = strided(inputs[which], layout)
    check(case, inputs, ids, grad)


@pytest.mark.parametrize("name", ["qwen", "gpt_oss", "llama4"])
def test_int64_offsets(name, monkeypatch):
    from anabranch._backends.triton import device

    given = make(TESTS[name])
    expected = run(TESTS[name], *given, "triton")
    monkeypatch.setattr(device, "INT32_MAX", 0)
    for key, value in run(TESTS[name], *given, "triton").items():
        assert_same(value, expected[key], name=key)


def test_what_a_dropped_slot_holds_does_not_matter():
    """NaN among the weights of dropped slots, and in tokens that all drop."""
    case = Case(9, 8, 4, 3, 2, bias=True)
    inputs, _, grad = make(case)
    ids = torch.tensor([[0, 1], [2, -1], [-1, 3], [1, 1], [0, 2], [-1, -1], [2, 0], [1, 2], [0, 7]])
    dropped = (ids < 0) | (ids >= 3)
    inputs["expert_weights"][dropped] = torch.nan
    inputs["x"][dropped.all(1)] = torch.nan
    clean = {n: v.nan_to_num(1.0) for n, v in inputs.items()}
    actual, expected = (run(case, given, ids, grad, "triton") for given in (inputs, clean))
    for name, value in actual.items():
        assert_same(value, expected[name], name=name)
        assert value.isfinite().all(), name


def test_fp64_is_refused():
    case = TESTS["one"]
    with pytest.raises(UnsupportedError, match="triton: it accumulates in fp32, too coarse for float64"):
        run(case, *make(case, torch.float64), "triton")


@pytest.mark.parametrize(
    ("name", "keep"), [("gathered", True), ("interleaved", False), ("on_input", True)], ids=str
)
def test_a_forward_is_remembered_while_the_tuner_stands_by_it(name, keep, device, monkeypatch):
    from anabranch import tuning
    from anabranch._backends.triton import remembered
    from anabranch.ops.moe_mlp.backends import triton as backend
    from anabranch.ops.route import autograd as route
    from anabranch.ops.route.backends import triton as routing

    monkeypatch.setattr(route, "topk", routing.topk)  # which a CPU has to be asked for
    case = ALIGNED[name]
    planned, original = [], backend.gemm
    monkeypatch.setattr(
        backend, "gemm", lambda *args, **given: planned.append("gemm") or original(*args, **given)
    )
    monkeypatch.setattr(remembered, "_remembered", lru_cache(remembered._remembered.__wrapped__))
    # The second of calls that look alike is recorded.
    for standing, plans in (("a", 2), ("a", 2), ("a", 0), ("a", 0), ("b", 2), ("b", 2), ("b", 0)):
        inputs, ids, _ = make(case)
        inputs["x"].requires_grad_(keep)
        options = dict(
            expert_ids=ids,
            activation=case.activation,
            transpose_weight=case.transpose_weight,
            gate_layout=case.gate_layout,
            weight_on=case.weight_on,
        )
        results = []
        for by in (standing, None):
            monkeypatch.setattr(tuning, "standing", lambda _, by=by: by)
            results.append(moe_mlp(**inputs, **options, backend="triton"))
            planned.append("|")
        assert_same(*results)
        assert results[0].any()
        assert planned.index("|") == plans
        planned.clear()
