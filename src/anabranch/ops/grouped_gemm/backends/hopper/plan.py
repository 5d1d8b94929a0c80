"""What is decided of a product before it is launched, once for all calls that look alike."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from anabranch._backends.hopper.descriptors import Tiles, dense, layout, ragged
from anabranch._backends.hopper.serves import k_major, size_refusal, weight_refusal
from anabranch._backends.triton import device as on
from anabranch._backends.triton.operand import Operand, tma_refusal
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.schedule import max_tiles
from anabranch.epilogues import Epilogue
from anabranch.ops.grouped_gemm.backends.hopper import product
from anabranch.ops.grouped_gemm.backends.hopper import weight_gradient as dw
from anabranch.ops.grouped_gemm.backends.triton.plan import device_code, parameters

ROWS = 128
"""Rows of a tile: two warpgroups' halves."""


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


class Maps(NamedTuple):
    """What of a layout decides on launches."""

    offsets: Operand
    row_to_slot: Operand
    num_rows: int
    num_slots: int
    top_k: int


@lru_cache(REMEMBERED)
def refusal(
    capability: tuple[int, int], epilogue: Epilogue, x: Operand | None, weight: Operand, maps: Maps
) -> str | None:
    """Why the kernels cannot serve such operands, an (E, N, K) view of the weight among them, or None if they can.

    ``x`` is None where its rows are gathered.
    """
    if device_code(epilogue) is None:
        return f"the epilogue {epilogue.name} has no device code ({epilogue.device_code})"
    _, n, k_dim = weight.shape
    columns = epilogue.columns
    reason = size_refusal(**{"N" if columns == 1 else f"N / {columns}": n // columns, "K_dim": k_dim})
    if reason is not None:
        return reason
    if maps.num_slots == 0:
        return "there is nothing to multiply"
    if maps.offsets.dtype != torch.int32 or maps.row_to_slot.dtype != torch.int32:
        return "the layout's maps are not of int32"
    reason = None if x is None else tma_refusal(x, capability)
    return weight_refusal("weight", weight, capability) if reason is None else f"x: {reason}"


@lru_cache(REMEMBERED)
def of_gemm(
    device: torch.device, x: Operand, weight: Operand, out: Operand, h: Operand | None, bias: Operand | None,
    maps: Maps, epilogue: Epilogue, interleaved: bool, gathered: bool, config: Config | None,
) -> Launch:  # fmt: skip
    """What launch.gemm launches."""
    experts, n, k_dim = weight.shape
    columns = out.shape[1]
    split = epilogue.columns == 2 and not interleaved
    config = config or (WIDE if n > NARROW.BN else NARROW)
    if triton.cdiv(k_dim, config.BK) < config.STAGES:
        config = config._replace(SKEW=0)  # the second half could miss one of two starts
    width = config.BN // epilogue.columns
    if k_major(weight) and split:
        halves = weight._replace(
            shape=(experts, 2, columns, k_dim),
            stride=(weight.stride[0], columns * weight.stride[1], *weight.stride[1:]),
        )
        t_w = dense(halves, [1, 2, width, config.BK])
    else:
        t_w = weight_tiles(weight, width if split else config.BN, config.BN, config.BK)
    block = [64, config.EPI_N]
    t_out = ragged(out, block)
    t_h = None if h is None else ragged(h.columns(0, columns) if split else h, block)
    code = device_code(epilogue)
    assert code is not None
    launch = Launch(
        device, product.product_kernel, (on.num_sms(device),),
        x.stride[0], 0 if bias is None else bias.stride[0], max_tiles(maps.num_rows, experts, ROWS),
        maps.num_rows, maps.num_slots, columns, k_dim,
        A_LAYOUT=layout([64, config.BK]), TOP_K=maps.top_k, EPILOGUE=code.forward, P=parameters(epilogue),
        GATED=epilogue.columns == 2, INTERLEAVED=interleaved, KEEP_H=h is not None, HAS_BIAS=bias is not None,
        GATHERED=gathered, K_MAJOR=k_major(weight), **config._asdict(),
        WARPS=4 if gathered else 1, CONSUMER_REGISTERS=224 if gathered else 240,
        PRODUCER_REGISTERS=56 if gathered else 24, num_warps=4,
    )  # fmt: skip
    return launch.tiled(
        {
            0: None if gathered else dense(x, [64, config.BK]),
            1: t_w,
            2: t_out,
            3: t_h,
            4: t_h if split else None,
        }
    )


@lru_cache(REMEMBERED)
def of_weight_gradient(
    device: torch.device, a: Operand, b: Operand, d_weight: Operand, maps: Maps, a_gathered: bool, b_gathered: bool,
    config: Config | None,
) -> Launch:  # fmt: skip
    """What launch.weight_gradient launches."""
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
        a.stride[0], b.stride[0], experts, maps.num_rows, maps.num_slots, m, n,
        A_LAYOUT=a_layout, B_LAYOUT=b_layout, TOP_K=maps.top_k, A_GATHERED=a_gathered, B_GATHERED=b_gathered,
        BN=config.BN, BK=config.BK, STAGES=config.STAGES, EPI_N=config.EPI_N, NBUF=config.NBUF,
        GROUP_M=config.GROUP_M, WARPS=4 if gathered else 1, CONSUMER_REGISTERS=216 if gathered else 240,
        PRODUCER_REGISTERS=72 if gathered else 24, num_warps=4,
    )  # fmt: skip
    t_a, t_b = (
        None if how else ragged(value, block)
        for value, how, block in zip((a, b), (a_gathered, b_gathered), blocks, strict=True)
    )
    return launch.tiled({0: t_a, 1: t_b, 2: dense(d_weight, [1, 64, config.EPI_N])})


def weight_tiles(weight: Operand, rows_n: int, block_n: int, block_k: int) -> Tiles:
    """Of an (E, N, K) view: (BLOCK_N, BLOCK_K), or where N is contiguous (BLOCK_K, rows_n)."""
    if k_major(weight):
        return dense(weight, [1, block_n, block_k])
    return dense(weight.mT, [1, block_k, rows_n])
