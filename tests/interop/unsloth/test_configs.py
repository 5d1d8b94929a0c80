"""Kernel configurations, autotune and TMA: what they become, which go together, and what is refused."""

import itertools
import logging
import types
import warnings

import pytest
import torch

from anabranch.interop import unsloth
from anabranch.interop.unsloth import (
    GroupedGemm,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    config,
    grouped_gemm,
    grouped_gemm_dW,
    grouped_gemm_dX,
    grouped_gemm_forward,
    interface,
    products,
)
from anabranch.ops.grouped_gemm.backends import eager
from anabranch.testing import randn
from anabranch.tuning import GroupedGemmConfig

E, N, K = 3, 16, 32
TILES = dict(BLOCK_SIZE_M=16, BLOCK_SIZE_N=32, BLOCK_SIZE_K=64, num_warps=8, num_stages=3, flatten=False)


def operands():
    return randn(12, K), randn(E, N, K), torch.tensor([5, 0, 7])


def test_tiles_in_our_terms():
    rest = dict(num_warps=8, num_stages=3, flatten=False)
    assert KernelConfigForward(**TILES).tiles() == GroupedGemmConfig(16, 32, 64, **rest)
    assert KernelConfigBackward_dW(**TILES).tiles() == GroupedGemmConfig(16, 32, 64, **rest)
    # The gradient of X has K columns and is reduced over N.
    assert KernelConfigBackward_dX(**TILES).tiles() == GroupedGemmConfig(16, 64, 32, **rest)


@pytest.fixture
def handed(monkeypatch):
    """The configurations of the products that run, as if the CPU had tiles."""
    found = []
    for module in (interface, products):
        monkeypatch.setattr(module, "tiles", lambda op, argument, config, x: config.tiles())
    monkeypatch.setattr(eager, "supports", lambda call: None)
    forward, backward = eager.forward, eager.backward

    def run_forward(call, *args):
        found.append(call.config)
        return forward(call, *args)

    def run_backward(call, grad, h, needs):
        configs = (call.d_x_config, call.d_weight_config)
        found.extend(config for config, need in zip(configs, needs, strict=False) if need)
        return backward(call, grad, h, needs)

    monkeypatch.setattr(eager, "forward", run_forward)
    monkeypatch.setattr(eager, "backward", run_backward)
    return found


@pytest.mark.parametrize("call", [grouped_gemm, GroupedGemm.apply])
@pytest.mark.parametrize("autotune", [False, True])
def test_each_product_has_its_own_tiles(call, autotune, handed):
    X, W, sizes = operands()
    configs = KernelConfigForward(64), KernelConfigBackward_dX(32), KernelConfigBackward_dW(16)
    leaves = X.requires_grad_(), W.requires_grad_()
    call(*leaves, sizes, 2, None, False, False, None, False, *configs, autotune).sum().backward()
    assert handed == ([None] * 3 if autotune else [config.tiles() for config in configs])


def test_products_one_by_one_have_theirs(handed):
    X, W, sizes = operands()
    dY = randn(12, N)
    grouped_gemm_forward(X, W, 2, sizes, **TILES)
    grouped_gemm_dX(dY, W, None, sizes, 2, **TILES)
    grouped_gemm_dW(X, dY, sizes, None, 2, **TILES)
    rest = dict(num_warps=8, num_stages=3, flatten=False)
    swapped = GroupedGemmConfig(16, 64, 32, **rest)
    assert handed == [GroupedGemmConfig(16, 32, 64, **rest), swapped, GroupedGemmConfig(16, 32, 64, **rest)]
    grouped_gemm_forward(X, W, 2, sizes, autotune=True)
    assert handed[3] is None


