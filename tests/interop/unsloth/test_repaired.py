"""What the original gets wrong is right here; and what it leaves open is settled."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anabranch.interop.unsloth import (
    GroupedGemm,
    KernelConfigForward,
    check_valid_config_bwd_dW,
    check_valid_config_bwd_dX,
    grouped_gemm,
    grouped_gemm_dW,
    grouped_gemm_dX,
    grouped_gemm_forward,
)
from anabranch.ops.grouped_gemm import autograd
from anabranch.testing import assert_same, randn

SRC = Path(__file__).parents[3] / "src"
SIZES = (3, 0, 5, 4)
E, N, K = len(SIZES), 24, 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def operands(device, total=12, columns=K, dtype=torch.float32):
    X, W = randn(total, columns, dtype=dtype, device=device), randn(E, N, columns, dtype=dtype, device=device)
    return X, W, torch.tensor(SIZES, device=device)


def expected(X, W, sizes=SIZES):
    """In expert order, zeros past the sizes."""
    parts = [x.double() @ w.double().T for x, w in zip(X[: sum(sizes)].split(list(sizes)), W, strict=True)]
    return torch.cat([*parts, X.new_zeros(len(X) - sum(sizes), len(W[0]), dtype=torch.float64)])


def close(actual, reference):
    torch.testing.assert_close(actual.double(), reference.double(), rtol=1e-5, atol=1e-5)


def test_no_gather_indices_without_a_permutation(device):
    X, W, sizes = operands(device)
    dY = randn(len(X), N, device=device)
    close(grouped_gemm(X, W, sizes, 2), expected(X, W))
    close(grouped_gemm_forward(X, W, 2, sizes), expected(X, W))
    close(grouped_gemm_dX(dY, W, None, sizes, 2), expected(dY, W.mT))
    assert grouped_gemm_dW(X, dY, sizes, None, 2).shape == W.shape


def test_gradient_of_a_matrix_is_a_matrix(device):
    X, W, sizes = operands(device)
    W = W.flatten(0, 1).requires_grad_()
    grouped_gemm(X, W, sizes, 2).sum().backward()
    assert W.grad.shape == W.shape
    columns = torch.stack([x.sum(0) for x in X.split(list(SIZES))])
    close(W.grad, columns.repeat_interleave(N, 0))


def test_fuse_mul_post_runs_and_trains(device):
    X, W, sizes = operands(device)
    weights = torch.rand(len(X), device=device)
    slots = torch.randperm(len(X), device=device)
    leaves = [v.requires_grad_() for v in (X, W, weights)]
    options = dict(permute_y=True, is_first_gemm=False)
    y = grouped_gemm(X, W, sizes, 2, slots, topk_weights=weights, fuse_mul_post=True, **options)
    plain = grouped_gemm(X, W, sizes, 2, slots, **options) * weights[:, None]
    close(y, plain)
    dY = randn(*y.shape, device=device)
    for found, wanted in zip(*(torch.autograd.grad(v, leaves, dY) for v in (y, plain)), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("shape", [(12,), (6, 2), (12, 1), (1, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_weights_of_any_shape_and_dtype(shape, dtype, device):
    X, W, sizes = operands(device)
    weights = torch.rand(shape, device=device).to(dtype).requires_grad_()
    slots = torch.randperm(len(X), device=device)
    y = grouped_gemm(X, W, sizes, 2, slots, False, True, weights, True, is_first_gemm=False)
    y.sum().backward()
    assert (weights.grad.shape, weights.grad.dtype) == (shape, dtype)
    assert bool(weights.grad.all())


@pytest.mark.parametrize("call", [grouped_gemm, GroupedGemm.apply])
@pytest.mark.parametrize("frozen", ["X", "W", "both"])
def test_a_frozen_input_gets_no_gradient(frozen, call, device, monkeypatch):
    asked = []
    run = autograd.run_backward
    monkeypatch.setattr(autograd, "run_backward", lambda *args: (asked.append(args[0]), run(*args))[1])
    X, W, sizes = operands(device)
    X.requires_grad_(frozen == "W")
    W.requires_grad_(frozen == "X")
    y = call(X, W, sizes, 2, None, False, False, None, False)
    assert y.requires_grad == (frozen != "both")
    if y.requires_grad:
        y.sum().backward()
        assert (X.grad is None, W.grad is None) == (frozen == "X", frozen == "W")
        assert asked == [[frozen == "W", frozen == "X", False, False]]


def test_backward_rules_accept_fuse_mul_post(device):
    check_valid_config_bwd_dW(False, True, False, False, False, True, False)
    check_valid_config_bwd_dX(False, True, False, False, False, True, False)


def test_no_configuration_is_needed(device):
    X, W, sizes = operands(device)
    close(grouped_gemm(X, W, sizes, 2, autotune=False), expected(X, W))


@pytest.mark.parametrize("columns", [1, 7, 33, 100])
def test_any_width(columns, device):
    X, W, sizes = operands(device, columns=columns)
    config = KernelConfigForward(32, 32, 64)
    close(grouped_gemm(X, W, sizes, 2, kernel_config_fwd=config), expected(X, W))
    close(grouped_gemm_forward(X, W, 2, sizes), expected(X, W))


def test_the_device_of_the_rows_rules(device):
    if device == "cuda":
        device = torch.device(
            "cuda", torch.cuda.device_count() - 1
        )  # which is not the current one, if it can
    X, W, sizes = operands(device)
    X.requires_grad_()
    y = grouped_gemm(X, W, sizes, 2, autotune=True)
    y.sum().backward()
    assert y.device == X.grad.device == X.device
    close(y, expected(X, W))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_any_width(dtype, device):
    X, W, sizes = operands(device)
    slots = torch.randperm(len(X), device=device)
    y = grouped_gemm(X, W, sizes, 2, slots, permute_y=True, is_first_gemm=False)
    dtype = getattr(torch, dtype)
    assert_same(
        grouped_gemm(X, W, sizes.to(dtype), 2, slots.to(dtype), permute_y=True, is_first_gemm=False), y
    )


def test_leading_dimensions_are_flattened(device):
    X, W, sizes = operands(device)
    tokens = X[:6].view(2, 3, K).requires_grad_()
    slots = torch.randperm(12, device=device)
    y = grouped_gemm(tokens, W, sizes, 2, slots, permute_x=True)
    close(y, expected(X[:6][slots // 2], W))
    y.sum().backward()
    assert tokens.grad.shape == tokens.shape
    dY = randn(3, 4, N, device=device)
    assert_same(grouped_gemm_dX(dY, W, None, sizes, 2), grouped_gemm_dX(dY.flatten(0, 1), W, None, sizes, 2))
    d_w = grouped_gemm_dW(X.view(2, 6, K), dY, sizes, None, 2)
    assert_same(d_w, grouped_gemm_dW(X, dY.flatten(0, 1), sizes, None, 2))


def test_rows_past_the_sizes_are_zero(device):
    X, W, sizes = operands(device, total=16)
    X[12:] = torch.nan
    X.requires_grad_()
    W.requires_grad_()
    y = grouped_gemm(X, W, sizes, 2)
    close(y, expected(X.detach().nan_to_num(0), W.detach()))
    y.sum().backward()
    assert bool((X.grad[12:] == 0).all())
    assert bool(W.grad.isfinite().all())


@pytest.mark.parametrize("permute_y", [False, True])
def test_sizes_that_claim_too_many_rows(permute_y, device):
    X, W, _ = operands(device)
    sizes, slots = torch.tensor([3, 0, 5, 4000], device=device), torch.arange(12, device=device)
    X.requires_grad_()
    y = grouped_gemm(X, W, sizes, 2, slots, permute_y=permute_y, is_first_gemm=False)
    close(y, expected(X.detach(), W))
    y.sum().backward()
    assert bool(X.grad.isfinite().all())


@pytest.mark.parametrize("topk", [1, 3])
def test_no_tokens(topk, device):
    X = torch.zeros(0, K, device=device, requires_grad=True)
    W = randn(E, N, K, device=device).requires_grad_()
    sizes, slots = (torch.zeros(n, dtype=torch.int64, device=device) for n in (E, 0))
    for options in ({}, dict(permute_x=True), dict(permute_y=True, is_first_gemm=False)):
        y = grouped_gemm(X, W, sizes, topk, slots, **options)
        assert y.shape == (0, N)
        d_x, d_w = torch.autograd.grad(y.sum(), (X, W))
        assert d_x.shape == X.shape
        assert not bool(d_w.any())


def test_gradients_of_any_strides(device):
    X, W, sizes = operands(device)
    for dY in (torch.ones((), device=device).expand(12, N), randn(N, 12, device=device).T):
        grads = []
        for grad in (dY, dY.contiguous()):
            leaves = [v.detach().requires_grad_() for v in (X, W)]
            grouped_gemm(*leaves, sizes, 2).backward(grad)
            grads.append([leaf.grad for leaf in leaves])
        for found, wanted in zip(*grads, strict=True):
            close(found, wanted)


def test_under_autocast_as_matmul(device):
    X, W, sizes = operands(device)
    leaves = [v.requires_grad_() for v in (X, W)]
    with torch.autocast(device, dtype=torch.bfloat16):
        y = grouped_gemm(X, W, sizes, 2)
        assert y.dtype == torch.bfloat16
        y.sum().backward()  # inside it, which is not wise but allowed
    halves = [v.detach().bfloat16().requires_grad_() for v in leaves]
    wanted = grouped_gemm(*halves, sizes, 2)
    wanted.sum().backward()
    assert_same(y.detach(), wanted.detach())
    for leaf, half in zip(leaves, halves, strict=True):
        assert_same(leaf.grad, half.grad.float())


def test_twice_through_the_backward_is_refused(device):
    X, W, sizes = operands(device)
    W.requires_grad_()
    y = grouped_gemm(X.requires_grad_(), W, sizes, 2)
    (d_x,) = torch.autograd.grad(y.square().sum(), X, create_graph=True)
    with pytest.raises(NotImplementedError):
        d_x.sum().backward()


def test_flags_and_routing_weights(device):
    X, W, sizes = operands(device)
    weights = torch.rand(12, device=device, requires_grad=True)
    slots = torch.arange(12, device=device)
    for flag in ("dX_only", "dW_only"):
        leaves = [v.detach().requires_grad_() for v in (X, W)]
        y = grouped_gemm(
            *leaves, sizes, 2, slots, False, True, weights, True, is_first_gemm=False, **{flag: True}
        )
        y.sum().backward()
        assert [leaf.grad is None for leaf in leaves] == [flag == "dW_only", flag == "dX_only"]
        assert weights.grad is not None
    ignored = GroupedGemm.apply(X, W, sizes, 2, slots, False, True, weights, False)
    assert not ignored.requires_grad or torch.autograd.grad(ignored.sum(), weights, allow_unused=True) == (
        None,
    )


QUIET = """
import logging, sys
import torch
before = {name: (logger.level, list(logger.handlers), logger.propagate)
          for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)}
