"""Launchers: tiles, load paths and descriptors of each kernel, decided once for all calls that look alike."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from anabranch._backends.hopper.descriptors import Tiles, dense, layout, ragged
from anabranch._backends.hopper.schedule import schedule
from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand
from anabranch._backends.triton.operand import Operand, tma_refusal
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.schedule import max_tiles
from anabranch.epilogues import Epilogue, Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.backends.triton.plan import device_code, parameters
from anabranch.ops.moe_mlp.backends.hopper import gate_gradient, product
from anabranch.ops.moe_mlp.backends.hopper import weight_gradient as dw

ROWS = 128
"""Rows of a tile: two warpgroups' halves."""
_IDENTITY = Identity()


class Config(NamedTuple):
    """How a product is cut and staged.

    Attributes:
        BN: columns of the accumulator, a gate and its up-projection together.
        BK: of the reduction, columns of a stage.
        STAGES: stages on their way or in use.
        EPI_N: columns that are stored at once.
        NBUF: buffers of each half that stores go through.
        GROUP_M: row tiles that share a column tile one after another.
        SKEW: stages by which the first half leads the second.
        LAG: stages that gathered rows are announced after; 0 lets the copies announce themselves.
    """

    BN: int = 256
    BK: int = 64
    STAGES: int = 4
    EPI_N: int = 64
    NBUF: int = 2
    GROUP_M: int = 16
    SKEW: int = 2
    LAG: int = 0


WIDE = Config()
NARROW = Config(BN=128, EPI_N=32, STAGES=6)
"""For results of few columns."""


class Rows(NamedTuple):
    """A layout as the kernels read it; products of one layout share it."""

    offsets: Tensor
    row_to_slot: Tensor
    table: Tensor
    num_rows: int
    num_slots: int
    top_k: int


def rows_of(experts: ExpertLayout) -> Rows:
    """The tiles of a layout's rows, listed on the device."""
    assert experts.offsets is not None
    offsets = experts.offsets.contiguous()
    table = schedule(offsets, experts.num_rows, ROWS)
    slots = experts.slot_to_row
    return Rows(
        offsets, experts.row_to_slot.contiguous(), table, experts.num_rows, slots.numel(), slots.shape[1]
    )


@lru_cache(REMEMBERED)
def refusal(
    capability: tuple[int, int], epilogue: Epilogue, rows: int, hidden: int, gate_up: Operand, down: Operand
) -> str | None:
    """Why the kernels cannot serve such operands, (E, N, K) views of the weights, or None if they can."""
    if device_code(epilogue) is None:
        return f"the epilogue {epilogue.name} has no device code ({epilogue.device_code})"
    inner = down.shape[2]
    if rows == 0 or hidden == 0 or inner == 0:
        return "there is nothing to multiply"
    for letter, size in (("H", hidden), ("I", inner)):
        if size % 8:
            return f"{letter} = {size} is not a multiple of 8, which rows of 16-byte units ask for"
    if rows >= 1 << 30:
        return "there are more rows than its tiles can count"
    for name, weight in (("gate_up", gate_up), ("down", down)):
        reason = tma_refusal(weight, capability, 2 if _k_major(weight) else 1)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def gatherable(x: Tensor) -> bool:
    """Whether rows can be copied 16 bytes at a time, in whole stages, with offsets in int32."""
    known = operand.of(x)
    aligned = tma_refusal(known, (9, 0)) is None and x.shape[1] % WIDE.BK == 0
    return aligned and operand.reach(known) <= on.INT32_MAX


def gemm(
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    out: Tensor,
    *,
    h: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = _IDENTITY,
    interleaved: bool = False,
    gathered: bool = False,
    config: Config | None = None,
) -> None:
    """Writes ``out[row] = epilogue(x[row] @ weight[expert].T + bias[expert])``, and the pre-activation to h.

    weight is an (E, N, K) view, contiguous along N or K. Rows of ``out`` without a slot are left alone, those of
    h become zeros. With ``gathered`` row r reads x at its token.
    """
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    known, maybe = operand.of, operand.maybe
    launch, t_x, t_w, t_out, t_h = _gemm(
        x.device, known(x), known(weight), known(out), maybe(h), maybe(bias), known(rows.offsets), rows.num_rows,
        rows.top_k, epilogue, interleaved, gathered, config,
    )  # fmt: skip
    h_tiles = up_tiles = None
    if h is not None:
        h_tiles = t_h.of(h)
        if epilogue.columns == 2 and not interleaved:
            up_tiles = t_h.of(h[:, out.shape[1] :])
    launch(
        x if t_x is None else t_x.of(x), t_w.of(weight), t_out.of(out), h_tiles, up_tiles,
        out if h is None else h, out if bias is None else bias, rows.row_to_slot, rows.table,
    )  # fmt: skip


