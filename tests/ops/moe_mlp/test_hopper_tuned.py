"""How the gate's gradient is cut on Hopper: what is tried, that what is stored is launched, and what is refused."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.ops.grouped_gemm.backends.hopper import launch as products
from anabranch.ops.moe_mlp.backends.hopper import launch, tuned
from anabranch.testing import randn, routing
from anabranch.tuning.search import search

pytestmark = pytest.mark.cpu

T, K, E, I, H = 96, 2, 4, 136, 256  # noqa: E741


def given(activation="swiglu", interleaved=False, weighted=True, dropped=0.2, gathered=False):
    g = torch.Generator().manual_seed(0)
    epilogue = resolve("test", activation)
    ids = routing(T, E, K, dropped=dropped, generator=g)

    def values(*shape, scale=1.0):
        return randn(*shape, scale=scale, generator=g, dtype=torch.bfloat16)

    rows, columns = T * K, I * epilogue.columns
    results = {
        "d_h": torch.empty(rows, columns, dtype=torch.bfloat16),
        "a_out": torch.empty(rows, I, dtype=torch.bfloat16),
        "d_scale": torch.empty(T, K),
    }
    return {
        "d_rows": values(T if gathered else rows, H),
        "weight": values(E, I, H, scale=H**-0.5),
        "h": values(rows, columns),
        "scale": torch.rand(T, K, generator=g) + 0.1 if weighted else None,
        "rows": products.rows_of(ExpertLayout.from_topk(ids, E)),
        "epilogue": epilogue,
        "interleaved": interleaved,
        "gathered": gathered,
        **results,
    }


def run(arguments, **changed):
    arguments = {**arguments, **changed}
    names = "d_rows", "weight", "h", "scale", "rows", "epilogue"
    rest = {name: value for name, value in arguments.items() if name not in names}
    launch.pre_activation_gradient(*(arguments[name] for name in names), **rest)


def test_what_is_tried(hopper_asked, hopper_launched):
    run(given())
    ((plan, product),) = hopper_asked
    assert plan.heuristic == tuned.FULL
    space = product.candidates(tuned.FULL)
    assert [config for config in (tuned.FULL, tuned.FEW, *space) if product.refusal(config)] == []
    assert 8 < len(space) < 16
    assert "shared memory" in product.refusal(replace(tuned.FULL, num_stages=4))
    assert product.refusal(replace(tuned.FEW, num_stages=6)) is not None


def test_keys(hopper_asked, hopper_launched):
    arguments = given()
    run(arguments)
    run(arguments, a_out=None, d_scale=None)
    run(given("gpt_oss", interleaved=True), d_h=None)
    run(given("gelu", weighted=False, gathered=True))
    assert [str(plan.key) for plan, _ in hopper_asked] == [
        "grouped_gemm.hopper_gate_gradient bfloat16 N=136 K=256 E=4 rows<=64 gated weighted",
        "grouped_gemm.hopper_gate_gradient bfloat16 N=136 K=256 E=4 rows<=64 gated weighted no_a no_dot",
        "grouped_gemm.hopper_gate_gradient bfloat16 N=136 K=256 E=4 rows<=64 gated interleaved weighted no_h",
        "grouped_gemm.hopper_gate_gradient bfloat16 N=136 K=256 E=4 rows<=64 gather",
    ]


def test_what_is_stored_is_launched(hopper_asked, hopper_launched, store):
    arguments = given()
    for config in (None, replace(tuned.FULL, group_m=4), tuned.FEW):
        if config is not None:
            store(hopper_asked[0][1], vars(config))
        run(arguments)
        expected = config or tuned.FULL
        found = hopper_launched[-1]
        assert (found["BN"], found["STAGES"], found["GROUP_M"]) == (
            expected.block_n,
            expected.num_stages,
            expected.group_m,
        )


def differentiate(
    d_rows, weight, h, scale, rows, epilogue, *, interleaved, d_h, a_out, d_scale, gathered, config
):
    """What launch.pre_activation_gradient writes, by autograd; wrong in one result for some groupings."""
    slots, ends = rows.row_to_slot.long(), rows.offsets.tolist()
    last = ends[-1]
    if gathered:
        d_rows = d_rows[slots.clamp(min=0) // K]
    z = h.float().requires_grad_()
    factor = torch.ones(T * K) if scale is None else scale.reshape(-1)[slots.clamp(min=0)]
    a = epilogue.forward(*((z[:, 0::2], z[:, 1::2]) if interleaved else z.chunk(epilogue.columns, 1)))
    d = torch.zeros(T * K, I)
    for expert in range(E):
        some = slice(ends[expert], ends[expert + 1])
        d[some] = (d_rows[some] @ weight[expert].T).float()
    with torch.enable_grad():
        grad = torch.autograd.grad((a * factor[:, None] * d)[:last].sum(), z)[0]
    dot = (a.detach() * d).sum(1)
    if config.group_m == 4:
        grad[2] *= 1.05
    if config.group_m == 16:
        factor = factor * 1.05
    if config.group_m == 32:
        dot[:last] = dot[:last].roll(1)
    if d_h is not None:
        d_h[:last] = grad[:last].to(d_h.dtype)
    if a_out is not None:
        a_out[:last] = (a.detach() * factor[:, None])[:last].to(a_out.dtype)
    if d_scale is not None:
        d_scale.zero_().view(-1)[slots[:last]] = dot[:last]


@pytest.mark.usefixtures("hopper_launched", "hopper_clears")
@pytest.mark.parametrize(
    ("activation", "interleaved", "weighted", "gathered", "dropped"),
    [
        ("swiglu", False, True, False, 0.2),
        ("swiglu", False, True, True, 0.2),
        ("swiglu", False, True, True, 0.0),
        ("gpt_oss", True, True, True, 0.2),
        ("gelu", False, False, False, 0.2),
    ],
)
def test_wrong_gradients_are_refused(
    activation, interleaved, weighted, gathered, dropped, hopper_asked, monkeypatch
):
    def attempt(product):
        trial = replace(product.trial(product.plan.heuristic), family=lambda config: config)
        with torch.enable_grad():
            found = search(trial, lambda runs, rounds: dict.fromkeys(runs, 1.0)).rejected
        return {config.group_m for config in found}

    arguments = given(activation, interleaved, weighted, dropped, gathered)
    run(arguments)
    names = {4: "d_h", 16: "a_out", 32: "d_scale"}
    for name in names.values():
        run(arguments, **{name: None})
    monkeypatch.setattr(launch, "pre_activation_gradient", differentiate)
    (_, everything), *some = hopper_asked
    assert attempt(everything) == set(names)
    for group, (_, product) in zip(names, some, strict=True):
        assert attempt(product) == set(names) - {group}
