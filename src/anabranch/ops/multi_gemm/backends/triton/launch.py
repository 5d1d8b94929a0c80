"""The launcher of the multi_gemm kernel: tiles, load paths, and as few launches as the slots allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch._backends.triton import device as on
from anabranch.ops.multi_gemm import config as tiles
from anabranch.ops.multi_gemm.backends.triton.kernels import SLOTS, multi_gemm_kernel
from anabranch.ops.multi_gemm.config import MultiGemmConfig

Product = tuple[Tensor, Tensor, Tensor]
"""x (m, k), weight (n, k) and where the result goes (m, n): views with any strides."""
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def multi_gemm(products: Sequence[Product], config: MultiGemmConfig | None = None) -> None:
    """Writes ``x @ weight.T`` of every product.

    No more than SLOTS share a launch, and all of one launch are loaded and stored in about the same way:
    tiles for what has to be loaded element by element would hold up the others. Empty results need none.
    """
    groups: dict[int, list[Product]] = {}
    for x, w, y in products:
        if y.numel():
            # Stored from registers, the widest tiles of the result leave too few for its addresses.
            stores = tiles.TMA if on.tma_refusal(y) is None else tiles.COPIED
            groups.setdefault(min(loads(x), loads(w), stores), []).append((x, w, y))
    for how, group in groups.items():
        for start in range(0, len(group), SLOTS):
            _launch(group[start : start + SLOTS], how, config)


def _contiguous(value: Tensor) -> int:
    """The dimension of an operand that is contiguous in memory, the reduction (1) if neither is."""
    return 1 if value.stride(1) == 1 or value.stride(0) != 1 else 0


def loads(value: Tensor) -> int:
    """How the tiles of an operand can be loaded."""
    inner = _contiguous(value)
    if on.tma_refusal(value, inner) is None:
        return tiles.TMA
    aligned = (
        value.data_ptr() % 16 == 0 and value.stride(1 - inner) % 16 == 0 and value.shape[inner] % 16 == 0
    )
    return tiles.COPIED if aligned and value.stride(inner) == 1 else tiles.ELEMENTWISE


def _argument(value: Tensor, how: int, block: int, block_k: int) -> Any:
    if how != tiles.TMA:
        return value
    inner = _contiguous(value)
    source, tile = (value, [block, block_k]) if inner == 1 else (value.mT, [block_k, block])
    return TensorDescriptor(source, list(source.shape), list(source.stride()), tile)


def _launch(products: Sequence[Product], worst: int, config: MultiGemmConfig | None) -> None:
    x = products[0][0]
    device, dtype, precision = x.device, x.dtype, on.input_precision(x.dtype)
    shapes = [(*y.shape, x.shape[1]) for x, _, y in products]
    sms, limit = on.num_sms(device), on.shared_memory_limit(device)
    config = config or tiles.heuristic(shapes, dtype, limit, sms, precision=precision, loads=worst)
    xs, ws, ys, sizes, how = [], [], [], [], []
    for (x, w, y), (_, n, k) in zip(products, shapes, strict=True):
        how_x, how_w = loads(x), loads(w)
        xs.append(_argument(x, how_x, config.block_m, config.block_k))
        ws.append(_argument(w, how_w, config.block_n, config.block_k))
        y_tma = on.tma_refusal(y) is None
        block = [config.block_m, config.block_n]
        ys.append(TensorDescriptor(y, list(y.shape), list(y.stride()), block) if y_tma else y)
        sizes += [n, k, *x.stride(), *w.stride(), *y.stride()]
        offset = tl.int32 if on.fits_int32(x, w, y) else tl.int64
        how += [how_x, how_w, y_tma, _contiguous(x) == 1, _contiguous(w) == 1, offset]
    unused = [None] * (SLOTS - len(products))
    rows = [m for m, _, _ in shapes] + [0] * (SLOTS - len(products))
    total = sum(tiles.tiles(config, shapes))
    with on.current(device):
        multi_gemm_kernel[(min(sms, total),)](
            *xs, *unused, *ws, *unused, *ys, *unused, *rows, tuple(sizes),
            COUNT=len(products), LOADS=tuple(how), PRECISION=precision, DTYPE=DTYPES[dtype],
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            FLATTEN=config.flatten, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
