"""Backends of grouped_gemm that are wrong on purpose, one mistake each. A suite must reject them all.

Every mistake has been made by some published kernel. They are made by spoiling what the eager backend does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anabranch import dispatch
from anabranch.epilogues import Identity, Swiglu
from anabranch.ops.grouped_gemm.backends import eager
from anabranch.ops.grouped_gemm.call import GroupedGemmCall as Call

__all__ = ["FAULTS", "installed"]

FAULTS: dict[str, SimpleNamespace] = {}
"""Broken backends by the name of their mistake."""

Grads = list[Tensor | None]


def _backend(name: str, **functions: Any) -> None:
    FAULTS[name] = SimpleNamespace(**{**vars(eager), **functions})


def _asks(change: Callable[[Call], Call]) -> Callable[[Call], Call]:
    """A backend that answers another question than it was asked."""

    def forward(call: Call, out: Tensor, h: Tensor | None) -> None:
        eager.forward(change(call), out, h)

    def backward(call: Call, grad: Tensor, h: Tensor | None, needs: Sequence[bool]) -> Grads:
        grads = eager.backward(change(call), grad, h, needs)
        values = (call.x, call.weight, call.bias, call.scale)
        both = zip(grads, values, needs, strict=True)
        return [g if g is not None or v is None or not n else torch.zeros_like(v) for g, v, n in both]

    _backend(change.__name__, forward=forward, backward=backward)
    return change


def _spoils_output(spoil: Callable[[Call, Tensor], None]) -> Callable[[Call, Tensor], None]:
    """A backend whose output is spoilt at the end."""

    def forward(call: Call, out: Tensor, h: Tensor | None) -> None:
        eager.forward(call, out, h)
        spoil(call, out)

    _backend(spoil.__name__, forward=forward)
    return spoil


def _spoils_gradient(
    spoil: Callable[[Call, Tensor, Tensor | None, Grads], None],
) -> Callable[[Call, Tensor, Tensor | None, Grads], None]:
    """A backend whose gradients are spoilt at the end."""

    def backward(call: Call, grad: Tensor, h: Tensor | None, needs: Sequence[bool]) -> Grads:
        grads = list(eager.backward(call, grad, h, needs))
        spoil(call, grad, h, grads)
        return grads

    _backend(spoil.__name__, backward=backward)
    return spoil


def _unused(call: Call) -> Tensor:
    """Output rows that no choice fills."""
    layout = call.layout
    return layout.slot_to_row.reshape(-1) < 0 if call.scatter else layout.row_to_slot < 0


def _bounds(call: Call) -> Iterator[tuple[int, int]]:
    assert call.layout.offsets is not None
    return itertools.pairwise(call.layout.offsets.tolist())


def _out_row(call: Call, row: int) -> int:
    return int(call.layout.row_to_slot[row]) if call.scatter else row


@_asks
def ignores_scale(call: Call) -> Call:
    return replace(call, scale=None)


@_asks
def ignores_bias(call: Call) -> Call:
    return replace(call, bias=None)


@_asks
def takes_every_gate_for_swiglu(call: Call) -> Call:
    return replace(call, epilogue=Swiglu()) if call.epilogue.columns == 2 else call


@_asks
def ignores_weight_strides(call: Call) -> Call:
    return replace(call, weight=_as_if_contiguous(call.weight))


@_asks
def ignores_x_strides(call: Call) -> Call:
    return replace(call, x=_as_if_contiguous(call.x))


@_asks
def guesses_the_layout_of_a_square_weight(call: Call) -> Call:
    square = call.weight.shape[1] == call.weight.shape[2]
    return replace(call, transpose_weight=False) if square else call


@_asks
def gathers_by_row(call: Call) -> Call:
    maps = replace(call.layout, row_to_slot=call.layout.slot_to_row.reshape(-1))
    return replace(call, layout=maps) if call.gather and not call.scatter else call


def _as_if_contiguous(value: Tensor) -> Tensor:
    strides = torch.empty(value.shape, device="meta").stride()
    return value.as_strided(value.shape, strides, value.storage_offset())


@_spoils_output
def returns_zeros(call: Call, out: Tensor) -> None:
    out.zero_()


@_spoils_output
def forgets_the_tail(call: Call, out: Tensor) -> None:
    out[_unused(call)] = float("nan")


@_spoils_output
def rounds_tiles_down(call: Call, out: Tensor) -> None:
    for start, stop in _bounds(call):
        for row in range(start + (stop - start) // 16 * 16 if stop - start > 16 else stop, stop):
            out[_out_row(call, row)] = 0


@_spoils_output
def drops_the_last_row_of_each_expert(call: Call, out: Tensor) -> None:
    for start, stop in _bounds(call):
        if stop > start:
            out[_out_row(call, stop - 1)] = 0


@_spoils_output
def takes_a_tiles_expert_from_its_first_row(call: Call, out: Tensor) -> None:
    experts = [expert for expert, (start, stop) in enumerate(_bounds(call)) for _ in range(start, stop)]
    for row in range(len(experts)) if isinstance(call.epilogue, Identity) and not call.gather else ():
        if experts[row] != experts[row // 64 * 64]:
            out[_out_row(call, row)] = call.weight_nk[experts[row // 64 * 64]] @ call.x[row]


@_spoils_output
def records_the_first_of_duplicates(call: Call, out: Tensor) -> None:
    assert call.layout.offsets is not None
    experts = torch.bucketize(call.layout.slot_to_row, call.layout.offsets[1:], right=True)
    for token, slot in itertools.product(range(call.layout.num_tokens), range(call.layout.top_k)):
        row = int(call.layout.slot_to_row[token, slot])
        if row >= 0 and bool((experts[token, :slot] == experts[token, slot]).any()):
            out[_out_row(call, row)] = 0


@_spoils_output
def keeps_running_sums_in_half_precision(call: Call, out: Tensor) -> None:
    if isinstance(call.epilogue, Identity) and not call.gather and call.bias is None and call.scale is None:
        for expert, (start, stop) in enumerate(_bounds(call)):
            for row in range(start, stop):
                total = torch.zeros(out.shape[1], dtype=torch.bfloat16)
                for product in (call.weight_nk[expert] * call.x[row]).T:
                    total = total + product.to(torch.bfloat16)
                out[_out_row(call, row)] = total.to(out.dtype)


@_spoils_output
def flushes_small_numbers(call: Call, out: Tensor) -> None:
    out[out.abs() < 1e-4] = 0


@_spoils_output
def writes_past_the_end(call: Call, out: Tensor) -> None:
    end = out.storage_offset() + sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True)) + 1
    if out.numel() and out.untyped_storage().nbytes() > end * out.element_size():
        out.as_strided((1,), (1,), end).fill_(0)


@_spoils_output
def varies_from_call_to_call(call: Call, out: Tensor) -> None:
    out[torch.rand(out.shape, device=out.device) < 0.01] *= 1 + torch.finfo(out.dtype).eps


@_spoils_output
def scribbles_on_x(call: Call, out: Tensor) -> None:
    call.x.nan_to_num_()


@_spoils_gradient
def has_no_gradient(call: Call, grad: Tensor, h: Tensor | None, grads: Grads) -> None:
    for value in grads:
        if value is not None:
            value.zero_()


@_spoils_gradient
def leaves_the_weight_gradient_of_empty_experts(
    call: Call, grad: Tensor, h: Tensor | None, grads: Grads
) -> None:
    if grads[1] is not None and call.layout.counts is not None:
        grads[1][call.layout.counts == 0] = 3


@_spoils_gradient
def leaves_the_x_gradient_of_the_tail(call: Call, grad: Tensor, h: Tensor | None, grads: Grads) -> None:
    if grads[0] is not None and not call.gather:
        grads[0][call.layout.row_to_slot < 0] = float("nan")


@_spoils_gradient
def forgets_the_scale_gradient(call: Call, grad: Tensor, h: Tensor | None, grads: Grads) -> None:
    if grads[3] is not None:
        grads[3].zero_()


@_spoils_gradient
def shares_the_x_gradient_among_choices(call: Call, grad: Tensor, h: Tensor | None, grads: Grads) -> None:
    if grads[0] is not None and call.gather:
        grads[0] /= call.layout.top_k


@_spoils_gradient
def uses_the_saved_activation_as_scratch(call: Call, grad: Tensor, h: Tensor | None, grads: Grads) -> None:
    if h is not None:
        h.zero_()


@_spoils_gradient
def scales_the_incoming_gradient_in_place(call: Call, grad: Tensor, h: Tensor | None, grads: Grads) -> None:
    if 0 not in grad.stride():
        grad *= 2


def _reads_contiguously(call: Call, grad: Tensor, h: Tensor | None, needs: Sequence[bool]) -> Any:
    return eager.backward(call, _as_if_contiguous(grad), h, needs)


_backend("ignores_gradient_strides", backward=_reads_contiguously)


@contextmanager
def installed(fault: str) -> Iterator[None]:
    """Within it the eager backend of grouped_gemm makes the mistake."""
    original = dispatch._module

    def module(op: str, backend: str) -> Any:
        return FAULTS[fault] if (op, backend) == ("grouped_gemm", "eager") else original(op, backend)

    dispatch._module = module  # type: ignore[assignment]
    try:
        yield
    finally:
        dispatch._module = original
