"""The oracle of multi_gemm: a loop over experts in plain, differentiable PyTorch."""

from __future__ import annotations

from torch import Tensor

from anabranch.ops.multi_gemm.call import MultiGemmCall, check_memory
from anabranch.ops.precision import wide


def multi_gemm(call: MultiGemmCall) -> list[Tensor]:
    """One product after the other, in the accumulator's precision until the one rounding at the end."""
    acc = wide(call.dtype)
    ys = [(x.to(acc) @ weight.to(acc).T).to(call.dtype) for x, weight in call.products]
    if call.out is None:
        return ys
    check_memory(call)
    return [out.copy_(y) for out, y in zip(call.out, ys, strict=True)]
