"""Launchers of the grouped GEMM kernels: facts about tensors in, a plan and its tiles, then the launch.

Most of a call's time on the host would go here, so what can be remembered is: see plan.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand, prepared
from anabranch._backends.triton.combine import power_of_2
from anabranch._backends.triton.device import Gpu
from anabranch._backends.triton.holes import mark
from anabranch._backends.triton.schedule import schedule
from anabranch.epilogues import Epilogue, Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.backends.triton import kernels, plan
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW
from anabranch.ops.grouped_gemm.backends.triton.plan import GemmLaunch, Maps, Plan, device_code
from anabranch.ops.grouped_gemm.backends.triton.plan import parameters as parameters
from anabranch.ops.grouped_gemm.backends.triton.tuned import Gemm, WeightGradient, chosen
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig

_IDENTITY = Identity()
_BY_POINTERS = (8, 0)
"""The capability of a GPU without a tensor memory accelerator."""
Schedules = dict[int, Tensor]
"""Tables of tiles by their rows, of one layout."""


def refusal(dtype: torch.dtype, epilogue: Epilogue) -> str | None:
    """Why the kernels cannot serve a dtype and an epilogue, or None if they can."""
    if dtype == torch.float64:
        return "it accumulates in fp32, too coarse for float64"
    if device_code(epilogue) is None:
        return f"the epilogue {epilogue.name} has no device code ({epilogue.device_code})"
    return None


def gemm(
    x: Tensor,
    weight: Tensor,
    layout: ExpertLayout,
    out: Tensor,
    *,
    h: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    epilogue: Epilogue = _IDENTITY,
    interleaved: bool = False,
    x_rows: tl.constexpr = ROW,
    out_rows: tl.constexpr = ROW,
    config: GroupedGemmConfig | str | None = None,
    schedules: Schedules | None = None,
) -> GemmLaunch | None:
    """Writes ``out[row] = scale * epilogue(x[row] @ weight[expert].T + bias[expert])``, zeros where no row goes.

    weight is (E, N, K_dim), a view with any strides; h, if given, receives the pre-activation (R, N). Products of one
    layout may share ``schedules``. Returns what was launched, if anything was.
    """
    if _no_slots(layout, out, h):
        return None
    what = product(x, weight, layout, out, h, bias, scale, epilogue, interleaved, x_rows, out_rows)
    launch = what.plan.prepare(chosen(config, what))
    tables = {} if schedules is None else schedules
    if launch.block_m not in tables:
        tables[launch.block_m] = schedule(what.maps[0], layout.num_rows, launch.block_m)
    launch.run(x, weight, what.maps, out, h, bias, scale, tables[launch.block_m])
    return launch


def product(
    x: Tensor,
    weight: Tensor,
    layout: ExpertLayout,
    out: Tensor,
    h: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    epilogue: Epilogue,
    interleaved: bool,
    x_rows: tl.constexpr,
    out_rows: tl.constexpr,
) -> Gemm:
    """What :func:`gemm` launches for such arguments, and the plan for it. Others than weight may be on meta."""
    maps = contiguous_maps(layout)
    known, maybe = operand.of, operand.maybe
    found = plan.of_gemm(
        on.gpu(weight.device), on.input_precision(x.dtype), known(x), known(weight), Maps(*map(known, maps)),
        known(out), maybe(h), maybe(bias), maybe(scale), epilogue, interleaved, x_rows.value, out_rows.value,
    )  # fmt: skip
    return Gemm(found, maps, x, layout, x_rows, weight, out, h, bias, scale, epilogue, interleaved, out_rows)


def _no_slots(layout: ExpertLayout, *results: Tensor | None) -> bool:
    """Whether no row can have a slot, and then all results are zero. Kernels read another slot in place of none."""
    if layout.slot_to_row.numel():
        return False
    for result in results:
        if result is not None:
            result.zero_()
    return True


def contiguous_maps(layout: ExpertLayout) -> tuple[Tensor, Tensor, Tensor]:
    """offsets, row_to_slot and slot_to_row as kernels read them. A layout put together by hand may have any strides."""
    assert layout.offsets is not None
    return layout.offsets.contiguous(), layout.row_to_slot.contiguous(), layout.slot_to_row.contiguous()


def weight_gradient(
    d_z: Tensor,
    x: Tensor,
    layout: ExpertLayout,
    d_weight: Tensor,
    *,
    z_rows: tl.constexpr,
    x_rows: tl.constexpr,
    holes: bool = False,
    config: GroupedGemmConfig | str | None = None,
) -> None:
    """Writes ``d_weight[expert] = d_z[rows].T @ x[rows]`` into an (E, N, K_dim) view, zeros for an empty expert.

    ``holes``: whether an expert may have rows without a slot, and an operand anything in them. They add nothing.
    """
    if d_weight.numel() == 0 or _no_slots(layout, d_weight):
        return
    maps = contiguous_maps(layout)
    found = _weight_gradient_plan(on.gpu(x.device), d_z, x, maps, d_weight, z_rows, x_rows)
    what = WeightGradient(found, maps, x, layout, x_rows, d_z, d_weight, z_rows, holes)
    launch = found.prepare(chosen(config, what))
    launch(d_z, x, d_weight, None if found.refusals["d_weight"] else d_weight, None, *maps[:2])
    if holes and None in (found.refusals["d_z"], found.refusals["x"]):
        without_holes(d_z, x, layout, d_weight, z_rows=z_rows, x_rows=x_rows)


def without_holes(
    d_z: Tensor,
    x: Tensor,
    layout: ExpertLayout,
    d_weight: Tensor,
    *,
    z_rows: tl.constexpr,
    x_rows: tl.constexpr,
) -> None:
    """Writes :func:`weight_gradient` anew for experts with rows that have no slot, and for others nothing.

    The device finds them. By pointers such rows are left out, which tiles of rows take in.
    """
    maps = contiguous_maps(layout)
    gpu = on.gpu(x.device)._replace(capability=_BY_POINTERS)
    found = _weight_gradient_plan(gpu, d_z, x, maps, d_weight, z_rows, x_rows)
    launch = found.prepare(replace(found.heuristic, flatten=True))  # few programs, as most find nothing to do
    launch(d_z, x, d_weight, None, mark(*maps[:2]), *maps[:2])


def _weight_gradient_plan(
    gpu: Gpu, d_z: Tensor, x: Tensor, maps: tuple[Tensor, Tensor, Tensor], d_weight: Tensor,
    z_rows: tl.constexpr, x_rows: tl.constexpr,
) -> Plan:  # fmt: skip
    return plan.of_weight_gradient(
        gpu, on.input_precision(x.dtype), operand.of(d_z), operand.of(x), Maps(*map(operand.of, maps)),
        operand.of(d_weight), z_rows.value, x_rows.value,
    )  # fmt: skip


def pre_activation_gradient(
    grad: Tensor,
    h: Tensor | None,
    scale: Tensor | None,
    layout: ExpertLayout,
    epilogue: Epilogue,
    *,
    grad_rows: tl.constexpr,
    interleaved: bool = False,
    d_z: Tensor | None = None,
    a_out: Tensor | None = None,
    d_scale: Tensor | None = None,
) -> None:
    """From the gradient of ``scale * epilogue(h)`` (rows, N) and h in row order, writes what is given.

    d_z (R, columns of h), zeros without a slot, possibly h itself; a_out (R, N), the scaled output again, possibly
    grad itself where that is in row order; d_scale (T, K), contiguous, at live slots alone. Without h the epilogue is
    identity.
    """
    if layout.num_rows == 0 or grad.shape[1] == 0 or _no_slots(layout, d_z, a_out):
        return
    maps = contiguous_maps(layout)
    tensors = grad, h, scale, d_z, a_out, d_scale
    launch = plan.of_pre_activation_gradient(
        on.gpu(grad.device), operand.of(grad), *map(operand.maybe, tensors[1:]), Maps(*map(operand.of, maps)),
        epilogue, interleaved, grad_rows.value,
    )  # fmt: skip
    launch(*tensors, *maps[:2])


def bias_gradient(
    d_z: Tensor, layout: ExpertLayout, d_bias: Tensor, *, z_rows: tl.constexpr, scale: Tensor | None = None
) -> None:
    """Writes ``d_bias[expert] = sum of (scale *) d_z over its rows``, (E, N)."""
    experts, n = d_bias.shape
    if d_bias.numel() == 0 or _no_slots(layout, d_bias):
        return
    offsets, row_to_slot, slot_to_row = contiguous_maps(layout)
    block = min(128, power_of_2(n))
    prepared.launch(
        d_z.device, kernels.bias_gradient_kernel, (experts, -(-n // block)),
        (d_z, scale, d_bias, offsets, row_to_slot), layout.num_rows, slot_to_row.numel(), layout.top_k, n,
        *d_z.stride(), *((0, 0) if scale is None else scale.stride()), d_bias.stride(0),
        Z_ROWS=z_rows, HAS_SCALE=scale is not None, BLOCK_R=32, BLOCK_N=block,
        OFFSET=plan.offset_type(on.gpu(d_z.device), operand.of(d_z)), num_warps=4,
    )  # fmt: skip
