"""The gate's gradient with what a launch may choose: rows gathered, the pre-activation by pointers, or both."""

import json

import pytest
import torch

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.testing.aot import SHARED_MEMORY, compiling

pytestmark = [pytest.mark.no_poison, pytest.mark.slow]

SHARED_WORDS = 32
"""Bytes of what all warpgroups start from that the compiler may keep in memory: read once a tile, it costs nothing."""
T, K, E, N, K_DIM = 256, 4, 4, 512, 512


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("columns", [N, N - 40, 72])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "gelu"])
def test_kernels(activation, deep, gathered, columns, monkeypatch, record_property):
    from anabranch.ops.grouped_gemm.backends.hopper.launch import rows_of
    from anabranch.ops.moe_mlp.backends.hopper import launch

    monkeypatch.setattr(launch, "DEEP", K_DIM if deep else K_DIM + 1)
    epilogue = resolve("test", activation)
    interleaved = activation == "gpt_oss"
    rows = rows_of(ExpertLayout.from_topk(torch.arange(T * K).view(T, K) % E, E))
    h = empty(T * K, columns * epilogue.columns)
    launch._plan.cache_clear()
    with compiling(90) as found:
        launch.pre_activation_gradient(
            empty(T if gathered else T * K, K_DIM),
            empty(E, columns, K_DIM),
            h,
            torch.empty(T, K),
            rows,
            epilogue,
            interleaved=interleaved,
            d_h=h,
            a_out=empty(T * K, columns),
            d_scale=torch.zeros(T, K),
            gathered=gathered,
        )
    launch._plan.cache_clear()
    (kernel,) = [kernel for kernel in found if kernel.name == "gate_gradient_kernel"]
    by_pointers = deep and columns == N and not interleaved
    assert kernel.constants["GATHERED"] == gathered
    assert (kernel.constants["SLOTS"] == 0) == by_pointers
    assert kernel.shared_bytes <= SHARED_MEMORY[90]
    assert kernel.spilled_bytes <= SHARED_WORDS
    row = dict(
        name=kernel.name,
        registers=kernel.registers,
        spilled=kernel.spilled_bytes,
        shared=kernel.shared_bytes,
        seconds=round(kernel.seconds, 2),
    )
    record_property("kernels", json.dumps([row]))
