"""The grouped GEMM with gradients: as a function, which is one operator, and as a torch.autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anabranch.epilogues import Identity
from anabranch.errors import ArgumentError
from anabranch.interop.unsloth import operands
from anabranch.interop.unsloth.config import (
    KernelConfig,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    given,
    tiles,
)
from anabranch.layout import ExpertLayout
from anabranch.ops import checks
from anabranch.ops.grouped_gemm import api, routed
from anabranch.ops.grouped_gemm.autograd import gradients
from anabranch.ops.grouped_gemm.call import GroupedGemmCall, bind_grouped_gemm
from anabranch.ops.grouped_gemm.routed import UNTOLD, Configs
from anabranch.ops.precision import autocasts, cast_like_matmul, without_autocast
from anabranch.ops.route.api import Unfilled
from anabranch.ops.wording import speaks_of
from anabranch.tuning import GroupedGemmConfig, GroupedGemmConfigs

OP = "grouped_gemm"
_BOOL = {bool}


@speaks_of(operands.WORDS)
def grouped_gemm(
    X: Tensor,
    W: Tensor,
    m_sizes: Tensor,
    topk: int,
    gather_indices: Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_fwd: KernelConfigForward | None = None,
    kernel_config_bwd_dX: KernelConfigBackward_dX | None = None,
    kernel_config_bwd_dW: KernelConfigBackward_dW | None = None,
    autotune: bool = False,
    is_first_gemm: bool = True,
    dX_only: bool = False,
    dW_only: bool = False,
) -> Tensor:
    """Multiplies each expert's rows by its weight, ``y[r] = W[e] X[r]``, with gradients.

    Args:
        X: (num_tokens, K) with ``permute_x``, else (total_tokens, K) sorted by expert; more dimensions before K are
            flattened.
        W: (E, N, K) or (E * N, K), X's dtype; its gradient has the same shape.
        m_sizes: (E,) rows of each expert, integers of any width, on X's device.
        topk: experts per token; total_tokens = num_tokens * topk.
        gather_indices: (total_tokens,) slots in expert order, any integers; needed only to permute, else only
            its size is checked.
        permute_x: row r reads the token of its slot.
        permute_y: y is in slot order.
        topk_weights: total_tokens factors in slot order, for ``fuse_mul_post``.
        fuse_mul_post: multiplies y by ``topk_weights`` before it is rounded; needs ``permute_y``. Its gradients reach
            topk_weights too.
        kernel_config_fwd: tiles of the forward; None lets anabranch choose. So do CPU tensors.
        kernel_config_bwd_dX: those of X's gradient.
        kernel_config_bwd_dW: those of W's.
        autotune: anabranch chooses, whatever configurations are given, which are then not checked.
        is_first_gemm: of an MLP's two products, which ``permute_x`` goes with; ``permute_y`` goes with the second.
        dX_only: no gradient of W.
        dW_only: no gradient of X.

    Returns:
        (total_tokens, N), in expert order, or in slot order with ``permute_y``.
    """
    flags = permute_x, permute_y, fuse_mul_post, autotune, is_first_gemm, dX_only, dW_only
    asked = kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW
    tensors = X, W, m_sizes, gather_indices, topk_weights if fuse_mul_post is True else None
    configs = UNTOLD
    # A configuration may be changed from call to call; and what is none may be equal to anything.
    plain = kernel_config_fwd is None and kernel_config_bwd_dX is None and kernel_config_bwd_dW is None
    passed = _known(tensors, topk, flags) if plain else None
    if not passed:
        configs = _check(*tensors, topk, *flags, asked)
        if passed is not None:
            passed.append(True)
    x, weight, counts, slots, scale = operands.views(*tensors, topk)
    if dX_only:
        weight = weight.detach()
    if dW_only:
        x = x.detach()
    if autocasts(x.device):
        x, weight = cast_like_matmul(x, weight)
    return routed.grouped_gemm(
        x,
        weight,
        counts,
        slots if permute_x or permute_y else None,
        topk,
        gather=permute_x,
        scatter=permute_y,
        scale=scale,
        configs=configs,
    )


def _known(tensors: tuple[Any, ...], topk: Any, flags: tuple[Any, ...]) -> list[bool] | None:
    """See :func:`anabranch.ops.checks.known`; None for what has to be checked every time."""
    facts = checks.facts(*tensors)
    # True and 1 look alike to what remembers.
    if facts is None or tensors[0] is None or type(topk) is not int or {*map(type, flags)} != _BOOL:
        return None
    device = tensors[0].device
    cast = autocasts(device) and torch.get_autocast_dtype(device.type)
    return checks.known("unsloth.grouped_gemm", facts, cast, topk, flags)


def _check(
    X: Tensor,
    W: Tensor,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    topk_weights: Tensor | None,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    fuse_mul_post: bool,
    autotune: bool,
    is_first_gemm: bool,
    dX_only: bool,
    dW_only: bool,
    asked: tuple[Any, Any, Any],
) -> Configs:
    """Raises what the arguments of grouped_gemm are refused for. Returns the three configurations in our terms."""
    checks.flag(
        OP,
        permute_x=permute_x,
        permute_y=permute_y,
        fuse_mul_post=fuse_mul_post,
        autotune=autotune,
        is_first_gemm=is_first_gemm,
        dX_only=dX_only,
        dW_only=dW_only,
    )
    if not autotune:
        fwd, bwd_dX, bwd_dW = asked
        rules = (permute_x, permute_y, fuse_mul_post, is_first_gemm)
        given(OP, "kernel_config_fwd", fwd, KernelConfigForward).check(*rules)
        # Those of gradients are refused for what they wish alone.
        if bwd_dW is not None and not dX_only:
            given(OP, "kernel_config_bwd_dW", bwd_dW, KernelConfigBackward_dW).check(*rules)
        if bwd_dX is not None and not dW_only:
            given(OP, "kernel_config_bwd_dX", bwd_dX, KernelConfigBackward_dX).check(*rules)
    _only_one(dX_only, dW_only)
    options = gather_indices, permute_x, permute_y, topk_weights, fuse_mul_post
    call = operands.product(OP, X, W, m_sizes, topk, *options, layouts=Unfilled)
    if not autotune:
        call["config"] = _configs(call["x"], *asked, dX_only, dW_only)
    bound = bind_grouped_gemm(**call)
    return bound.config, bound.d_x_config, bound.d_weight_config


def _configs(
    x: Tensor,
    kernel_config_fwd: KernelConfigForward | None,
    kernel_config_bwd_dX: KernelConfigBackward_dX | None,
    kernel_config_bwd_dW: KernelConfigBackward_dW | None,
    dX_only: bool,
    dW_only: bool,
) -> GroupedGemmConfigs:
    """The three in our terms; None for a gradient that is not wanted."""

    def chosen(argument: str, config: Any, cls: type[KernelConfig]) -> GroupedGemmConfig | None:
        return None if config is None else tiles(OP, argument, given(OP, argument, config, cls), x)

    return GroupedGemmConfigs(
        chosen("kernel_config_fwd", kernel_config_fwd, KernelConfigForward),
        None if dW_only else chosen("kernel_config_bwd_dX", kernel_config_bwd_dX, KernelConfigBackward_dX),
        None if dX_only else chosen("kernel_config_bwd_dW", kernel_config_bwd_dW, KernelConfigBackward_dW),
    )


def _only_one(dX_only: bool, dW_only: bool) -> None:
    if dX_only and dW_only:
        raise ArgumentError(OP, "dW_only", expected="False beside dX_only", got="True")


class GroupedGemm(torch.autograd.Function):
    """:func:`grouped_gemm` without its rules, by position: ``GroupedGemm.apply(X, W, m_sizes, topk, ...)``."""

    @staticmethod
    @speaks_of(operands.WORDS, OP)
    def forward(
        ctx: Any,
        X: Tensor,
        W: Tensor,
        m_sizes: Tensor,
        topk: int,
        gather_indices: Tensor | None,
        permute_x: bool,
        permute_y: bool,
        topk_weights: Tensor | None,
        fuse_mul_post: bool,
        kernel_config_fwd: KernelConfigForward | None = None,
        kernel_config_bwd_dX: KernelConfigBackward_dX | None = None,
        kernel_config_bwd_dW: KernelConfigBackward_dW | None = None,
        autotune: bool = False,
        dX_only: bool = False,
        dW_only: bool = False,
    ) -> Tensor:
        checks.flag(OP, autotune=autotune, dX_only=dX_only, dW_only=dW_only)
        _only_one(dX_only, dW_only)
        call = operands.product(
            OP, X, W, m_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, fuse_mul_post
        )
        configs = GroupedGemmConfigs()
        if not autotune:
            asked = kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW
            configs = call["config"] = _configs(call["x"], *asked, dX_only, dW_only)
        # As matmul's operands are cast; autograd casts their gradients back.
        call["x"], call["weight"] = cast_like_matmul(call["x"], call["weight"])
        layout = call["layout"]
        ctx.save_for_backward(
            call["x"],
            call["weight"],
            call["scale"],
            layout.counts,
            layout.offsets,
            layout.row_to_slot,
            layout.slot_to_row,
        )
        ctx.options = {"gather": permute_x, "scatter": permute_y}
        ctx.options |= {"d_x_config": configs.d_x, "d_weight_config": configs.d_weight}
        ctx.wanted = not dW_only, not dX_only
        ctx.shapes = X.shape, W.shape, None, None if topk_weights is None else topk_weights.shape
        return api.grouped_gemm(**call)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, *fields = ctx.saved_tensors
        # The forward has checked these, and the trace of a backward allows no look at strides or layouts.
        call = GroupedGemmCall(
            x,
            weight,
            ExpertLayout(*fields),
            bias=None,
            scale=scale,
            epilogue=Identity(),
            transpose_weight=False,
            **ctx.options,
        )
        needs_X, needs_W, needs_weights = (ctx.needs_input_grad[i] for i in (0, 1, 7))
        needs = (needs_X and ctx.wanted[0], needs_W and ctx.wanted[1], False, needs_weights)
        with without_autocast(x.device):
            found = gradients(call, dY, needs)
        d_X, d_W, _, d_weights = (
            None if grad is None else grad.reshape(shape)
            for grad, shape in zip(found, ctx.shapes, strict=True)
        )
        return d_X, d_W, None, None, None, None, None, d_weights, *[None] * 7
