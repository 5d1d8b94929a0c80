"""multi_gemm in Triton: persistent programs over the tiles of all products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton import explained, operand
from anabranch._backends.triton.device import Gpu
from anabranch._backends.triton.explained import load_path
from anabranch._backends.triton.operand import tma_refusal
from anabranch.ops.multi_gemm.backends.triton import launch
from anabranch.ops.multi_gemm.call import MultiGemmCall


def supports(call: MultiGemmCall) -> str | None:
    """fp16, bf16 and fp32."""
    if call.dtype == torch.float64:
        return "it accumulates in fp32, too coarse for float64"
    return None


def loads(call: MultiGemmCall) -> dict[str, str]:
    """How each product's tiles are loaded and stored; nothing of those that are empty."""
    groups, known, gpu = _forward_groups(call)
    found = {}
    for i in sorted(i for group in groups for i in group.members):
        for name, value in zip(("xs", "weights", "out"), known[i], strict=True):
            inner = 1 if name == "out" else launch.contiguous(value)
            found[f"{name}[{i}]"] = load_path(tma_refusal(value, gpu.capability, inner))
    return found


def padding(call: MultiGemmCall) -> float | None:
    """Share of padding in the rows that are computed."""
    groups, known, _ = _forward_groups(call)
    return explained.padding(
        ([known[i][2].shape[0] for i in group.members], group.block_m) for group in groups
    )


def _forward_groups(call: MultiGemmCall) -> tuple[list[launch.Group], tuple[launch.Operands, ...], Gpu]:
    """What :func:`multi_gemm` would launch, its products, and where."""
    given = call.out or [x.new_empty((x.shape[0], w.shape[0]), device="meta") for x, w in call.products]
    products = zip(call.products, given, strict=True)
    known = tuple((operand.of(x), operand.of(w), operand.of(y)) for (x, w), y in products)
    gpu = on.gpu(call.device)
    return launch.plan(gpu, on.input_precision(call.dtype), known, None), known, gpu


def multi_gemm(call: MultiGemmCall, out: Sequence[Tensor]) -> None:
    """Writes one (m_i, n_i) per expert."""
    launch.multi_gemm([(x, weight, y) for (x, weight), y in zip(call.products, out, strict=True)])
