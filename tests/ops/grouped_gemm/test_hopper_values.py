"""What the hopper backend computes, at sizes that tiles do not divide: several of them, and parts of one, each way."""

import pytest
import torch

from anabranch import ExpertLayout, explain, grouped_gemm
from anabranch.epilogues import resolve
from anabranch.testing import assert_same, assert_within_budget, guard_band, randn, routing, strided

pytestmark = [pytest.mark.op("grouped_gemm", "hopper"), pytest.mark.no_poison]

NAMES = ("x", "weight", "bias")
CASES = {
    # T, K_dim, N, E, K, routing, dropped, options
    "plain": (700, 512, 384, 7, 2, "random", 0.0, {}),
    "gather": (700, 512, 384, 7, 2, "random", 0.1, dict(gather=True)),
    "gather_copied": (333, 264, 144, 5, 3, "zipf", 0.2, dict(gather=True, activation="swiglu")),
    "gather_half": (333, 320, 272, 5, 3, "duplicates", 0.1, dict(gather=True)),
    "scatter": (700, 512, 384, 7, 2, "random", 0.1, dict(scatter=True)),
    "scatter_gated": (333, 264, 144, 5, 3, "zipf", 0.2, dict(gather=True, scatter=True, activation="swiglu")),
    "narrow": (333, 256, 72, 5, 2, "random", 0.1, dict(gather=True, activation="gelu")),
    "short": (333, 40, 264, 5, 2, "random", 0.1, dict(activation="silu")),
    "empty": (300, 320, 264, 8, 2, "every_other", 0.0, {}),
    "one": (300, 256, 512, 4, 1, "one_expert", 0.0, dict(activation="gpt_oss")),
    "transposed": (333, 512, 200, 5, 2, "random", 0.1, dict(transpose_weight=True, gather=True)),
    "gated": (333, 328, 400, 5, 2, "random", 0.1, dict(transpose_weight=True, activation="geglu")),
    # Enough rows an expert for halves past its end to be multiplied too.
    "steady": (3300, 320, 272, 2, 1, "random", 0.02, dict(gather=True, activation="swiglu")),
    # More tiles of every product and gradient than an H200 has multiprocessors: 132.
    "many": (1100, 512, 1040, 80, 4, "random", 0.1, dict(gather=True, activation="swiglu")),
}  # fmt: skip


def make(case, dtype, bias=True):
    T, H, N, E, K, kind, dropped, given = CASES[case]
    g = torch.Generator().manual_seed(0)
    weight = randn(E, N, H, scale=H**-0.5, generator=g)
    weight = weight.mT.contiguous() if given.get("transpose_weight") else weight
    inputs = [randn(T if given.get("gather") else T * K, H, generator=g).to(dtype), weight.to(dtype)]
    if bias:
        inputs.append(randn(E, N, generator=g).to(dtype))
    layout = ExpertLayout.from_topk(routing(T, E, K, kind, dropped=dropped, generator=g), E)
    columns = N // resolve("test", given.get("activation")).columns
    return [v.requires_grad_() for v in inputs], layout, randn(T * K, columns, generator=g).to(dtype), given


def run(inputs, layout, grad, given, backend, dtype=None):
    if dtype is not None:
        inputs = [v.detach().to(dtype).requires_grad_() for v in inputs]
    bias = inputs[2] if len(inputs) > 2 else None
    out = grouped_gemm(*inputs[:2], layout, bias=bias, backend=backend, **given)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, bias, dtype):
    problem = make(case, dtype, bias)
    found = run(*problem, "hopper")
    truth, plain = run(*problem, "eager", torch.float64), run(*problem, "eager")
    for name, *values in zip(("out", *NAMES), found, truth, plain, strict=False):
        assert_within_budget(*values, name=name, rows=name in ("out", "x"))


@pytest.mark.parametrize("case", ["gather_copied", "plain", "transposed"])
def test_repeats_to_the_bit(case):
    problem = make(case, torch.bfloat16)
    first = run(*problem, "hopper")
    for again in (run(*problem, "hopper") for _ in range(3)):
        for name, a, b in zip(("out", *NAMES), again, first, strict=True):
            assert_same(a, b, name=name)


@pytest.mark.parametrize("case", ["gather", "gated"])
def test_computes_only_what_is_needed(case):
    inputs, layout, grad, given = make(case, torch.bfloat16)
    everything = run(inputs, layout, grad, given, "hopper")
    for i, expected in enumerate(everything[1:]):
        alone = [v.detach().requires_grad_(i == j) for j, v in enumerate(inputs)]
        out = grouped_gemm(*alone[:2], layout, bias=alone[2], backend="hopper", **given)
        (found,) = torch.autograd.grad(out, [alone[i]], grad)
        assert_same(found, expected, name=NAMES[i])


