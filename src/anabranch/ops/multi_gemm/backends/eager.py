"""multi_gemm in plain PyTorch: one product per expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.ops.multi_gemm.call import MultiGemmCall


def supports(call: MultiGemmCall) -> str | None:
    """Everything."""
    return None


def multi_gemm(call: MultiGemmCall, out: Sequence[Tensor]) -> None:
    """Writes one (m_i, n_i) per expert."""
    for (x, weight), y in zip(call.products, out, strict=True):
        torch.mm(x, weight.T, out=y)