def test_fields_that_the_call_overrides():
    X, W, sizes = operands()
    ignored = KernelConfigForward(permute_x=True, permute_y=True, fuse_mul_post=True)
    assert torch.equal(grouped_gemm(X, W, sizes, 2, kernel_config_fwd=ignored), grouped_gemm(X, W, sizes, 2))


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("BLOCK_SIZE_M", 48, "BLOCK_SIZE_M = 48 is not a power of two"),
        ("BLOCK_SIZE_N", 8, "BLOCK_SIZE_N = 8 is not a power of two of at least 16"),
        ("BLOCK_SIZE_K", 100, "BLOCK_SIZE_K = 100 is not a power of two"),
        ("num_warps", 3, "num_warps = 3 is not a power of two"),
        ("num_stages", 0, "num_stages: expected at least 1, got 0"),
    ],
)
def test_tiles_that_no_gpu_can_run(field, value, got):
    X, W, sizes = operands()
    tiles = {field: value}
    dY = randn(12, N)
    for cls, argument in (
        (KernelConfigForward, "kernel_config_fwd"),
        (KernelConfigBackward_dX, "kernel_config_bwd_dX"),
        (KernelConfigBackward_dW, "kernel_config_bwd_dW"),
    ):
        with pytest.raises(ValueError, match=f"grouped_gemm: .*{got}") as raised:
            grouped_gemm(X, W, sizes, 2, **{argument: cls(**tiles)})
        assert field in str(raised.value)
        grouped_gemm(X, W, sizes, 2, autotune=True, **{argument: cls(**tiles)})
    with pytest.raises(ValueError, match=f"grouped_gemm_forward: .*{got}"):
        grouped_gemm_forward(X, W, 2, sizes, **tiles)
    with pytest.raises(ValueError, match=f"grouped_gemm_dX: .*{got}"):
        grouped_gemm_dX(dY, W, None, sizes, 2, **tiles)
    with pytest.raises(ValueError, match=f"grouped_gemm_dW: .*{got}"):
        grouped_gemm_dW(X, dY, sizes, None, 2, **tiles)


def test_an_accumulator_too_large_for_the_registers():
    X, W, sizes = operands()
    with pytest.raises(ValueError, match="tiles that a GPU can run, got its accumulator needs"):
        grouped_gemm(X, W, sizes, 2, kernel_config_fwd=KernelConfigForward(256, 256, num_warps=4))


@pytest.mark.parametrize(
    ("field", "value"), [("BLOCK_SIZE_M", 32.0), ("num_warps", "4"), ("num_stages", True)]
)
def test_tiles_of_a_wrong_type(field, value):
    X, W, sizes = operands()
    with pytest.raises(TypeError, match=f"grouped_gemm: {field}: expected an int, got "):
        grouped_gemm(X, W, sizes, 2, kernel_config_fwd=KernelConfigForward(**{field: value}))


@pytest.mark.parametrize("argument", ["kernel_config_fwd", "kernel_config_bwd_dX", "kernel_config_bwd_dW"])
def test_configuration_of_a_wrong_kind(argument):
    X, W, sizes = operands()
    for wrong in (GroupedGemmConfig(16, 16, 16, 4, 2), dict(TILES)):
        with pytest.raises(
            TypeError, match=f"grouped_gemm: {argument}: expected a KernelConfig.* or None, got "
        ):
            grouped_gemm(X, W, sizes, 2, **{argument: wrong})


@pytest.mark.gpu
def test_tiles_too_large_for_this_gpu():
    X, W, sizes = (v.cuda() for v in operands())
    # 2.5 MB of shared memory.
    for large in (dict(num_stages=10), dict(num_stages=20)):
        tiles = dict(BLOCK_SIZE_M=128, BLOCK_SIZE_N=128, BLOCK_SIZE_K=256, num_warps=8) | large
        with pytest.raises(NotImplementedError, match="bytes of shared memory, the device has"):
            grouped_gemm(X, W, sizes, 2, kernel_config_fwd=KernelConfigForward(**tiles))
        for cls, argument in ((KernelConfigBackward_dX, "dX"), (KernelConfigBackward_dW, "dW")):
            leaves = [v.detach().requires_grad_() for v in (X, W)]
            with pytest.raises(NotImplementedError, match="bytes of shared memory, the device has"):
                grouped_gemm(*leaves, sizes, 2, **{f"kernel_config_bwd_{argument}": cls(**tiles)})


