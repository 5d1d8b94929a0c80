"""moe_mlp over all backends and named cases: values, gradients, memory layouts, and what is not computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from anabranch import moe_mlp
from anabranch.epilogues import resolve
from anabranch.ops.moe_mlp.cases import TESTS, Case
from anabranch.testing import assert_same, assert_within_budget, randn, routing, strided

NAMES = ("x", "gate_up", "down", "expert_weights", "gate_up_bias", "down_bias")
pytestmark = pytest.mark.op("moe_mlp")
LOW = (torch.float32, torch.bfloat16, torch.float16)


def make(
    case: Case, dtype: torch.dtype, seed: int = 0, scale: float = 1.0
) -> tuple[dict[str, Tensor | None], Tensor]:
    """The differentiable inputs by name, and the ids."""
    g = torch.Generator().manual_seed(seed)
    T, H, I, E, K = case.tokens, case.hidden, case.intermediate, case.experts, case.top_k  # noqa: E741
    N = I * resolve("test", case.activation).columns
    up, down = randn(E, N, H, scale=H**-0.5, generator=g), randn(E, H, I, scale=I**-0.5, generator=g)
    if case.transpose_weight:
        up, down = up.mT, down.mT
    inputs: dict[str, Tensor | None] = {
        "x": randn(T, H, scale=scale, generator=g),
        "gate_up": up,
        "down": down,
        "expert_weights": torch.rand(T, K, generator=g) + 0.1,
        "gate_up_bias": randn(E, N, scale=0.5, generator=g) if case.bias else None,
        "down_bias": randn(E, H, scale=0.5, generator=g) if case.bias else None,
    }
    inputs = {k: None if v is None else v.to(dtype).requires_grad_() for k, v in inputs.items()}
    return inputs, routing(T, E, K, case.routing, dropped=case.dropped, generator=g)


def options(case: Case) -> dict[str, object]:
    return {
        "activation": case.activation,
        "transpose_weight": case.transpose_weight,
        "gate_layout": case.gate_layout,
        "weight_on": case.weight_on,
        "save": case.save,
    }


def loop(inputs: dict[str, Tensor | None], ids: Tensor, case: Case, wide: bool) -> Tensor:
    """REF-MoE, written apart from the package: in fp64 (wide), or as plain PyTorch in the inputs' dtype.

    Expert by expert over a mask of slots, with index_add over tokens: no layout, no sort.
    """
    v = {k: t.double() if wide and t is not None else t for k, t in inputs.items()}
    x, epilogue = v["x"], resolve("test", case.activation)
    acc = x.dtype if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(case.tokens, case.hidden, dtype=acc)
    for e in range(case.experts):
        t, k = torch.nonzero(ids == e, as_tuple=True)
        up = v["gate_up"][e].T if case.transpose_weight else v["gate_up"][e]
        down = v["down"][e].T if case.transpose_weight else v["down"][e]
        w = v["expert_weights"][t, k][:, None].to(acc)
        row = x[t]
        if case.weight_on == "input":
            row = (row.to(acc) * w).to(inputs["x"].dtype).to(x.dtype)
        h = row @ up.T
        if case.bias:
            h = h + v["gate_up_bias"][e]
        if epilogue.columns == 1:
            z = (h,)
        else:
            z = (h[:, 0::2], h[:, 1::2]) if case.gate_layout == "interleaved" else h.chunk(2, -1)
        y = epilogue.forward(*(c.to(acc) for c in z)).to(x.dtype) @ down.T
        if case.bias:
            y = y + v["down_bias"][e]
        out = out.index_add(0, t, y.to(acc) * w if case.weight_on == "output" else y.to(acc))
    return out.to(x.dtype)


def gradients(out: Tensor, inputs: dict[str, Tensor | None], grad: Tensor) -> dict[str, Tensor]:
    given = {k: v for k, v in inputs.items() if v is not None}
    if not out.requires_grad:
        return {k: torch.zeros_like(v) for k, v in given.items()}
    wanted, grad = list(given.values()), grad.to(out.dtype)
    found = torch.autograd.grad(out, wanted, grad, allow_unused=True, retain_graph=True)
    return {
        k: torch.zeros_like(v) if d is None else d for (k, v), d in zip(given.items(), found, strict=True)
    }


def check(case: Case, dtype: torch.dtype, backend: str, scale: float = 1.0) -> None:
    inputs, ids = make(case, dtype, scale=scale)
    out = moe_mlp(**inputs, expert_ids=ids, **options(case), backend=backend)
    assert out.dtype == dtype
    truth, plain = (loop(inputs, ids, case, wide) for wide in (True, False))
    grad = randn(*out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    close("out", out, truth, plain, case)
    expected, rough = (gradients(value, inputs, grad) for value in (truth, plain))
    for name, actual in gradients(out, inputs, grad).items():
        assert actual.dtype == dtype
        close(name, actual, expected[name], rough[name], case)


def close(name: str, actual: Tensor, truth: Tensor, plain: Tensor, case: Case) -> None:
    """Within the budget of plain PyTorch, or where that was lucky of a random walk of as many roundings as terms."""
    truth = truth.double()
    if truth.numel() == 0:
        assert actual.shape == truth.shape
        return
    terms = case.hidden + case.intermediate + case.tokens * case.top_k
    steps = terms**0.5 if actual.dtype == torch.float32 else 1.0
    walk = steps * torch.finfo(actual.dtype).eps / 2 * truth.abs().max()
    lucky = (plain.double() - truth).abs() < walk
    assert_within_budget(
        actual, truth, torch.where(lucky, truth + walk, plain.double()), name=name, rows=False
    )


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", TESTS)
def test_values_and_gradients(name: str, dtype: torch.dtype, backend: str) -> None:
    check(TESTS[name], dtype, backend)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_scale(scale: float, dtype: torch.dtype, backend: str) -> None:
    check(TESTS["qwen"], dtype, backend, scale)


@pytest.mark.fp64
@pytest.mark.parametrize("name", [n for n in TESTS if n != "no_tokens"])
def test_exact_in_fp64(name: str, backend: str) -> None:
    case = TESTS[name]
    inputs, ids = make(case, torch.float64)
    out = moe_mlp(**inputs, expert_ids=ids, **options(case), backend=backend)
    truth = loop(inputs, ids, case, wide=True)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-13)
    grad = randn(*out.shape, dtype=torch.float64)
    expected = gradients(truth, inputs, grad)
    for key, actual in gradients(out, inputs, grad).items():
        torch.testing.assert_close(
            actual, expected[key], rtol=1e-11, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["odd", "gpt_oss", "duplicates", "llama4", "inputs", "inputs_on_input"])
def test_gradcheck(name: str) -> None:
    case = Case(**{**TESTS[name].__dict__, "tokens": 4, "hidden": 4, "intermediate": 3})
    inputs, ids = make(case, torch.float64)
    given = {k: v for k, v in inputs.items() if v is not None}

    def run(*values: Tensor) -> Tensor:
        return moe_mlp(**dict(zip(given, values, strict=True)), expert_ids=ids, **options(case))

    assert torch.autograd.gradcheck(run, tuple(given.values()))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", [n for n in TESTS if n != "no_tokens"])
def test_what_is_kept_changes_no_bit(name: str, dtype: torch.dtype, backend: str) -> None:
    case = TESTS[name]
    inputs, ids = make(case, dtype)
    found = []
    for save in ("activations", "inputs"):
        out = moe_mlp(**inputs, expert_ids=ids, **{**options(case), "save": save}, backend=backend)
        grad = randn(*out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
        found.append({"out": out.detach(), **gradients(out, inputs, grad)})
    for key, value in found[1].items():
        assert bool(value.any()) == (name != "all_dropped" and value.numel() > 0), key
        assert_same(value, found[0][key], name=key)


@pytest.mark.parametrize("save", ["activations", "inputs"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize(
    "wanted", list(itertools.product((False, True), repeat=6)), ids=lambda w: "".join("01"[b] for b in w)
)
def test_every_combination_of_requires_grad(wanted: tuple[bool, ...], weight_on: str, save: str) -> None:
    case = Case(9, 6, 4, 4, 2, bias=True, dropped=0.2, weight_on=weight_on, save=save)
    inputs, ids = make(case, torch.float32)
    full = gradients(moe_mlp(**inputs, expert_ids=ids, **options(case)), inputs, torch.ones(9, 6))
    some = {k: v.detach().requires_grad_(w) for (k, v), w in zip(inputs.items(), wanted, strict=True)}
    out = moe_mlp(**some, expert_ids=ids, **options(case))
    assert out.requires_grad == any(wanted)
    if any(wanted):
        out.backward(torch.ones(9, 6))
    for (k, v), w in zip(some.items(), wanted, strict=True):
        if w:
            torch.testing.assert_close(v.grad, full[k], rtol=1e-5, atol=1e-6)
        else:
            assert v.grad is None


def _count_calls(run: object, name: str) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key == name)


@pytest.mark.cpu
def test_frozen_experts_pay_for_no_weight_gradient() -> None:
    case = Case(16, 8, 4, 4, 2, routing="even")
    inputs, ids = make(case, torch.float32)

    def products(frozen: bool) -> int:
        for name in ("gate_up", "down"):
            inputs[name].requires_grad_(not frozen)
        out = moe_mlp(**inputs, expert_ids=ids)
        return _count_calls(lambda: out.sum().backward(), "aten::mm")

    assert products(frozen=False) - products(frozen=True) == 2 * case.experts


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("wanted", "more"),
    [(NAMES, 1), (("x",), 1), (("down",), 1), (("expert_weights",), 1), (("down_bias",), 0)],
    ids=str,
)
def test_a_pre_activation_made_again_costs_one_product(wanted: tuple[str, ...], more: int) -> None:
    """The up-projection of each expert, and where no gradient needs it not even that."""
    case = Case(16, 8, 4, 4, 2, bias=True, routing="even")
    inputs, ids = make(case, torch.float64)
    for name, value in inputs.items():
        value.requires_grad_(name in wanted)

    def products(save: str) -> int:
        out = moe_mlp(**inputs, expert_ids=ids, save=save)
        return _count_calls(lambda: out.sum().backward(), "aten::addmm")

    assert products("inputs") - products("activations") == more * case.experts


@pytest.mark.fp64
@pytest.mark.parametrize(
    "layout", ["transposed", "offset", "padded", "every_second", "expanded", "expanded_columns"]
)
@pytest.mark.parametrize("which", [*NAMES, "grad", "ids"])
def test_any_strides(which: str, layout: str, backend: str) -> None:
    case = Case(12, 6, 4, 4, 2, bias=True)
    inputs, ids = make(case, torch.float64)
    grad = randn(12, 6, dtype=torch.float64)
    if which == "grad":
        grad = strided(grad, layout)
    elif which == "ids":
        if layout not in ("transposed", "expanded", "expanded_columns"):
            ids = torch.stack((ids, ids + 1), -1)[..., 0]
        else:
            ids = {"transposed": ids.T.contiguous().T, "expanded": ids[:1].expand(12, 2)}.get(
                layout, ids[:, :1].expand(12, 2)
            )
    else:
        inputs[which] = strided(inputs[which], layout).requires_grad_()
    out = moe_mlp(**inputs, expert_ids=ids, backend=backend)
    found = gradients(out, inputs, grad)
    dense = {k: v.detach().contiguous().requires_grad_() for k, v in inputs.items()}
    expected = moe_mlp(**dense, expert_ids=ids.contiguous(), backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for k, v in gradients(expected, dense, grad.contiguous()).items():
        torch.testing.assert_close(found[k], v, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "reduce",
    [lambda y: y.sum(), lambda y: y.mean(), lambda y: y.transpose(0, 1).contiguous().sum()],
    ids=["sum", "mean", "transposed"],
)
def test_stride_zero_gradients(reduce: object, device: str) -> None:
    inputs, ids = make(TESTS["qwen"], torch.float32)
    reduce(moe_mlp(**inputs, expert_ids=ids)).backward()
    found = [inputs[k].grad for k in NAMES[:4]]
    other, _ = make(TESTS["qwen"], torch.float32)
    out = moe_mlp(**other, expert_ids=ids)
    (grad,) = torch.autograd.grad(reduce(leaf := out.detach().requires_grad_()), leaf)
    out.backward(grad.contiguous())
    for k, v in zip(NAMES, found, strict=False):
        if device == "cpu":
            assert_same(v, other[k].grad, name=k)
        else:  # other strides, other loads, other tiles: another order of the sums
            torch.testing.assert_close(v, other[k].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt_oss", "inputs"])
def test_two_backwards_through_one_graph_agree(name: str) -> None:
    inputs, ids = make(TESTS[name], torch.float32)
    out = moe_mlp(**inputs, expert_ids=ids, **options(TESTS[name]))
    grad = torch.randn_like(out)
    first, second = gradients(out, inputs, grad), gradients(out, inputs, grad)
    for k in first:
        assert_same(first[k], second[k], name=k)


@pytest.mark.parametrize("save", ["activations", "inputs"])
def test_a_second_derivative_raises_clearly(save: str) -> None:
    inputs, ids = make(TESTS["qwen"], torch.float32)
    out = moe_mlp(**inputs, expert_ids=ids, save=save)
    (d_x,) = torch.autograd.grad(out.sum(), inputs["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="moe_mlp: create_graph: expected first derivatives"):
        d_x.sum().backward()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_repeats_are_bit_equal(dtype: torch.dtype) -> None:
    inputs, ids = make(Case(128, 32, 16, 16, 8), dtype)

    def run() -> list[Tensor]:
        out = moe_mlp(**inputs, expert_ids=ids)
        return [out, *gradients(out, inputs, torch.ones_like(out)).values()]

    first = run()
    for _ in range(39):
        for a, b in zip(first, run(), strict=True):
            assert_same(b, a)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 45, 63, 65, 127, 129])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_rows_do_not_depend_on_the_batch_size(tokens: int, top_k: int) -> None:
    case = Case(160, 8, 4, 16, top_k)
    inputs, ids = make(case, torch.float64)
    few = {
        k: None if v is None else v[:tokens] if k in ("x", "expert_weights") else v for k, v in inputs.items()
    }
    full = dict(inputs)
    for k in ("x", "expert_weights"):
        full[k] = torch.cat((inputs[k][:tokens], torch.zeros_like(inputs[k][tokens:])))
    out, padded = moe_mlp(**few, expert_ids=ids[:tokens]), moe_mlp(**full, expert_ids=ids)
    torch.testing.assert_close(out, padded[:tokens], rtol=1e-12, atol=1e-14)
    grad = randn(tokens, 8, dtype=torch.float64)
    a = torch.autograd.grad(out, (inputs["x"], inputs["gate_up"], inputs["down"]), grad)
    b = torch.autograd.grad(padded[:tokens], (inputs["x"], inputs["gate_up"], inputs["down"]), grad)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
