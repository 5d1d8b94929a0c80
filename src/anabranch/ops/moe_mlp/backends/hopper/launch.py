"""The launcher of the gate's gradient, decided once for all calls that look alike; the products are grouped_gemm's."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from anabranch._backends.hopper.descriptors import dense, layout, ragged
from anabranch._backends.hopper.serves import k_major, size_refusal, weight_refusal
from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand
from anabranch._backends.triton.fill import add_up, zero
from anabranch._backends.triton.operand import Operand
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.schedule import max_tiles
from anabranch.epilogues import Epilogue
from anabranch.ops.grouped_gemm.backends.hopper.config import GATE_GRADIENT, ROWS, Config
from anabranch.ops.grouped_gemm.backends.hopper.launch import Rows
from anabranch.ops.grouped_gemm.backends.hopper.plan import Maps, Plan, key_of, weight_tiles
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN
from anabranch.ops.grouped_gemm.backends.triton.plan import device_code, parameters
from anabranch.ops.moe_mlp.backends.hopper import gate_gradient, tuned
from anabranch.ops.moe_mlp.backends.hopper.tuned import H_STAGES, PIECE, GateGradient

DEEP = 4096
"""Columns of the output from which finishing warps read h by pointers: they have the time to wait for it then, and
shared memory is the product's alone."""


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
    gathered: bool = False,
    config: Config | None = None,
) -> None:
    """From the gradient of ``(scale *) epilogue(h) @ weight[expert].mT`` in row order, writes what is given.

    weight is an (E, N, K) view, contiguous along N or K. d_h as h, possibly h itself, a_out the scaled
    activation (R, N), d_scale (T, K) in fp32, zeros at dropped slots. Rows without a slot are left alone.
    With ``gathered`` d_rows lies in token order and row r reads its token; one without a slot reads zeros.
    """
    known, maybe = operand.of, operand.maybe
    found = _plan(
        h.device, known(d_rows), known(weight), known(h), maybe(scale), rows.maps, epilogue, interleaved,
        d_h is not None, a_out is not None, d_scale is not None, gathered,
    )  # fmt: skip

    def product() -> GateGradient:
        return GateGradient(
            plan=found, maps=(), x=d_rows, layout=rows.layout, x_rows=TOKEN if gathered else ROW, weight=weight, h=h,
            scale=scale, rows=rows, epilogue=epilogue, interleaved=interleaved, need_h=d_h is not None,
            need_a=a_out is not None, need_dot=d_scale is not None,
        )  # fmt: skip

    launch, parts = found.launch(config, h.device, product)
    dots = rows.offsets
    if d_scale is not None:
        # By tile of columns, and summed in an order that does not depend on which is first.
        dots = zero(d_scale if parts == 1 else d_scale.new_empty(parts, *d_scale.shape))
    launch(
        d_rows, weight, h, h if scale is None else scale, h if d_h is None else d_h,
        h if a_out is None else a_out, dots, rows.row_to_slot, rows.table,
    )  # fmt: skip
    if d_scale is not None and parts > 1:
        add_up(dots, d_scale)


@lru_cache(REMEMBERED)
def _plan(
    device: torch.device, d_rows: Operand, weight: Operand, h: Operand, scale: Operand | None, maps: Maps,
    epilogue: Epilogue, interleaved: bool, need_h: bool, need_a: bool, need_dot: bool, gathered: bool,
) -> Plan:  # fmt: skip
    """The plan of :func:`pre_activation_gradient`; a launch comes with how many tiles of columns it has."""
    experts, columns, k_dim = weight.shape
    code = device_code(epilogue)
    assert code is not None
    # What no gradient needs costs no product: only the activation is made again then.
    depth = k_dim if need_h or need_dot else 0
    gated, by_k = epilogue.columns == 2, k_major(weight)
    key = key_of(
        GATE_GRADIENT, h.dtype, weight.shape, maps.num_rows, gated=gated, interleaved=interleaved,
        weighted=scale is not None, n_major=not by_k, no_h=not need_h, no_a=not need_a, no_dot=not need_dot,
        gather=gathered,
    )  # fmt: skip

    @cache
    def prepare(config: Config) -> tuple[Launch, int]:
        # The second half could miss one of two starts.
        skew = config.skew if triton.cdiv(depth, config.block_k) >= config.num_stages else 0
        whole = columns % config.block_n == 0
        h_stages = 0 if depth >= DEEP and whole and not interleaved else H_STAGES
        rows = [64, config.block_k]
        t_x = None if gathered else ragged(d_rows, rows)
        a_layout = layout(rows) if t_x is None else t_x.layout
        launch = Launch(
            device, gate_gradient.gate_gradient_kernel, (on.num_sms(device),),
            d_rows.stride[0], h.stride[0], *((0, 0) if scale is None else scale.stride), maps.num_slots,
            max_tiles(maps.num_rows, experts, ROWS), columns, depth, A_LAYOUT=a_layout,
            EPILOGUE=code.backward, P=parameters(epilogue), GATED=gated, INTERLEAVED=interleaved,
            WEIGHTED=scale is not None, NEED_H=need_h, NEED_A=need_a, NEED_DOT=need_dot, TOP_K=maps.top_k,
            GATHERED=gathered, K_MAJOR=by_k, BN=config.block_n, BK=config.block_k, STAGES=config.num_stages,
            GROUP_M=config.group_m, STEADY=config.steady, SKEW=skew,
            WARPS=2 if gathered and not h_stages else 1, PIECE_M=PIECE, H_STAGES=h_stages, FINISHERS=2,
            CONSUMER_REGISTERS=160, FINISHER_REGISTERS=184, WHOLE_N=whole, num_warps=4,
        )  # fmt: skip
        t_w = weight_tiles(weight, config.block_n, config.block_k)
        launch.tiled({0: t_x, 1: t_w, 2: dense(h, [PIECE, config.block_n]) if h_stages else None})
        return launch, triton.cdiv(columns, config.block_n)

    return Plan(key, tuned.heuristic(columns, maps.num_rows // experts), prepare)
