"""multi_gemm in Triton: persistent programs over the tiles of all products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.ops.multi_gemm.backends.triton import launch
from anabranch.ops.multi_gemm.call import MultiGemmCall


def supports(call: MultiGemmCall) -> str | None:
    """fp16, bf16 and fp32."""
    if call.dtype == torch.float64:
        return "it accumulates in fp32, too coarse for float64"
    return None


def multi_gemm(call: MultiGemmCall, out: Sequence[Tensor]) -> None:
    """Writes one (m_i, n_i) per expert."""
    launch.multi_gemm([(x, weight, y) for (x, weight), y in zip(call.products, out, strict=True)])
