"""The launcher of the multi_gemm kernel: tiles, load paths, and as few launches as the slots allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand
from anabranch._backends.triton.device import Gpu
from anabranch._backends.triton.operand import Operand, reach, tma_refusal
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.ragged import Tiles, dense
from anabranch.ops.multi_gemm import config as tiles
from anabranch.ops.multi_gemm.backends.triton.kernels import SLOTS, multi_gemm_kernel
from anabranch.ops.multi_gemm.config import MultiGemmConfig

Product = tuple[Tensor, Tensor, Tensor]
"""x (m, k), weight (n, k) and where the result goes (m, n): views with any strides."""
Operands = tuple[Operand, Operand, Operand]
"""What is known of a product's tensors."""
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def multi_gemm(products: Sequence[Product], config: MultiGemmConfig | None = None) -> None:
    """Writes ``x @ weight.T`` of every product."""
    if not products:
        return
    x = products[0][0]
    known = tuple((operand.of(x), operand.of(w), operand.of(y)) for x, w, y in products)
    for group in plan(on.gpu(x.device), on.input_precision(x.dtype), known, config):
        group.run([products[i] for i in group.members])


class Group(NamedTuple):
    """Products that share a launch: which they are. ``block_m`` is the rows of a tile."""

    members: Sequence[int]
    block_m: int
    launch: Launch

    def run(self, products: Sequence[Product]) -> None:
        """Launches them."""
        arguments: list[Any] = [None] * (3 * SLOTS)
        for i, tensors in enumerate(products):
            arguments[i::SLOTS] = tensors
        self.launch(*arguments)


@lru_cache(REMEMBERED)
def plan(
    gpu: Gpu, precision: str, products: tuple[Operands, ...], config: MultiGemmConfig | None
) -> list[Group]:
    """Which products are launched together, and how.

    No more than SLOTS share a launch, and all of one launch are loaded and stored in about the same way:
    tiles for what has to be loaded element by element would hold up the others. Empty results need none.
    """
    groups: dict[int, list[int]] = {}
    for i, (x, w, y) in enumerate(products):
        if 0 not in y.shape:
            # Stored from registers, the widest tiles of the result leave too few for its addresses.
            stores = tiles.TMA if tma_refusal(y, gpu.capability) is None else tiles.COPIED
            groups.setdefault(min(loads(x, gpu), loads(w, gpu), stores), []).append(i)
    return [
        _group(gpu, precision, members, [products[i] for i in members], worst, config)
        for worst, group in groups.items()
        for members in (group[i : i + SLOTS] for i in range(0, len(group), SLOTS))
    ]


def contiguous(value: Operand) -> int:
    """The dimension of an operand that is contiguous in memory, the reduction (1) if neither is."""
    return 1 if value.stride[1] == 1 or value.stride[0] != 1 else 0


def loads(value: Operand, gpu: Gpu) -> int:
    """How the tiles of an operand can be loaded."""
    inner = contiguous(value)
    if tma_refusal(value, gpu.capability, inner) is None:
        return tiles.TMA
    aligned = value.shift == 0 and value.stride[1 - inner] % 16 == 0 and value.shape[inner] % 16 == 0
    return tiles.COPIED if aligned and value.stride[inner] == 1 else tiles.ELEMENTWISE


def _tiles(value: Operand, how: int, block: int, block_k: int) -> Tiles | None:
    if how != tiles.TMA:
        return None
    return dense(value, [block, block_k]) if contiguous(value) == 1 else dense(value.mT, [block_k, block])


def _group(
    gpu: Gpu,
    precision: str,
    members: Sequence[int],
    products: Sequence[Operands],
    worst: int,
    config: MultiGemmConfig | None,
) -> Group:
    dtype = products[0][0].dtype
    shapes = [(y.shape[0], y.shape[1], x.shape[1]) for x, _, y in products]
    config = config or tiles.heuristic(
        shapes, dtype, gpu.shared_memory, gpu.num_sms, precision=precision, loads=worst
    )
    found: dict[int, Tiles | None] = {}  # by place among the tensors; None: pointers
    sizes, how = [], []
    for i, ((x, w, y), (_, n, k)) in enumerate(zip(products, shapes, strict=True)):
        how_x, how_w = loads(x, gpu), loads(w, gpu)
        y_tma = tma_refusal(y, gpu.capability) is None
        found[i] = _tiles(x, how_x, config.block_m, config.block_k)
        found[SLOTS + i] = _tiles(w, how_w, config.block_n, config.block_k)
        found[2 * SLOTS + i] = dense(y, [config.block_m, config.block_n]) if y_tma else None
        sizes += [n, k, *x.stride, *w.stride, *y.stride]
        offset = tl.int32 if max(reach(v) for v in (x, w, y)) <= gpu.int32_max else tl.int64
        how += [how_x, how_w, y_tma, contiguous(x) == 1, contiguous(w) == 1, offset]
    rows = [m for m, _, _ in shapes] + [0] * (SLOTS - len(products))
    total = sum(tiles.tiles(config, shapes))
    launch = Launch(
        gpu.device, multi_gemm_kernel, (min(gpu.num_sms, total),), *rows, tuple(sizes),
        COUNT=len(products), LOADS=tuple(how), PRECISION=precision, DTYPE=DTYPES[dtype],
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        FLATTEN=config.flatten, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return Group(members, config.block_m, launch.tiled(found))
