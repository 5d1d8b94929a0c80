"""Many calls of one kernel, and many configurations of one call."""

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.testing import assert_same, assert_within_budget, in_any_order, poison, randn, routing

pytestmark = pytest.mark.gpu
KINDS = {"forward": tiles.FORWARD, "gated": tiles.GATED}


def space(kind, dtype):
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    capability = torch.cuda.get_device_capability()
    return tiles.search_space(dtype, limit, kind, capability=capability, precision="ieee")


@pytest.mark.parametrize("constructor", ["from_counts", "from_topk"])
def test_offsets_are_the_sum_every_time(constructor):
    """No race in the kernels that add up: thousands of calls in dirty memory."""
    E, T, K = 256, 512, 8
    generator = torch.Generator("cuda").manual_seed(1)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for round_number in range(2000):
        if round_number % 100 == 0:
            poison("cuda", copies=1)
        if constructor == "from_counts":
            counts = torch.randint(0, 501, (E,), device="cuda", generator=generator)
            layout = ExpertLayout.from_counts(counts, 501 * E)
        else:
            ids = torch.randint(-3, E + 3, (T, K), device="cuda", generator=generator)
            counts = torch.zeros(E + 6, dtype=torch.int64, device="cuda")
            counts = counts.scatter_add_(0, ids.view(-1) + 3, torch.ones_like(ids).view(-1))[3 : E + 3]
            layout = ExpertLayout.from_topk(ids, E)
        wrong += (layout.counts != counts).sum() + (layout.offsets[1:] != counts.cumsum(0)).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_any_configuration_is_right_at_any_scale(kind, part):
    """Some of the search space, from its first to its last."""
    T, E, K, H, N = 300, 4, 2, 136, 144
    ids = routing(T, E, K, "zipf", dropped=0.1, device="cuda")
    layout = ExpertLayout.from_topk(ids, E)
    everything = space(KINDS[kind], torch.bfloat16)
    for size in (1e-3, 1.0, 30.0):
        given = {
            "x": randn(T, H, dtype=torch.bfloat16, scale=size, device="cuda"),
            "weight": randn(E, N, H, dtype=torch.bfloat16, scale=H**-0.5, device="cuda"),
        }
        options = {"layout": layout, "gather": True, "activation": None if kind == "forward" else "swiglu"}
        wide = {name: value.double() for name, value in given.items()}
        truth = grouped_gemm(**wide, **options, backend="reference")
        rough = grouped_gemm(**given, **options, backend="eager")
        for config in everything[part * 2 :: max(20, len(everything) // 2)]:
            out = grouped_gemm(**given, **options, backend="triton", config=config)
            assert_within_budget(out, truth, rough, name=f"{config}, size {size}")


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_only_where_it_is_allowed(allowed):
    """1 + 2**-12 survives a product in fp32."""
    x = torch.full((32, 64), 1 + 2**-12, device="cuda")
    layout = ExpertLayout.from_counts(torch.tensor([32], device="cuda"), 32)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        out = grouped_gemm(x, torch.ones(1, 32, 64, device="cuda"), layout)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert_same(out, torch.full_like(out, 64.0 if allowed else 64.015625))


def test_tf32_is_beyond_the_budget_of_fp32():
    """What sums in any order may differ by is far less than what TF32 loses."""
    x, weight = randn(64, 512, device="cuda"), randn(64, 512, device="cuda")
    truth = x.double() @ weight.double().T
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        baseline = in_any_order(x @ weight.T, truth, 512)
        assert_within_budget(x @ weight.T, truth, baseline)
        torch.backends.cuda.matmul.allow_tf32 = True
        rough = x @ weight.T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_within_budget(rough, truth, baseline)
