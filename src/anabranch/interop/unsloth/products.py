"""The products of the grouped GEMM one by one, with tiles as arguments: forward, gradient of X, gradient of W."""

from __future__ import annotations

from torch import Tensor

from anabranch.interop.unsloth import operands
from anabranch.interop.unsloth.config import (
    KernelConfig,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    tiles,
)
from anabranch.ops import checks
from anabranch.ops.grouped_gemm import api
from anabranch.ops.wording import speaks_of
from anabranch.tuning import GroupedGemmConfig, GroupedGemmConfigs

_DX_WORDS = {**operands.WORDS, "x": "dY", "gather": "permute_y", "scatter": "permute_x", "K_dim": "N"}


@speaks_of(operands.WORDS)
def grouped_gemm_forward(
    X: Tensor,
    W: Tensor,
    topk: int,
    m_sizes: Tensor,
    gather_indices: Tensor | None = None,
    topk_weights: Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    fuse_mul_post: bool = False,
    autotune: bool = False,
    BLOCK_SIZE_M: int = 32,
    BLOCK_SIZE_N: int = 32,
    BLOCK_SIZE_K: int = 32,
    num_warps: int = 4,
    num_stages: int = 2,
    use_tma_load_w: bool = False,
    use_tma_load_x: bool = False,
    use_tma_store: bool = False,
    flatten: bool = True,
    debug: bool = False,
) -> Tensor:
    """The product of :func:`grouped_gemm`, with tiles one by one unless ``autotune``. ``debug`` does nothing."""
    op = "grouped_gemm_forward"
    checks.flag(op, autotune=autotune)
    call = operands.product(
        op, X, W, m_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, fuse_mul_post
    )
    tiling = BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten
    wanted = KernelConfigForward(
        *tiling, use_tma_store=use_tma_store, use_tma_load_w=use_tma_load_w, use_tma_load_x=use_tma_load_x
    )
    config = None if autotune else _tiles(op, wanted, call["x"], permute_x, permute_y)
    return api.grouped_gemm(**call, config=config)


@speaks_of(_DX_WORDS)
def grouped_gemm_dX(  # noqa: N802 - the interface's name
    dY: Tensor,
    W: Tensor,
    gather_indices: Tensor | None,
    m_sizes: Tensor,
    topk: int,
    BLOCK_SIZE_M: int = 32,
    BLOCK_SIZE_N: int = 32,
    BLOCK_SIZE_K: int = 32,
    debug: bool = False,
    permute_x: bool = False,
    permute_y: bool = False,
    use_tma_load_w: bool = False,
    use_tma_load_dy: bool = False,
    use_tma_store: bool = False,
    num_warps: int = 4,
    num_stages: int = 2,
    flatten: bool = True,
    fuse_mul_pre: bool = False,
    fuse_mul_post: bool = False,
    autotune: bool = False,
) -> Tensor:
    """The gradient of X's rows, (total_tokens, K): in slot order with ``permute_x``, and not yet summed over topk.

    dY is in slot order with ``permute_y``. The rest as in :func:`grouped_gemm_forward`; ``fuse_mul_*`` raise, for no
    routing weights are given.
    """
    op = "grouped_gemm_dX"
    checks.flag(op, autotune=autotune, permute_x=permute_x, permute_y=permute_y)
    operands.unweighted(op, fuse_mul_pre=fuse_mul_pre, fuse_mul_post=fuse_mul_post)
    checks.integer(op, "topk", topk, minimum=1)
    d_y = operands.rows(op, "dY", dY)
    # With one choice a token, a slot is a row of its own in token order.
    layout = operands.layout_of(op, d_y.shape[0], m_sizes, gather_indices, 1, permute_x, permute_y)
    tiling = BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten
    wanted = KernelConfigBackward_dX(
        *tiling, use_tma_store=use_tma_store, use_tma_load_dy=use_tma_load_dy, use_tma_load_w=use_tma_load_w
    )
    config = None if autotune else _tiles(op, wanted, d_y, permute_x, permute_y)
    weight = operands.stacked(op, W, layout)
    operands.check_columns(op, "dY", d_y, "total_tokens", W, weight, axis=1)
    return api.grouped_gemm(
        d_y, weight, layout, gather=permute_y, scatter=permute_x, transpose_weight=True, config=config
    )


@speaks_of(operands.WORDS)
def grouped_gemm_dW(  # noqa: N802 - the interface's name
    X: Tensor,
    dY: Tensor,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    topk: int,
    BLOCK_SIZE_M: int = 32,
    BLOCK_SIZE_N: int = 32,
    BLOCK_SIZE_K: int = 32,
    permute_x: bool = False,
    permute_y: bool = False,
    use_tma_load_dy: bool = False,
    use_tma_load_x: bool = False,
    use_tma_store: bool = False,
    fuse_mul_pre: bool = False,
    fuse_mul_post: bool = False,
    num_warps: int = 4,
    num_stages: int = 2,
    flatten: bool = True,
    autotune: bool = False,
    debug: bool = False,
) -> Tensor:
    """The gradient of W, always (E, N, K), from X and dY as the forward had them. The rest as in the other two."""
    op = "grouped_gemm_dW"
    checks.flag(op, autotune=autotune)
    operands.unweighted(op, fuse_mul_pre=fuse_mul_pre, fuse_mul_post=fuse_mul_post)
    d_y = operands.rows(op, "dY", dY)
    x, layout = operands.routed(op, X, m_sizes, topk, gather_indices, permute_x, permute_y)
    tiling = BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten
    wanted = KernelConfigBackward_dW(
        *tiling, use_tma_store=use_tma_store, use_tma_load_dy=use_tma_load_dy, use_tma_load_x=use_tma_load_x
    )
    config = None if autotune else _tiles(op, wanted, x, permute_x, permute_y)
    # Of the weight only its shape is used.
    assert layout.num_experts is not None
    weight = x.new_empty(()).expand(layout.num_experts, d_y.shape[1], x.shape[1])
    _, d_weight, _, _ = api.grouped_gemm_gradients(
        d_y,
        x,
        weight,
        layout,
        (False, True, False, False),
        gather=permute_x,
        scatter=permute_y,
        config=GroupedGemmConfigs(d_weight=config),
    )
    assert d_weight is not None
    return d_weight


def _tiles(
    op: str, wanted: KernelConfig, x: Tensor, permute_x: bool, permute_y: bool
) -> GroupedGemmConfig | None:
    """The tiles to run with. Nothing says which product of an MLP this is; the permutation tells."""
    wanted.check(permute_x, permute_y, fuse_mul_post=False, is_first_gemm=not permute_y)
    return tiles(op, "tiles", wanted, x)
