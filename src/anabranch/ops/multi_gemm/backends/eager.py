"""multi_gemm in plain PyTorch: one product per expert."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anabranch._backends.eager.product import matmul_nt
from anabranch.ops.multi_gemm.call import MultiGemmCall


def supports(call: MultiGemmCall) -> str | None:
    """Everything."""
    return None


def multi_gemm(call: MultiGemmCall, out: Sequence[Tensor]) -> None:
    """Writes one (m_i, n_i) per expert."""
    for (x, weight), y in zip(call.products, out, strict=True):
        matmul_nt(x, weight, y)