# The rules

FWD = ("permute_x", "permute_y", "use_tma_load_x", "use_tma_load_w", "use_tma_store", "fuse_mul_post")
DW = ("permute_x", "permute_y", "use_tma_load_dY", "use_tma_load_x", "use_tma_store", "fuse_mul_post")
DX = ("permute_x", "permute_y", "use_tma_load_dY", "use_tma_load_w", "use_tma_store", "fuse_mul_post")
RULES = {
    "check_valid_config_fwd": (
        FWD,
        lambda o, first: (
            (o["permute_x"] and o["permute_y"])
            or (o["permute_x"] and not first)
            or (o["permute_y"] and first)
            or (o["fuse_mul_post"] and first)
            or (o["use_tma_load_x"] and o["permute_x"])
            or (o["use_tma_store"] and o["permute_y"] and not first)
        ),
    ),
    "check_valid_config_bwd_dW": (
        DW,
        lambda o, first: (
            (o["permute_y"] and o["use_tma_load_dY"] and not first)
            or (o["permute_x"] and o["use_tma_load_x"] and first)
        ),
    ),
    "check_valid_config_bwd_dX": (
        DX,
        lambda o, first: (
            (o["permute_y"] and o["use_tma_load_dY"] and not first)
            or (o["permute_x"] and o["use_tma_store"] and first)
        ),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    names, broken = RULES[name]
    check = getattr(unsloth, name)
    refused = 0
    for *values, first in itertools.product([False, True], repeat=len(names) + 1):
        options = dict(zip(names, values, strict=True))
        if broken(options, first):
            refused += 1
            with pytest.raises(
                ValueError, match=rf"{name}: (permute|use_tma|fuse).*: expected False.*, got True"
            ):
                check(*values, first)
        else:
            check(*values, is_first_gemm=first)
    assert refused


CALLS = [
    (dict(permute_x=True, is_first_gemm=False), "permute_x"),
    (dict(permute_y=True), "permute_y"),
    (dict(kernel_config_fwd=KernelConfigForward(use_tma_load_x=True), permute_x=True), "use_tma_load_x"),
    (dict(kernel_config_bwd_dX=KernelConfigBackward_dX(use_tma_store=True), permute_x=True), "use_tma_store"),
    (
        dict(kernel_config_bwd_dW=KernelConfigBackward_dW(use_tma_load_x=True), permute_x=True),
        "use_tma_load_x",
    ),
    (
        dict(
            kernel_config_bwd_dW=KernelConfigBackward_dW(use_tma_load_dy=True),
            permute_y=True,
            is_first_gemm=False,
        ),
        "use_tma_load_dy",
    ),
]


@pytest.mark.parametrize(("options", "argument"), CALLS)
def test_rules_hold_unless_autotuned(options, argument):
    X, W, sizes = operands()
    X = X[:6] if "permute_x" in options else X
    slots = torch.randperm(12)
    with pytest.raises(ValueError, match=f": {argument}: expected False"):
        grouped_gemm(X, W, sizes, 2, slots, **options)
    grouped_gemm(X, W, sizes, 2, slots, **options, autotune=True)


def test_rules_of_the_gradient_that_is_not_wanted_do_not_hold():
    X, W, sizes = operands()
    wish = KernelConfigBackward_dX(use_tma_store=True)
    slots = torch.randperm(12)
    grouped_gemm(
        X[:6], W, sizes, 2, slots, permute_x=True, kernel_config_bwd_dX=wish, dW_only=True, autotune=True
    )
    with pytest.raises(ValueError, match="use_tma_store"):
        grouped_gemm(X[:6], W, sizes, 2, slots, permute_x=True, kernel_config_bwd_dX=wish)
    wish = KernelConfigBackward_dW(use_tma_load_x=True)
    with pytest.raises(ValueError, match="use_tma_load_x"):
        grouped_gemm(X[:6], W, sizes, 2, slots, permute_x=True, kernel_config_bwd_dW=wish, dW_only=True)


def test_wishes_of_the_products_one_by_one():
    X, W, sizes = operands()
    slots, dY = torch.randperm(12), randn(12, N)
    with pytest.raises(
        ValueError, match="grouped_gemm_forward: use_tma_load_x: expected False with permute_x"
    ):
        grouped_gemm_forward(X[:6], W, 2, sizes, slots, permute_x=True, use_tma_load_x=True)
    with pytest.raises(
        ValueError, match="grouped_gemm_forward: use_tma_store: expected False with permute_y"
    ):
        grouped_gemm_forward(X, W, 2, sizes, slots, permute_y=True, use_tma_store=True)
    with pytest.raises(ValueError, match="grouped_gemm_dX: use_tma_load_dy: expected False with permute_y"):
        grouped_gemm_dX(dY, W, slots, sizes, 2, permute_y=True, use_tma_load_dy=True)
    with pytest.raises(ValueError, match="grouped_gemm_dW: use_tma_load_x: expected False with permute_x"):
        grouped_gemm_dW(X[:6], dY, sizes, slots, 2, permute_x=True, use_tma_load_x=True)


# TMA


def test_a_wish_that_nothing_here_grants_warns():
    X, W, sizes = operands()
    dY = randn(12, N)
    y = grouped_gemm(X, W, sizes, 2)
    wish = KernelConfigForward(use_tma_load_w=True, use_tma_store=True)
    with pytest.warns(RuntimeWarning, match="grouped_gemm: cpu has no TMA for use_tma_load_w, use_tma_store"):
        found = grouped_gemm(X, W, sizes, 2, kernel_config_fwd=wish)
    assert torch.equal(found, y)
    wish = KernelConfigBackward_dW(use_tma_load_dy=True)
    with pytest.warns(RuntimeWarning, match="grouped_gemm: cpu has no TMA for use_tma_load_dy"):
        grouped_gemm(X, W, sizes, 2, kernel_config_bwd_dW=wish)
    with pytest.warns(RuntimeWarning, match="grouped_gemm_forward: cpu has no TMA for use_tma_load_x"):
        grouped_gemm_forward(X, W, 2, sizes, use_tma_load_x=True)
    with pytest.warns(RuntimeWarning, match="grouped_gemm_dX: cpu has no TMA"):
        grouped_gemm_dX(dY, W, None, sizes, 2, use_tma_load_w=True)
    with pytest.warns(RuntimeWarning, match="grouped_gemm_dW: cpu has no TMA"):
        grouped_gemm_dW(X, dY, sizes, None, 2, use_tma_load_x=True)


@pytest.mark.parametrize(("capability", "granted"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_gpus_with_a_tma(capability, granted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert unsloth.supports_tma() is granted
    wish = KernelConfigForward(use_tma_load_w=True)
    # A fake tensor on a GPU needs one where torch is built for it; of x nothing but its device and dtype is asked.
    x = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert config.tiles("op", "wish", wish, x) == wish.tiles()
    assert len(caught) == (not granted)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert unsloth.supports_tma() is False


def test_supports_tma_says_so():
    assert unsloth.supports_tma() is (
        torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability() >= (9, 0)
    )


def test_log_kernel_info(caplog):
    kernel = types.SimpleNamespace(name="gemm", n_regs=128, n_spills=0, metadata="shared=1")
    with caplog.at_level(logging.DEBUG, logger="anabranch.interop.unsloth"):
        assert unsloth.log_kernel_info(kernel) is None
        assert "gemm: n_regs=128, n_spills=0, metadata=shared=1" in caplog.text
        unsloth.log_kernel_info(kernel, best_config="BLOCK_M: 64")
        assert "BLOCK_M: 64" in caplog.text
        unsloth.log_kernel_info(object())
