"""What a layer keeps for its backward on a GPU, what it does not, and where a product may write."""

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm, moe_mlp, multi_gemm
from anabranch.testing import assert_same, guard_band, randn, routing

pytestmark = pytest.mark.gpu
T, E, K, H, WIDTH = 512, 8, 2, 256, 128
FEW = 64  # tokens, so that the weights are nearly all there is
MANY = 8192  # tokens, so that they are nearly nothing
BLOCK = 512  # bytes that the allocator rounds up to


def tensors(*needs, tokens=T):
    made = {
        "x": randn(tokens, H, dtype=torch.bfloat16, device="cuda"),
        "gate_up": randn(E, 2 * WIDTH, H, dtype=torch.bfloat16, device="cuda"),
        "down": randn(E, H, WIDTH, dtype=torch.bfloat16, device="cuda"),
        "expert_weights": torch.rand(tokens, K).cuda(),
    }
    ids = routing(tokens, E, K, "zipf", dropped=0.1, device="cuda")
    return {**{name: value.requires_grad_(name in needs) for name, value in made.items()}, "expert_ids": ids}


def grown(function):
    """(bytes that a call leaves allocated, its result)"""
    function()  # compiles, and fills what is kept for good
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = function()
    return torch.cuda.memory_allocated() - before, result


@pytest.mark.parametrize("save", ["activations", "inputs"])
@pytest.mark.parametrize(("activation", "gate"), [("swiglu", 2), ("relu_squared", 1)])
def test_kept_are_the_layout_and_h_if_wanted(activation, gate, save):
    given = tensors("x", "gate_up", "down", "expert_weights")
    given["gate_up"] = given["gate_up"].detach()[:, : gate * WIDTH].contiguous().requires_grad_()
    bytes_, out = grown(lambda: moe_mlp(**given, activation=activation, save=save))
    h = 2 * T * K * gate * WIDTH if save == "activations" else 0
    layout = 4 * (E + E + 1 + 2 * T * K)
    kept = bytes_ - out.numel() * out.element_size()
    assert h + layout <= kept <= h + layout + 8 * BLOCK
    with torch.no_grad():
        bytes_, out = grown(lambda: moe_mlp(**given, activation=activation, save=save))
    assert bytes_ == out.numel() * out.element_size()


def peak(*needs, tokens=FEW, **options):
    """Bytes that a step takes beyond its inputs at most."""
    given = tensors(*needs, tokens=tokens)
    leaves = [given[name] for name in needs]
    for _ in "12":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(moe_mlp(**given, **options).sum(), leaves)
    return torch.cuda.max_memory_allocated() - before


def test_a_pre_activation_made_again_leaves_room_for_its_gradient():
    """The backward never holds both, as it has to where the forward's is kept; at most an activation beside it."""
    h, a = (2 * MANY * K * width for width in (2 * WIDTH, WIDTH))
    most, least = (peak("x", "gate_up", tokens=MANY, save=save) for save in ("activations", "inputs"))
    assert most - h - (2 << 20) <= least <= most - h + a + (2 << 20)


def test_frozen_weights_cost_nothing():
    weights = 2 * E * H * WIDTH * 3
    rows = 2 * FEW * K * (2 * WIDTH + H)
    assert peak("x", "expert_weights") <= peak("x", "expert_weights", "gate_up", "down") - weights + 4 * rows


@pytest.mark.no_poison
@pytest.mark.parametrize("N", [470, 466])
@pytest.mark.parametrize("op", ["grouped_gemm", "multi_gemm"])
def test_stores_stop_at_the_last_column(op, N):
    """Rows of 1024 bytes, which the tensor memory accelerator takes, of which the product fills some."""
    sizes = [5, 3, 11]
    x, w = (
        randn(19, 64, dtype=torch.bfloat16, device="cuda"),
        randn(3, N, 64, dtype=torch.bfloat16, device="cuda"),
    )
    if op == "grouped_gemm":
        layout = ExpertLayout.from_counts(torch.tensor(sizes, device="cuda"), 19)
        out, untouched = guard_band((19, N), torch.bfloat16, "cuda", columns=512 - N)
        grouped_gemm(x, w, layout, out=out)
        assert_same(out, grouped_gemm(x, w, layout))
    else:
        out, untouched = guard_band((19, N), torch.bfloat16, "cuda", columns=512 - N)
        multi_gemm([x], [w[0]], out=[out])
        assert_same(out, multi_gemm([x], [w[0]])[0])
    assert bool(out.isfinite().all())
    untouched()
