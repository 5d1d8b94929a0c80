"""What the operations' Hopper backends refuse alike. Plain Triton serves it."""

from __future__ import annotations

import torch

from anabranch._backends.hopper import release
from anabranch._backends.triton.operand import Operand, tma_refusal

FEWEST_ROWS = 32
"""Rows an expert, on average, from which these kernels are chosen unasked: their tiles are 128 rows high, and most of
a tile would be padding where plain Triton has tiles of 16."""
DTYPES = (torch.float16, torch.bfloat16)


def refusal(backend: str | None, dtype: torch.dtype, rows: int, experts: int) -> str | None:
    """Why no kernel serves so many rows in all of a dtype, or None. ``backend`` is the one that the caller named."""
    reason = release.refusal(backend)
    if reason is not None:
        return reason
    if dtype not in DTYPES:
        return f"its products are of float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if rows == 0:
        return "there is nothing to multiply"
    if rows >= 1 << 30:
        return "there are more rows than its tiles can count"
    if backend is None and rows < FEWEST_ROWS * experts:
        return f"{rows} rows of {experts} experts are fewer than {FEWEST_ROWS} each, for which its tiles are high"
    return None


def size_refusal(**sizes: int) -> str | None:
    """Why no kernel serves matrices of such sizes, by their letters, or None."""
    if 0 in sizes.values():
        return "there is nothing to multiply"
    for letter, size in sizes.items():
        if size % 8:
            return f"{letter} = {size} is not a multiple of 8, which rows of 16-byte units ask for"
    return None


def weight_refusal(name: str, weight: Operand, capability: tuple[int, int]) -> str | None:
    """Why tiles of an (E, N, K) view cannot be loaded, or None."""
    reason = tma_refusal(weight, capability, 2 if k_major(weight) else 1)
    return None if reason is None else f"{name}: {reason}"


def k_major(weight: Operand) -> bool:
    """Whether tiles of an (E, N, K) view are contiguous along K."""
    return weight.stride[2] == 1
