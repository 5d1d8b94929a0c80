"""The operator of grouped_gemm for rows that were sorted elsewhere: it makes their layout too.

For adapters whose every call brings sizes and slots: two operators, a layout's and the product's, take the host longer
than the kernels of a small layer. Its gradient is the other operator's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anabranch.dispatch import choose
from anabranch.epilogues import Identity
from anabranch.ops.grouped_gemm import autograd
from anabranch.ops.grouped_gemm.call import OP, AnyConfig, GroupedGemmCall
from anabranch.ops.operator import define, direct
from anabranch.ops.precision import without_autocast
from anabranch.ops.route import autograd as route
from anabranch.ops.route.call import Fields
from anabranch.ops.second_order import refuse_forward_mode

_IDENTITY = Identity().spec
Configs = tuple[AnyConfig, AnyConfig, AnyConfig]
"""Those of the forward, of x's gradient and of weight's."""
UNTOLD: Configs = (None, None, None)


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    row_to_slot: Tensor | None,
    top_k: int,
    *,
    gather: bool = False,
    scatter: bool = False,
    scale: Tensor | None = None,
    backend: str | None = None,
    configs: Configs = UNTOLD,
) -> Tensor:
    """anabranch.grouped_gemm with ExpertLayout.from_sorted(counts, row_to_slot, top_k), of what passed both's checks.

    ``row_to_slot`` None stands for ExpertLayout.from_counts(counts, len(x)). Autocast has been asked already.
    """
    refuse_forward_mode(OP, x, weight, scale)
    texts = configs if configs is UNTOLD else map(autograd.text_of, configs)
    out: Tensor = _routed(x, weight, counts, row_to_slot, scale, top_k, gather, scatter, backend, *texts)[0]
    return out


def _arguments(
    x: Tensor,
    weight: Tensor,
    fields: Any,
    scale: Tensor | None,
    gather: bool,
    scatter: bool,
    *backend_and_texts: str | None,
) -> tuple[Any, ...]:
    """Those of grouped_gemm's own operators."""
    return (x, weight, *fields, None, scale, gather, scatter, _IDENTITY, False, *backend_and_texts)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    """The product, and the layout's fields in one piece of memory: allocating each takes as long as a launch."""
    x, _, counts, row_to_slot, _, top_k, *_ = args
    call, fields, out, memory = _allocated(*args)
    if row_to_slot is None:
        route.counts_of(counts, x.shape[0], fields)
    else:
        route.sorted_rows(counts, row_to_slot, top_k, fields)
    kernels = choose(OP, call).module
    with without_autocast(x.device):
        kernels.forward(call, out, None)
    return out, memory


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _allocated(*args)[2:]


def _allocated(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    row_to_slot: Tensor | None,
    scale: Tensor | None,
    top_k: int,
    *flags: Any,
) -> tuple[GroupedGemmCall, Fields, Tensor, Tensor]:
    """The call, its layout's fields, not filled yet, and both results."""
    memory, fields = _memory(counts, row_to_slot, x.shape[0], top_k)
    call = autograd.restore(*_arguments(x, weight, fields, scale, *flags))
    return call, fields, x.new_empty(call.out_rows, call.out_columns), memory


def _memory(counts: Tensor, row_to_slot: Tensor | None, rows: int, top_k: int) -> tuple[Tensor, Fields]:
    """Memory for a layout, and its fields in there."""
    if row_to_slot is None:
        top_k = 1
    else:
        rows = row_to_slot.shape[0]
    experts = counts.shape[0]
    sizes = _aligned(experts) + _aligned(experts + 1) + _aligned(rows) + rows
    memory = counts.new_empty(sizes, dtype=torch.int32)
    return memory, _fields(memory, experts, rows, top_k)


def _fields(memory: Tensor, experts: int, rows: int, top_k: int) -> Fields:
    """Views of the memory, each from a multiple of 256 bytes on, as memory of its own would be."""
    offsets = _aligned(experts)
    slots = offsets + _aligned(experts + 1)
    places = slots + _aligned(rows)
    return (
        memory.narrow(0, 0, experts),
        memory.narrow(0, offsets, experts + 1),
        memory.narrow(0, slots, rows),
        memory.narrow(0, places, rows).view(rows // top_k, top_k),
    )


def _aligned(size: int) -> int:
    return (size + 63) // 64 * 64


def _save(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    x, weight, _, row_to_slot, scale, top_k, *ctx.flags = args
    ctx.top_k = 1 if row_to_slot is None else top_k
    ctx.save_for_backward(x, weight, scale, results[1])


def _differentiate(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> list[Tensor | None]:
    needs_x, needs_weight, _, _, needs_scale = ctx.needs_input_grad[:5]
    needs = [needs_x, needs_weight, False, needs_scale]
    if grad is None or not any(needs):
        return []
    x, weight, scale, memory = ctx.saved_tensors
    fields = _fields(memory, weight.shape[0], grad.shape[0], ctx.top_k)
    args = _arguments(x, weight, fields, scale, *ctx.flags)
    grads = iter(autograd.run_backward(needs, grad, x.new_empty(0), *args))
    d_x, d_weight, _, d_scale = (next(grads) if need else None for need in needs)
    return [d_x, d_weight, None, None, d_scale]


grouped_gemm_sorted = define(
    "grouped_gemm_sorted",
    "(Tensor x, Tensor weight, Tensor counts, Tensor? row_to_slot, Tensor? scale, SymInt top_k, bool gather, "
    "bool scatter, str? backend, str? config, str? d_x_config, str? d_weight_config) -> (Tensor, Tensor)",
    _forward,
    fake=_fake,
    save=_save,
    differentiate=_differentiate,
)
_routed = direct(grouped_gemm_sorted)
