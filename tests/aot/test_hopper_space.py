"""Configurations that a tuner may try for Hopper's products, compiled: none spills, none takes more than it says.

Groups of row tiles make no difference to that, so one of them stands for all.
"""

import json
from dataclasses import replace

import pytest
import torch

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.ops.grouped_gemm.backends.hopper import config as tiles
from anabranch.testing.aot import SHARED_MEMORY, SHARED_WORDS, compiling

pytestmark = [pytest.mark.no_poison, pytest.mark.slow]

T, K, E, N, K_DIM = 256, 4, 4, 512, 512
GEMMS = {
    "forward": dict(),
    "narrow": dict(n=128, activation="gelu"),
    "gathered": dict(activation="swiglu", keep_h=True, gathered=True),
    "interleaved": dict(activation="gpt_oss", keep_h=True, gathered=True, interleaved=True),
    "n_major": dict(activation="geglu", keep_h=True, n_major=True),
}
WEIGHTS = {"rows": {}, "a_gathered": dict(a_gathered=True), "b_gathered": dict(b_gathered=True)}
GATES = {
    "gated": dict(activation="swiglu", interleaved=False),
    "interleaved": dict(activation="gpt_oss", interleaved=True),
    "plain": dict(activation="gelu", interleaved=False),
}


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.fixture
def rows():
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    return launch.rows_of(ExpertLayout.from_topk(torch.arange(T * K).view(T, K) % E, E))


@pytest.fixture
def products(monkeypatch):
    """The products whose configuration is asked for."""
    from anabranch.ops.grouped_gemm.backends.hopper.plan import Plan

    found, original = [], Plan.launch

    def launch(plan, config, device, product):
        if config is None:
            found.append(product())
        return original(plan, config, device, product)

    monkeypatch.setattr(Plan, "launch", launch)
    return found


def check(products, make, needed, record_property):
    """Compiles what ``make`` launches with each configuration; ``needed`` says what shared memory one takes."""
    with compiling(90):
        make(None)
        (product,) = products
        default = product.plan.heuristic
        some = [
            c for c in product.candidates(default) if c.group_m == default.group_m or c.skew != default.skew
        ]
    space = list(dict.fromkeys(replace(c, group_m=default.group_m) for c in (default, *some)))
    table = []
    for config in space:
        with compiling(90) as found:
            make(config)
        (kernel,) = [kernel for kernel in found if "STAGES" in kernel.constants]
        most = needed(product, config)
        assert kernel.shared_bytes <= most <= SHARED_MEMORY[90], f"{config}: {kernel.shared_bytes} bytes"
        assert most - kernel.shared_bytes < tiles.SLACK, (
            f"{config}: {kernel.shared_bytes} bytes, {most} expected"
        )
        assert kernel.spilled_bytes <= SHARED_WORDS, f"{config}: {kernel.spilled_bytes} bytes spilled"
        table.append(kernel.row(constants=vars(config)))
    record_property("kernels", json.dumps(table))
    assert len(space) > 3


@pytest.mark.parametrize("case", GEMMS)
def test_products(case, rows, products, record_property):
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    given = dict(GEMMS[case])
    n, epilogue = given.pop("n", N), resolve("test", given.pop("activation", None))
    keep_h, gathered, n_major = (given.pop(name, False) for name in ("keep_h", "gathered", "n_major"))

    def make(config):
        launch.gemm(
            empty(T if gathered else T * K, K_DIM),
            empty(E, K_DIM, n).mT if n_major else empty(E, n, K_DIM),
            rows,
            empty(T * K, n // epilogue.columns),
            h=empty(T * K, n) if keep_h else None,
            bias=empty(E, n),
            epilogue=epilogue,
            gathered=gathered,
            config=config,
            **given,
        )

    check(products, make, lambda product, config: tiles.shared_memory(config), record_property)


@pytest.mark.parametrize("case", WEIGHTS)
def test_gradients_of_the_weight(case, rows, products, record_property):
    from anabranch.ops.grouped_gemm.backends.hopper import launch

    given = WEIGHTS[case]

    def make(config):
        a, b = (
            empty(T if "a_gathered" in given else T * K, N),
            empty(T if "b_gathered" in given else T * K, K_DIM),
        )
        launch.weight_gradient(a, b, rows, empty(E, N, K_DIM), config=config, **given)

    check(products, make, lambda product, config: tiles.shared_memory(config), record_property)


@pytest.mark.parametrize("case", GATES)
def test_gradients_of_the_gate(case, rows, products, record_property):
    from anabranch.ops.moe_mlp.backends.hopper import launch, tuned

    epilogue = resolve("test", GATES[case]["activation"])
    wide = N * epilogue.columns

    def make(config):
        launch.pre_activation_gradient(
            empty(T * K, K_DIM),
            empty(E, N, K_DIM),
            empty(T * K, wide),
            torch.empty(T, K),
            rows,
            epilogue,
            interleaved=GATES[case]["interleaved"],
            d_h=empty(T * K, wide),
            a_out=empty(T * K, N),
            d_scale=torch.zeros(T, K),
            config=config,
        )

    def needed(product, config):
        return tuned.shared_memory(config, epilogue.columns)

    check(products, make, needed, record_property)
