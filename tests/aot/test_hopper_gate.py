"""The gate's gradient with what a launch may choose: rows gathered, the pre-activation by pointers, or both."""

import json
from itertools import product

import pytest
import torch

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.testing.aot import SHARED_MEMORY, SHARED_WORDS, compiling

pytestmark = [pytest.mark.no_poison, pytest.mark.slow]

T, K, E, N, K_DIM = 256, 4, 4, 512, 512


CASES = [
    *product(("swiglu", "gpt_oss", "gelu"), (N, N - 40, 72), [False]),
    *product(("swiglu", "gelu"), [N], [True]),
    # However deep, a part of a tile or alternating columns come by the ring.
    ("swiglu", N - 40, True),
    ("gpt_oss", N, True),
]


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("activation", "columns", "deep"), CASES)
def test_kernels(activation, columns, deep, gathered, monkeypatch, record_property):
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
    assert (kernel.constants["H_STAGES"] == 0) == by_pointers
    assert kernel.shared_bytes <= SHARED_MEMORY[90]
    assert kernel.spilled_bytes <= SHARED_WORDS
    record_property("kernels", json.dumps([kernel.row()]))