root = logging.root.level, list(logging.root.handlers)
import anabranch.interop.unsloth
assert root == (logging.root.level, logging.root.handlers)
for name, logger in logging.root.manager.loggerDict.items():
    if isinstance(logger, logging.Logger):
        plain = (logging.NOTSET, [], True)
        assert (logger.level, logger.handlers, logger.propagate) == before.get(name, plain), name
assert not {"pandas", "triton"} & set(sys.modules), "imported too much"
assert not torch.cuda.is_initialized()
"""


def test_importing_is_quiet(device):
    code = f"import sys; sys.path.insert(0, {str(SRC)!r})\n{QUIET}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


ALLOCATOR = """
import torch, triton
seen = []
def mine(size, alignment, stream):
    seen.append(size)
    return torch.empty(size, dtype=torch.int8, device="cuda" if torch.cuda.is_available() else "cpu")
triton.set_allocator(mine)
from triton.runtime import _allocation
before = _allocation._allocator.get()
from anabranch.interop.unsloth import grouped_gemm
device = "cuda" if torch.cuda.is_available() else "cpu"
X, W = torch.randn(12, 64, device=device), torch.randn(3, 64, 64, device=device)
grouped_gemm(X, W, torch.tensor([4, 4, 4], device=device), 2, autotune=True)
assert _allocation._allocator.get() is before
"""


def test_the_users_allocator_stays(device):
    code = f"import sys; sys.path.insert(0, {str(SRC)!r})\n{ALLOCATOR}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
