"""Every combination of the options against a loop over experts in fp64, values and gradients."""

import itertools

import pytest
import torch

from anabranch.interop.unsloth import (
    GroupedGemm,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    grouped_gemm,
    grouped_gemm_dW,
    grouped_gemm_dX,
    grouped_gemm_forward,
)
from anabranch.testing import assert_same, assert_within_budget, in_any_order

T, E, N, K = 7, 5, 24, 40
TERMS = {"y": K, "dX": 8 * N, "dW": 8 * T, "dweights": N}  # that a result adds up, at most
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PERMUTATIONS = {
    "none": {},
    "permute_x": dict(permute_x=True),
    "permute_y": dict(permute_y=True),
    "fuse_mul_post": dict(permute_y=True, fuse_mul_post=True),
}
CONFIGS = dict(
    kernel_config_fwd=KernelConfigForward(16, 32, 64),
    kernel_config_bwd_dX=KernelConfigBackward_dX(32, 16, 64, num_stages=3),
    kernel_config_bwd_dW=KernelConfigBackward_dW(64, 32, 16, num_warps=2, flatten=False),
)
TUNINGS = {"ours": {}, "given": CONFIGS, "autotune": dict(CONFIGS, autotune=True)}


class Case:
    """Inputs of a call, and its results by a loop: in fp64 and in the tested precision."""

    def __init__(self, permutation, topk, dtype, device, matrix=False):
        self.permutation, self.topk, self.matrix = PERMUTATIONS[permutation], topk, matrix
        # The same row counts in every test: matrix libraries prepare for each anew.
        ids = torch.rand(T, E + 4, generator=torch.Generator().manual_seed(topk)).argsort(1)[:, :topk] % E
        ids[ids == 1] = 3  # an expert without rows
        self.slots = ids.flatten().argsort(stable=True)
        self.sizes = ids.flatten().bincount(minlength=E)
        rows = T if permutation == "permute_x" else T * topk
        self.X, self.W = torch.randn(rows, K).to(dtype), torch.randn(E, N, K).to(dtype)
        self.weights, self.dY = torch.rand(T * topk), torch.randn(T * topk, N).to(dtype)
        self.device = device

    def call(self, **options):
        """y and the gradients of X, W and the routing weights, None for those that did not come."""
        X, W, sizes, slots = (v.to(self.device) for v in (self.X, self.W, self.sizes.int(), self.slots.int()))
        weights = self.weights.to(self.device) if "fuse_mul_post" in self.permutation else None
        W = W.flatten(0, 1) if self.matrix else W
        leaves = [None if v is None else v.clone().requires_grad_() for v in (X, W, weights)]
        first = "permute_y" not in self.permutation
        options = self.permutation | dict(is_first_gemm=first, topk_weights=leaves[2]) | options
        y = grouped_gemm(leaves[0], leaves[1], sizes, self.topk, slots, **options)
        y.backward(self.dY.to(self.device))
        assert all(leaf is None or leaf.grad is None or leaf.grad.shape == leaf.shape for leaf in leaves)
        d_x, d_w, d_weights = (
            None if leaf is None or leaf.grad is None else leaf.grad.cpu() for leaf in leaves
        )
        return y.detach().cpu(), d_x, d_w if d_w is None else d_w.view(E, N, K), d_weights

    def loop(self, dtype):
        """The same from the definition."""
        X, W, weights = (v.to(dtype, copy=True).requires_grad_() for v in (self.X, self.W, self.weights))
        y = torch.zeros(T * self.topk, N, dtype=dtype)
        for e, rows in enumerate(torch.arange(T * self.topk).split(self.sizes.tolist())):
            slots = self.slots[rows]
            z = X[slots // self.topk if "permute_x" in self.permutation else rows] @ W[e].T
            if "fuse_mul_post" in self.permutation:
                z = z * weights[slots, None]
            y = y.index_put((slots if "permute_y" in self.permutation else rows,), z)
        y.backward(self.dY.to(dtype))
        return y.detach(), X.grad, W.grad, weights.grad


def within_budget(actual, reference, baseline):
    for name, value, truth, plain in zip(
        ("y", "dX", "dW", "dweights"), actual, reference, baseline, strict=True
    ):
        if value is not None:
            assert_within_budget(value, truth, in_any_order(plain, truth, TERMS[name]), name=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix", [False, True], ids=["W3", "W2"])
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
@pytest.mark.parametrize("permutation", PERMUTATIONS)
def test_grouped_gemm(permutation, topk, matrix, dtype, device):
    case = Case(permutation, topk, dtype, device, matrix)
    reference, baseline = case.loop(torch.float64), case.loop(dtype)
    fused = permutation == "fuse_mul_post"
    for tuning, only in itertools.product(TUNINGS.values(), ((), ("dX_only",), ("dW_only",))):
        found = case.call(**tuning, **dict.fromkeys(only, True))
        given = [gradient is not None for gradient in found[1:]]
        assert given == ["dW_only" not in only, "dX_only" not in only, fused]
        within_budget(found, reference, baseline)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("permutation", ["none", "permute_x", "permute_y"])
def test_fp64(permutation, device):
    case = Case(permutation, 2, torch.float64, device)
    for actual, expected in zip(case.call()[:3], case.loop(torch.float64), strict=False):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("permutation", ["none", "permute_x", "permute_y"])
def test_products_one_by_one(permutation, topk, dtype, device):
    case = Case(permutation, topk, dtype, device)
    X, W, dY = (v.to(device) for v in (case.X, case.W, case.dY))
    sizes, slots = case.sizes.to(device), case.slots.to(device)
    reference, baseline = case.loop(torch.float64), case.loop(dtype)
    for tiles in ({}, dict(BLOCK_SIZE_M=64, BLOCK_SIZE_N=16, num_warps=8), dict(autotune=True)):
        options = case.permutation | tiles
        rows = grouped_gemm_dX(dY, W, slots, sizes, topk, **options)
        assert rows.shape == (T * topk, K)
        assert_same(grouped_gemm_dX(dY, W.flatten(0, 1), slots, sizes, topk, **options), rows)
        if permutation == "permute_x":
            rows = rows.view(T, topk, K).float().sum(1).to(dtype)
        found = (
            grouped_gemm_forward(X, W, topk, sizes, slots, **options).cpu(),
            rows.cpu(),
            grouped_gemm_dW(X, dY, sizes, slots, topk, **options).cpu(),
            None,
        )
        within_budget(found, reference, baseline)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_the_sum_of_rounded_rows(dtype, device):
    case = Case("permute_x", 4, dtype, device)
    _, found, _, _ = case.call()
    operands = (v.to(device) for v in (case.dY, case.W, case.slots, case.sizes))
    rows = grouped_gemm_dX(*operands, 4, permute_x=True, autotune=True).cpu().float()
    total = sum(rows.view(T, 4, K).unbind(1)).double()
    # Rounded once, to one of the nearest.
    assert bool(((found.double() - total).abs() <= (total.to(dtype).double() - total).abs()).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True], ids=["permute_x", "fuse_mul_post"])
def test_autograd_function_is_the_same_call(fused, device):
    case = Case("fuse_mul_post" if fused else "permute_x", 2, torch.float32, device)
    y, d_x, d_w, d_weights = case.call(**CONFIGS)
    X, W, weights = (v.to(device, copy=True).requires_grad_() for v in (case.X, case.W, case.weights))
    sizes, slots = case.sizes.to(device), case.slots.to(device)
    given = GroupedGemm.apply(
        X,
        W,
        sizes,
        2,
        slots,
        not fused,
        fused,
        weights if fused else None,
        fused,
        *CONFIGS.values(),
        *[False] * 3,
    )
    given.backward(case.dY.to(device))
    assert_same(given.detach().cpu(), y)
    assert_same(X.grad.cpu(), d_x)
    assert_same(W.grad.cpu(), d_w)
    if fused:
        assert_same(weights.grad.cpu(), d_weights)
