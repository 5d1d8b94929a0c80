"""The launcher of the gate's gradient, decided once for all calls that look alike; the products are grouped_gemm's."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from anabranch._backends.hopper.descriptors import dense
from anabranch._backends.hopper.serves import k_major, size_refusal, weight_refusal
from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.schedule import max_tiles
from anabranch.epilogues import Epilogue
from anabranch.ops.grouped_gemm.backends.hopper.launch import Rows
from anabranch.ops.grouped_gemm.backends.hopper.plan import NARROW, ROWS, WIDE, Config, Maps, weight_tiles
from anabranch.ops.grouped_gemm.backends.triton.plan import device_code, parameters
from anabranch.ops.moe_mlp.backends.hopper import gate_gradient

PIECE = 8
"""Rows that are finished at once: as many as a block of shared memory has, whose addresses are swizzled."""
FULL = WIDE._replace(STAGES=3, SKEW=1)
FEW = NARROW._replace(STAGES=5, SKEW=0)
"""For few columns. Beside the stages, shared memory holds a tile and PIECE rows of the pre-activation twice."""


@lru_cache(REMEMBERED)
def refusal(
    capability: tuple[int, int], epilogue: Epilogue, hidden: int, gate_up: Operand, down: Operand
) -> str | None:
    """Why the kernels cannot serve such operands, (E, N, K) views of the weights, or None if they can."""
    if device_code(epilogue) is None:
        return f"the epilogue {epilogue.name} has no device code ({epilogue.device_code})"
    return (
        size_refusal(H=hidden, I=down.shape[2])
        or weight_refusal("gate_up", gate_up, capability)
        or weight_refusal("down", down, capability)
    )


def pre_activation_gradient(
    d_rows: Tensor,
    weight: Tensor,
    h: Tensor,
    scale: Tensor | None,
    rows: Rows,
    epilogue: Epilogue,
    *,
    interleaved: bool = False,
    d_h: Tensor | None = None,
    a_out: Tensor | None = None,
    d_scale: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """From the gradient of ``(scale *) epilogue(h) @ weight[expert].mT`` in row order, writes what is given.

    weight is an (E, N, K) view, contiguous along N or K. d_h as h, possibly h itself, a_out the scaled
    activation (R, N), d_scale (T, K) in fp32, zeros at dropped slots. Rows without a slot are left alone.
    """
    known, maybe = operand.of, operand.maybe
    launch, parts = _pre_activation_gradient(
        h.device, known(d_rows), known(weight), known(h), maybe(scale), rows.maps, epilogue, interleaved,
        d_h is not None, a_out is not None, d_scale is not None, config,
    )  # fmt: skip
    dots = rows.offsets
    if d_scale is not None:
        # By tile of columns, and summed in an order that does not depend on which is first.
        dots = d_scale.zero_() if parts == 1 else d_scale.new_zeros(parts, *d_scale.shape)
    launch(
        d_rows, weight, h, h if scale is None else scale, h if d_h is None else d_h,
        h if a_out is None else a_out, dots, rows.row_to_slot, rows.table,
    )  # fmt: skip
    if d_scale is not None and parts > 1:
        torch.sum(dots, 0, out=d_scale)


@lru_cache(REMEMBERED)
def _pre_activation_gradient(
    device: torch.device, d_rows: Operand, weight: Operand, h: Operand, scale: Operand | None, maps: Maps,
    epilogue: Epilogue, interleaved: bool, need_h: bool, need_a: bool, need_dot: bool, config: Config | None,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch, and how many tiles of columns there are."""
    experts, columns, k_dim = weight.shape
    config = config or (FULL if columns > NARROW.BN else FEW)
    code = device_code(epilogue)
    assert code is not None
    # What no gradient needs costs no product: only the activation is made again then.
    k_dim = k_dim if need_h or need_dot else 0
    if triton.cdiv(k_dim, config.BK) < config.STAGES:
        config = config._replace(SKEW=0)  # the second half could miss one of two starts
    launch = Launch(
        device, gate_gradient.gate_gradient_kernel, (on.num_sms(device),),
        h.stride[0], *((0, 0) if scale is None else scale.stride), maps.num_slots,
        max_tiles(maps.num_rows, experts, ROWS), columns, k_dim,
        EPILOGUE=code.backward, P=parameters(epilogue), GATED=epilogue.columns == 2, INTERLEAVED=interleaved,
        WEIGHTED=scale is not None, NEED_H=need_h, NEED_A=need_a, NEED_DOT=need_dot, TOP_K=maps.top_k,
        K_MAJOR=k_major(weight), BN=config.BN, BK=config.BK, STAGES=config.STAGES, GROUP_M=config.GROUP_M,
        PIECE_M=PIECE, FINISHERS=2, CONSUMER_REGISTERS=160, FINISHER_REGISTERS=184, SLOTS=2, SKEW=config.SKEW,
        WHOLE_N=columns % config.BN == 0, num_warps=4,
    )  # fmt: skip
    t_w = weight_tiles(weight, config.BN, config.BN, config.BK)
    launch.tiled({0: dense(d_rows, [64, config.BK]), 1: t_w, 2: dense(h, [PIECE, config.BN])})
    return launch, triton.cdiv(columns, config.BN)