@lru_cache(REMEMBERED)
def _gemm(
    device: torch.device, x: Operand, weight: Operand, out: Operand, h: Operand | None, bias: Operand | None,
    offsets: Operand, num_rows: int, top_k: int, epilogue: Epilogue, interleaved: bool, gathered: bool,
    config: Config | None,
) -> tuple[Launch, Tiles | None, Tiles, Tiles, Tiles]:  # fmt: skip
    """The launch, and the tiles of x, weight, out and (a gate's half of) h."""
    experts, n, k_dim = weight.shape
    columns = out.shape[1]
    split = epilogue.columns == 2 and not interleaved
    config = config or (WIDE if n > NARROW.BN else NARROW)
    if triton.cdiv(k_dim, config.BK) < config.STAGES:
        config = config._replace(SKEW=0)  # the second half could miss one of two starts
    width = config.BN // epilogue.columns
    if _k_major(weight) and split:
        halves = weight._replace(
            shape=(experts, 2, columns, k_dim),
            stride=(weight.stride[0], columns * weight.stride[1], *weight.stride[1:]),
        )
        t_w = dense(halves, [1, 2, width, config.BK])
    else:
        t_w = _weight_tiles(weight, width if split else config.BN, config.BN, config.BK)
    block = [64, config.EPI_N]
    t_out = ragged(out, block)
    t_h = t_out if h is None else ragged(h.columns(0, columns) if split else h, block)
    code = device_code(epilogue)
    assert code is not None
    launch = Launch(
        device, product.product_kernel, (on.num_sms(device),),
        x.stride[0], 0 if bias is None else bias.stride[0], max_tiles(num_rows, experts, ROWS), num_rows, columns,
        k_dim,
        A_LAYOUT=layout([64, config.BK]), TOP_K=top_k, EPILOGUE=code.forward, P=parameters(epilogue),
        GATED=epilogue.columns == 2, INTERLEAVED=interleaved, KEEP_H=h is not None, HAS_BIAS=bias is not None,
        GATHERED=gathered, K_MAJOR=_k_major(weight), **config._asdict(),
        WARPS=4 if gathered else 1, CONSUMER_REGISTERS=224 if gathered else 240,
        PRODUCER_REGISTERS=56 if gathered else 24, num_warps=4,
    )  # fmt: skip
    return launch, None if gathered else dense(x, [64, config.BK]), t_w, t_out, t_h


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

    weight is an (E, N, K) view, contiguous along N or K. d_h as h, a_out the scaled activation (R, N), d_scale
    (T, K) in fp32, zeros at dropped slots. Rows without a slot are left alone.
    """
    known, maybe = operand.of, operand.maybe
    launch, t_x, t_w, parts = _pre_activation_gradient(
        h.device, known(d_rows), known(weight), known(h), maybe(scale), known(rows.offsets), rows.num_rows,
        rows.num_slots, rows.top_k, epilogue, interleaved, d_h is not None, a_out is not None, d_scale is not None,
        config,
    )  # fmt: skip
    dots = rows.offsets
    if d_scale is not None:
        # By tile of columns, and summed in an order that does not depend on which is first.
        dots = d_scale.zero_() if parts == 1 else d_scale.new_zeros(parts, *d_scale.shape)
    launch(
        t_x.of(d_rows), t_w.of(weight), h, h if scale is None else scale, h if d_h is None else d_h,
        h if a_out is None else a_out, dots, rows.row_to_slot, rows.table,
    )  # fmt: skip
    if d_scale is not None and parts > 1:
        torch.sum(dots, 0, out=d_scale)


@lru_cache(REMEMBERED)
def _pre_activation_gradient(
    device: torch.device, d_rows: Operand, weight: Operand, h: Operand, scale: Operand | None, offsets: Operand,
    num_rows: int, num_slots: int, top_k: int, epilogue: Epilogue, interleaved: bool, need_h: bool, need_a: bool,
    need_dot: bool, config: Config | None,
) -> tuple[Launch, Tiles, Tiles, int]:  # fmt: skip
    """The launch, the tiles of d_rows and weight, and how many tiles of columns there are."""
    experts, columns, k_dim = weight.shape
    config = config or (WIDE._replace(STAGES=3) if columns > NARROW.BN else NARROW._replace(STAGES=5))
    code = device_code(epilogue)
    assert code is not None
    # What no gradient needs costs no product: only the activation is made again then.
    k_dim = k_dim if need_h or need_dot else 0
    launch = Launch(
        device, gate_gradient.gate_gradient_kernel, (on.num_sms(device),),
        h.stride[0], *((0, 0) if scale is None else scale.stride), num_slots, max_tiles(num_rows, experts, ROWS),
        columns, k_dim,
        EPILOGUE=code.backward, P=parameters(epilogue), GATED=epilogue.columns == 2, INTERLEAVED=interleaved,
        WEIGHTED=scale is not None, NEED_H=need_h, NEED_A=need_a, NEED_DOT=need_dot, TOP_K=top_k,
        K_MAJOR=_k_major(weight), BN=config.BN, BK=config.BK, STAGES=config.STAGES, GROUP_M=config.GROUP_M,
        PIECE_M=8, FINISHERS=2, CONSUMER_REGISTERS=160, FINISHER_REGISTERS=184, num_warps=4,
    )  # fmt: skip
    t_w = _weight_tiles(weight, config.BN, config.BN, config.BK)
    return launch, dense(d_rows, [64, config.BK]), t_w, triton.cdiv(columns, config.BN)


def weight_gradient(
    a: Tensor,
    b: Tensor,
    rows: Rows,
    d_weight: Tensor,
    *,
    a_gathered: bool = False,
    b_gathered: bool = False,
    config: Config | None = None,
) -> None:
    """Writes ``d_weight[expert] = a[rows].T @ b[rows]``, (E, M, N), zeros for an empty expert.

    Rows of a and b in expert order, or one's gathered from tokens, and then its width is a multiple of 256.
    """
    known = operand.of
    launch, t_a, t_b, t_w = _weight_gradient(
        a.device,
        known(a),
        known(b),
        known(d_weight),
        known(rows.offsets),
        rows.top_k,
        a_gathered,
        b_gathered,
        config,
    )
    launch(
        a if t_a is None else t_a.of(a), b if t_b is None else t_b.of(b), t_w.of(d_weight),
        rows.row_to_slot, rows.offsets,
    )  # fmt: skip


@lru_cache(REMEMBERED)
def _weight_gradient(
    device: torch.device, a: Operand, b: Operand, d_weight: Operand, offsets: Operand, top_k: int,
    a_gathered: bool, b_gathered: bool, config: Config | None,
) -> tuple[Launch, Tiles | None, Tiles | None, Tiles]:  # fmt: skip
    """The launch, and the tiles of a, b and d_weight."""
    experts, m, n = d_weight.shape
    config = config or (WIDE if n > NARROW.BN else NARROW)
    gathered = a_gathered or b_gathered
    blocks = [config.BK, 64], [config.BK, config.BN]
    a_layout, b_layout = (
        layout(block if how else [1, 1, *block])
        for how, block in zip((a_gathered, b_gathered), blocks, strict=True)
    )
    work = experts * triton.cdiv(m, ROWS) * triton.cdiv(n, config.BN)
    launch = Launch(
        device, dw.weight_gradient_kernel, (min(work, on.num_sms(device)),),
        a.stride[0], b.stride[0], experts, m, n,
        A_LAYOUT=a_layout, B_LAYOUT=b_layout, TOP_K=top_k, A_GATHERED=a_gathered, B_GATHERED=b_gathered,
        BN=config.BN, BK=config.BK, STAGES=config.STAGES, EPI_N=config.EPI_N, NBUF=config.NBUF,
        GROUP_M=config.GROUP_M, WARPS=4 if gathered else 1, CONSUMER_REGISTERS=216 if gathered else 240,
        PRODUCER_REGISTERS=72 if gathered else 24, num_warps=4,
    )  # fmt: skip
    t_a, t_b = (
        None if how else ragged(value, block)
        for value, how, block in zip((a, b), (a_gathered, b_gathered), blocks, strict=True)
    )
    return launch, t_a, t_b, dense(d_weight, [1, 64, config.EPI_N])


def _k_major(weight: Operand) -> bool:
    """Whether tiles of an (E, N, K) view are contiguous along K."""
    return weight.stride[2] == 1


def _weight_tiles(weight: Operand, rows_n: int, block_n: int, block_k: int) -> Tiles:
    """Of an (E, N, K) view: (BLOCK_N, BLOCK_K), or where N is contiguous (BLOCK_K, rows_n)."""
    if _k_major(weight):
        return dense(weight, [1, block_n, block_k])
    return dense(weight.mT, [1, block_k, rows_n])
