"""Every name of the interface, argument by argument and default by default."""

import dataclasses
import inspect

import pytest
import torch

from anabranch.interop import unsloth

TILES = dict(BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32)
WARPS = dict(num_warps=4, num_stages=2)
REQUIRED = inspect.Parameter.empty


def required(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), REQUIRED)


FUNCTIONS = {
    "grouped_gemm": required("X W m_sizes topk")
    | dict(gather_indices=None, permute_x=False, permute_y=False, topk_weights=None, fuse_mul_post=False)
    | dict(kernel_config_fwd=None, kernel_config_bwd_dX=None, kernel_config_bwd_dW=None, autotune=False)
    | dict(is_first_gemm=True, dX_only=False, dW_only=False),
    "grouped_gemm_forward": required("X W topk m_sizes")
    | dict(gather_indices=None, topk_weights=None, permute_x=False, permute_y=False, fuse_mul_post=False)
    | dict(autotune=False)
    | TILES
    | WARPS
    | dict(use_tma_load_w=False, use_tma_load_x=False, use_tma_store=False, flatten=True, debug=False),
    "grouped_gemm_dX": required("dY W gather_indices m_sizes topk")
    | TILES
    | dict(debug=False, permute_x=False, permute_y=False)
    | dict(use_tma_load_w=False, use_tma_load_dy=False, use_tma_store=False)
    | WARPS
    | dict(flatten=True, fuse_mul_pre=False, fuse_mul_post=False, autotune=False),
    "grouped_gemm_dW": required("X dY m_sizes gather_indices topk")
    | TILES
    | dict(permute_x=False, permute_y=False, use_tma_load_dy=False, use_tma_load_x=False, use_tma_store=False)
    | dict(fuse_mul_pre=False, fuse_mul_post=False)
    | WARPS
    | dict(flatten=True, autotune=False, debug=False),
    "check_valid_config_fwd": required(
        "permute_x permute_y use_tma_load_x use_tma_load_w use_tma_store fuse_mul_post is_first_gemm"
    ),
    "check_valid_config_bwd_dW": required(
        "permute_x permute_y use_tma_load_dY use_tma_load_x use_tma_store fuse_mul_post is_first_gemm"
    ),
    "check_valid_config_bwd_dX": required(
        "permute_x permute_y use_tma_load_dY use_tma_load_w use_tma_store fuse_mul_post is_first_gemm"
    ),
    "supports_tma": {},
    "log_kernel_info": required("compiled_kernel") | dict(best_config=None),
}

COMMON = TILES | WARPS | dict(flatten=True, permute_x=False, permute_y=False, fuse_mul_post=False)
CONFIGS = {
    "KernelConfigForward": COMMON | dict(use_tma_store=False, use_tma_load_w=False, use_tma_load_x=False),
    "KernelConfigBackward_dW": COMMON
    | dict(use_tma_store=False, use_tma_load_dy=False, use_tma_load_x=False),
    "KernelConfigBackward_dX": COMMON
    | dict(use_tma_store=False, use_tma_load_dy=False, use_tma_load_w=False),
}

APPLY = list(
    required(
        "X W m_sizes topk gather_indices permute_x permute_y topk_weights fuse_mul_post kernel_config_fwd "
        "kernel_config_bwd_dX kernel_config_bwd_dW autotune dX_only dW_only"
    )
)


def parameters(function) -> list[tuple[str, object]]:
    signature = inspect.signature(function)
    assert {p.kind for p in signature.parameters.values()} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [(name, p.default) for name, p in signature.parameters.items()]


def test_names():
    assert sorted(unsloth.__all__) == sorted([*FUNCTIONS, *CONFIGS, "GroupedGemm"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    assert parameters(getattr(unsloth, name)) == list(FUNCTIONS[name].items())


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name):
    cls = getattr(unsloth, name)
    assert [(f.name, f.default) for f in dataclasses.fields(cls)] == list(CONFIGS[name].items())
    assert parameters(cls) == list(CONFIGS[name].items())
    config = cls(64)
    config.num_warps = 8
    assert dataclasses.replace(config, BLOCK_SIZE_N=16) == cls(64, 16, 32, 8)


def test_autograd_function():
    assert issubclass(unsloth.GroupedGemm, torch.autograd.Function)
    assert [name for name, _ in parameters(unsloth.GroupedGemm.forward)] == ["ctx", *APPLY]


def test_annotations_are_whole():
    for name in FUNCTIONS:
        signature = inspect.signature(getattr(unsloth, name))
        assert signature.return_annotation is not signature.empty
        assert all(p.annotation is not p.empty for p in signature.parameters.values())
        assert inspect.getdoc(getattr(unsloth, name))
