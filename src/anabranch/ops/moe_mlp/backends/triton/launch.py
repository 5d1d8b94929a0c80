"""Launchers of moe_mlp's backward kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch._backends.triton import device as on
from anabranch._backends.triton.ragged import ragged
from anabranch._backends.triton.schedule import max_tiles, schedule
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.backends.triton.launch import device_code, parameters
from anabranch.ops.moe_mlp.backends.triton import kernels
from anabranch.ops.moe_mlp.call import MoeMlpCall


def activation_gradient(
    call: MoeMlpCall, grad: Tensor, h: Tensor, need_d_h: bool, need_a: bool, need_weights: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(d_h (R, 2 I), weighted a (R, I), partial sums of the routing weights' gradient (tiles, R) fp32), empty where not needed."""
    layout = call.layout
    assert layout is not None
    assert layout.offsets is not None
    weight = call.down_nk.mT
    experts, inner, hidden = weight.shape
    rows = layout.num_rows
    gated = call.epilogue.columns == 2
    limit = on.shared_memory_limit(call.device)
    config = tiles.heuristic_activation_gradient(rows / experts, call.dtype, limit)
    k_major = weight.stride(2) == 1 or weight.stride(1) != 1
    w_arg: Any = weight
    w_tma = on.tma_refusal(weight if k_major else weight.mT) is None
    if w_tma:
        source = weight if k_major else weight.mT
        block = [config.block_n, config.block_k] if k_major else [config.block_k, config.block_n]
        w_arg = TensorDescriptor(source, list(source.shape), list(source.stride()), [1, *block])
    parts = triton.cdiv(inner, config.block_n)
    d_h = h.new_empty(h.shape if need_d_h else (0,))
    a = h.new_empty((rows, inner) if need_a else (0,))
    partial = torch.empty(parts, rows, dtype=torch.float32, device=h.device) if need_weights else None
    split = gated and call.gate_layout == "concatenated"
    pieces = [*_halves(h, split), *_halves(d_h, split and need_d_h), a]
    h_tma = all(on.tma_refusal(piece) is None for piece in pieces if piece.numel())
    quarter = config.block_n // 4
    descriptors: list[Any] = [None] * 5
    if h_tma:
        wide = quarter if split or not gated else 2 * quarter
        widths = (wide, wide, wide, wide, quarter)
        for i, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
            descriptors[i] = ragged(piece, [config.block_m, width]) if piece.numel() else None
    table = schedule(layout.offsets, rows, config.block_m)
    size = max_tiles(rows, experts, config.block_m)
    on_output = call.weight_on == "output"
    code = device_code(call.epilogue)
    assert code is not None
    with on.current(call.device):
        kernels.activation_gradient_kernel[(min(on.num_sms(call.device), max(1, size * parts)),)](
            grad, w_arg, h, call.expert_weights, d_h, a, *descriptors, partial, layout.offsets, layout.row_to_slot, table,
            size, rows, layout.top_k, inner, hidden, *grad.stride(), *weight.stride(), h.stride(0),
            *call.expert_weights.stride(),
            EPILOGUE=code.backward, P=parameters(call.epilogue), GATED=gated,
            INTERLEAVED=call.gate_layout == "interleaved", WEIGHTED=on_output, NEED_D_H=need_d_h, NEED_A=need_a,
            NEED_WEIGHTS=need_weights, W_TMA=w_tma, H_TMA=h_tma, K_MAJOR=k_major, EVEN_K=hidden % config.block_k == 0,
            PRECISION=on.input_precision(call.dtype), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, GROUP_M=config.group_m,
            OFFSET=tl.int32 if on.fits_int32(grad, weight[:1], h, call.expert_weights) else tl.int64,
            FLATTEN=config.flatten, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return d_h, a, partial


def _halves(value: Tensor, split: bool) -> tuple[Tensor, Tensor]:
    """Gate and up columns, or the whole and nothing."""
    if not split:
        return value, value[:0]
    middle = value.shape[1] // 2
    return value[:, :middle], value[:, middle:]


def routing_weight_gradient(call: MoeMlpCall, grad: Tensor, partial: Tensor, d_weights: Tensor) -> None:
    """Writes (T, K): each slot's partial sums added up, and ``<grad[token], down_bias[expert]>`` where there is a bias."""
    layout = call.layout
    assert layout is not None
    if d_weights.numel() == 0:
        return
    bias = call.down_bias
    with on.current(call.device):
        kernels.routing_weight_gradient_kernel[(triton.cdiv(d_weights.numel(), 32),)](
            partial, layout.slot_to_row, layout.offsets, grad, bias, d_weights, d_weights.numel(), layout.num_rows,
            partial.shape[0], layout.top_k, call.x.shape[1], call.down.shape[0], *grad.stride(),
            *((0, 0) if bias is None else bias.stride()), HAS_BIAS=bias is not None,
            EXPERTS=triton.next_power_of_2(call.down.shape[0]), BLOCK_S=32, BLOCK_H=64, num_warps=4,
        )  # fmt: skip
