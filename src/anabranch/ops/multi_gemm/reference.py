"""The oracle of multi_gemm: a loop over experts in plain, differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.ops.multi_gemm.call import MultiGemmCall, check_memory


def multi_gemm(call: MultiGemmCall) -> list[Tensor]:
    """One product after the other, in the accumulator's precision until the one rounding at the end."""
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    ys = [(x.to(wide) @ weight.to(wide).T).to(call.dtype) for x, weight in call.products]
    if call.out is None:
        return ys
    check_memory(call)
    return [out.copy_(y) for out, y in zip(call.out, ys, strict=True)]