@pytest.mark.parametrize("memory", ["transposed", "offset", "padded", "expanded", "expanded_columns"])
def test_gradients_and_biases_of_any_strides(memory):
    for case in ("plain", "gated"):
        inputs, layout, grad, given = make(case, torch.bfloat16)
        odd = [*inputs[:2], strided(inputs[2], memory).requires_grad_()], layout, strided(grad, memory), given
        plain = [v.detach().contiguous().requires_grad_() for v in odd[0]], layout, odd[2].contiguous(), given
        for name, a, b in zip(("out", *NAMES), run(*odd, "hopper"), run(*plain, "hopper"), strict=True):
            assert_same(a, b, name=f"{case}: {name}")


@pytest.mark.parametrize("columns", [0, 5, 8])
def test_writes_only_its_output(columns):
    inputs, layout, grad, given = make("gather", torch.bfloat16)
    call = dict(layout=layout, bias=inputs[2].detach(), backend="hopper", **given)
    out, untouched = guard_band(tuple(grad.shape), torch.bfloat16, grad.device, columns=columns)
    expected = grouped_gemm(*(v.detach() for v in inputs[:2]), **call)
    assert grouped_gemm(*(v.detach() for v in inputs[:2]), **call, out=out) is out
    untouched()
    assert_same(out, expected)


@pytest.mark.parametrize("gather", [False, True])
def test_rows_without_a_slot_amid_an_expert(gather):
    """As a sort that was made elsewhere may have them: zero in the output and in x's gradient, nothing in weight's."""
    T, E, K, H, N = 300, 3, 2, 256, 264
    slots = torch.arange(T * K).flip(0)
    slots[5::7] = T * K + 1
    layout = ExpertLayout.from_sorted(torch.tensor([250, 0, 300]), slots, K)
    g = torch.Generator().manual_seed(0)
    inputs = [
        randn(T if gather else T * K, H, generator=g),
        randn(E, N, H, generator=g),
        randn(E, N, generator=g),
    ]
    inputs = [v.to(torch.bfloat16).requires_grad_() for v in inputs]
    grad = randn(T * K, N, generator=g).to(torch.bfloat16)
    problem = inputs, layout, grad, dict(gather=gather)
    found, truth = run(*problem, "hopper"), run(*problem, "eager", torch.float64)
    plain = run(*problem, "eager")
    assert not found[0][5::7].any()
    assert not found[0][550:].any()
    for name, *values in zip(("out", *NAMES), found, truth, plain, strict=True):
        assert_within_budget(*values, name=name, rows=name in ("out", "x"))
    for name, a, b in zip(("out", *NAMES), run(*problem, "hopper"), found, strict=True):
        assert_same(a, b, name=name)
    with torch.no_grad():
        grad[5::7] = torch.nan
        if not gather:
            inputs[0][5::7] = torch.nan
    for name, a, b in zip(("out", *NAMES), run(*problem, "hopper"), found, strict=True):
        assert_same(a, b, name=f"NaN in them: {name}")


def test_one_graph_with_and_without_holes():
    layouts = []
    for hole in (slice(0, 0), slice(5, None, 7), slice(260, 261)):
        slots = torch.arange(600).flip(0)
        slots[hole] = 600
        layouts.append(ExpertLayout.from_sorted(torch.tensor([250, 0, 350]), slots, 2))
    static = layouts[0]
    inputs = [randn(600, 256).to(torch.bfloat16), randn(3, 264, 256).to(torch.bfloat16)]
    problem = inputs, static, randn(600, 264).to(torch.bfloat16), {}

    def step():
        # With leaves of its own: a leaf remembers the stream that it was first used on.
        return run(*problem, "hopper", torch.bfloat16)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for layout in (*layouts[1:], ExpertLayout.from_sorted(static.counts, torch.arange(600).flip(0), 2)):
        for name in ("row_to_slot", "slot_to_row"):
            getattr(static, name).copy_(getattr(layout, name))
        graph.replay()
        for name, a, b in zip(("out", "x", "weight"), captured, step(), strict=True):
            assert_same(a, b, name=name)


def test_is_chosen_unasked():
    inputs, layout, grad, given = make("plain", torch.bfloat16)
    found, named = run(inputs, layout, grad, given, None), run(inputs, layout, grad, given, "hopper")
    for name, a, b in zip(("out", *NAMES), found, named, strict=True):
        assert_same(a, b, name=name)
    assert explain(grouped_gemm, *inputs[:2], layout, bias=inputs[2], **given).backend == "hopper"
