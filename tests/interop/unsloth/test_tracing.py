"""The interface under torch.compile and on fake tensors."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

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
from anabranch.testing import assert_same, randn

E, H, I, TOPK = 4, 16, 24, 2  # noqa: E741
CONFIGS = dict(
    kernel_config_fwd=KernelConfigForward(64, 32, 16),
    kernel_config_bwd_dX=KernelConfigBackward_dX(16),
    kernel_config_bwd_dW=KernelConfigBackward_dW(64),
)


def mlp(x, up, down, sizes, slots, weights):
    h = grouped_gemm(x, up, sizes, TOPK, slots, permute_x=True, **CONFIGS)
    fused = dict(permute_y=True, topk_weights=weights, fuse_mul_post=True, is_first_gemm=False)
    return grouped_gemm(h.relu(), down, sizes, TOPK, slots, **fused).view(len(x), TOPK, H).sum(1)


def apart(x, up, down, sizes, slots, weights):
    h = GroupedGemm.apply(x, up, sizes, TOPK, slots, True, False, None, False)
    return grouped_gemm(h.relu(), down, sizes, TOPK, slots, permute_y=True, autotune=True)


def operands(tokens):
    ids = torch.randint(E - 1, (tokens, TOPK)).flatten()
    sizes, slots = ids.bincount(minlength=E).int(), ids.argsort(stable=True).int()
    leaves = [randn(tokens, H), randn(E * I, H), randn(E, H, I)]
    weights = torch.rand(tokens * TOPK)
    return [*(v.requires_grad_() for v in leaves), sizes, slots, weights.requires_grad_()]


def gradients(function, arguments):
    y = function(*arguments)
    leaves = [v for v in arguments if v.requires_grad]
    return y.detach(), *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)


# What traces any torch.autograd.Function warns of what it does itself.
WARNS = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")


@pytest.mark.parametrize("function", [mlp, pytest.param(apart, marks=WARNS)])
def test_one_graph_for_any_number_of_tokens(function):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, 64, 65):
        arguments = operands(tokens)
        for found, wanted in zip(gradients(compiled, arguments), gradients(function, arguments), strict=True):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                assert_same(found, wanted)
    assert counter.frame_count <= 2


def test_inference_is_one_graph():
    arguments = operands(9)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(*arguments), mlp(*arguments))


def test_products_one_by_one():
    x, up, _, sizes, slots, _ = operands(9)

    def products(x, up, sizes, slots):
        options = dict(permute_x=True, BLOCK_SIZE_M=64)
        y = grouped_gemm_forward(x, up, TOPK, sizes, slots, **options)
        d_x = grouped_gemm_dX(y, up, slots, sizes, TOPK, **options)
        return y, d_x, grouped_gemm_dW(x, y, sizes, slots, TOPK, **options)

    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    arguments = [v.detach() for v in (x, up, sizes, slots)]
    for found, wanted in zip(compiled(*arguments), products(*arguments), strict=True):
        assert_same(found, wanted)


def test_a_wish_for_tma_leaves_one_graph():
    x, up, _, sizes, slots, _ = operands(9)
    wish = KernelConfigForward(use_tma_load_w=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return grouped_gemm(x, up, sizes, TOPK, slots, permute_x=True, kernel_config_fwd=wish)

    assert_same(compiled(x).detach(), grouped_gemm(x, up, sizes, TOPK, slots, permute_x=True).detach())


@pytest.mark.slow
def test_compiled_by_inductor():
    arguments = operands(9)
    compiled = torch.compile(mlp, fullgraph=True)
    for found, wanted in zip(gradients(compiled, arguments), gradients(mlp, arguments), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_tensors(device, dtype):
    trains = device != "cuda" or torch.cuda.is_available()  # autograd asks for the GPU's streams
    with FakeTensorMode():
        x, up, down = (
            torch.empty(*shape, device=device, dtype=dtype, requires_grad=trains)
            for shape in ((10, H), (E, I, H), (E * H, I))
        )
        sizes, slots = (torch.empty(n, device=device, dtype=torch.int32) for n in (E, 20))
        weights = torch.empty(20, device=device, requires_grad=trains)
        y = mlp(x, up, down, sizes, slots, weights)
        assert (y.shape, y.dtype, y.device) == ((10, H), dtype, x.device)
        if trains:
            y.sum().backward()
            for leaf in (x, up, down, weights):
                assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
        rows = grouped_gemm_dX(
            torch.empty(20, I, device=device, dtype=dtype), up, slots, sizes, TOPK, permute_x=True
        )
        assert rows.shape == (20, H)
