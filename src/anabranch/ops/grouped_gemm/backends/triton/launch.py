"""Launchers of the grouped GEMM kernels: pick tiles and load paths, then run on the tensors' device."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton.ragged import dense, ragged, store_width
from anabranch._backends.triton.schedule import max_tiles, schedule
from anabranch.epilogues import Epilogue, Geglu, Gelu, Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.backends.triton import kernels
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW
from anabranch.ops.grouped_gemm.backends.triton.tuned import Gemm, WeightGradient, chosen
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig

_IDENTITY = Identity()


@cache
def device_code(epilogue: Epilogue) -> ModuleType | None:
    """The module with an epilogue's device functions, or None if it has none."""
    name = epilogue.device_code
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def parameters(epilogue: Epilogue) -> tuple[float, ...]:
    """An epilogue's parameters in the order of its fields."""
    return tuple(epilogue.__dict__.values())


def refusal(dtype: torch.dtype, epilogue: Epilogue) -> str | None:
    """Why the kernels cannot serve a dtype and an epilogue, or None if they can."""
    if dtype == torch.float64:
        return "it accumulates in fp32, too coarse for float64"
    if device_code(epilogue) is None:
        return f"the epilogue {epilogue.name} has no device code ({epilogue.device_code})"
    return None


def _offset_type(*values: Tensor | None) -> Any:
    return tl.int32 if on.fits_int32(*values) else tl.int64


def access(value: Tensor) -> int:
    """How tiles of a tensor can be loaded or stored, along whichever of its last two dimensions is contiguous."""
    inner = value.dim() - (2 if value.stride(-1) != 1 and value.stride(-2) == 1 else 1)
    if on.tma_refusal(value, inner) is None:
        return tiles.TMA
    outer = [step for dim, step in enumerate(value.stride()) if dim != inner]
    aligned = value.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in (value.shape[inner], *outer))
    return tiles.COPIED if aligned and value.stride(inner) == 1 else tiles.ELEMENTWISE


def _worst(x: Tensor, weight: Tensor | None, stored: tuple[Tensor | None, ...]) -> int:
    """What decides on tiles: few pointers for x or for results cost little, element by element a lot."""
    found = [tiles.TMA if weight is None else access(weight)]
    found.append(tiles.ELEMENTWISE if access(x) == tiles.ELEMENTWISE else tiles.TMA)
    found += [tiles.COPIED for v in stored if v is not None and access(v) == tiles.ELEMENTWISE]
    return min(found)


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
) -> None:
    """Writes ``out[row] = scale * epilogue(x[row] @ weight[expert].T + bias[expert])``, zeros where no row goes.

    weight is (E, N, K_dim), a view with any strides; h, if given, receives the pre-activation (R, N).
    """
    assert layout.offsets is not None
    experts, n, k_dim = weight.shape
    gated = epilogue.columns == 2
    columns = n // epilogue.columns
    direct = x_rows is ROW
    heuristic = tiles.heuristic(
        layout.num_rows / experts,
        x.dtype,
        on.shared_memory_limit(x.device),
        (tiles.INTERLEAVED if interleaved else tiles.GATED) if gated else tiles.FORWARD,
        epilogue=epilogue,
        pointers=(not direct) + (out_rows is not ROW),
        capability=on.capability(x.device),
        precision=on.input_precision(x.dtype),
        loads=_worst(x, weight, (out, h)),
    )
    product = Gemm(x, layout, x_rows, weight, out, h, bias, scale, epilogue, interleaved, out_rows)
    config = chosen(config, heuristic, product)
    width = config.block_n // epilogue.columns
    two = gated and not interleaved  # two accumulators; gate and up tiles of h end at column N and 2 N
    w_arg, w_tma, k_major = weight_operand(weight, width if two else config.block_n, config.block_k)
    x_tma = direct and on.tma_refusal(x) is None
    x_arg: Any = dense(x, [config.block_m, config.block_k]) if x_tma else x
    out_tma = out_rows is ROW and on.tma_refusal(out) is None
    t_out = ragged(out, [config.block_m, store_width(width)]) if out_tma else None
    halves = () if h is None else (h[:, :columns], h[:, columns:]) if two else (h,)
    h_tma = h is not None and all(on.tma_refusal(half) is None for half in halves)
    h_width = store_width(width if two else config.block_n)
    t_h = [ragged(half, [config.block_m, h_width]) for half in halves] if h_tma else []
    table = schedule(layout.offsets, layout.num_rows, config.block_m)
    size = max_tiles(layout.num_rows, experts, config.block_m)
    code = device_code(epilogue)
    assert code is not None
    with on.current(x.device):
        kernels.forward_kernel[(min(on.num_sms(x.device), max(1, size * triton.cdiv(columns, width))),)](
            x_arg, w_arg, out, h, bias, scale, t_out, *(*t_h, None, None)[:2], layout.offsets,
            layout.row_to_slot, layout.slot_to_row, table,
            size, layout.num_rows, layout.slot_to_row.numel(), experts, layout.top_k, columns, k_dim,
            *x.stride(), *weight.stride(), *out.stride(), 0 if h is None else h.stride(0),
            *((0, 0) if bias is None else bias.stride()), *((0, 0) if scale is None else scale.stride()),
            EPILOGUE=code.forward, P=parameters(epilogue), GATED=gated, INTERLEAVED=interleaved,
            X_ROWS=x_rows, OUT_ROWS=out_rows, HAS_BIAS=bias is not None, HAS_SCALE=scale is not None,
            KEEP_H=h is not None, X_TMA=x_tma, W_TMA=w_tma, OUT_TMA=out_tma, H_TMA=h_tma, K_MAJOR=k_major,
            EVEN_K=k_dim % config.block_k == 0,
            PRECISION=on.input_precision(x.dtype), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, GROUP_M=config.group_m, OFFSET=_offset_type(x, weight[:1], out, h, scale),
            FLATTEN=config.flatten, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def weight_operand(weight: Tensor, block_n: int, block_k: int) -> tuple[Any, bool, bool]:
    """What load_w reads of an (E, N, K_dim) view: (argument, whether by TMA, whether K is contiguous)."""
    k_major = weight.stride(2) == 1 or weight.stride(1) != 1
    source, block = (weight, [1, block_n, block_k]) if k_major else (weight.mT, [1, block_k, block_n])
    if on.tma_refusal(source) is not None:
        return weight, False, k_major
    return dense(source, block), True, k_major


def weight_gradient(
    d_z: Tensor,
    x: Tensor,
    layout: ExpertLayout,
    d_weight: Tensor,
    *,
    z_rows: tl.constexpr,
    x_rows: tl.constexpr,
    config: GroupedGemmConfig | str | None = None,
) -> None:
    """Writes ``d_weight[expert] = d_z[rows].T @ x[rows]`` into an (E, N, K_dim) view, zeros for an empty expert."""
    assert layout.offsets is not None
    experts, n, k_dim = d_weight.shape
    if d_weight.numel() == 0:
        return
    heuristic = tiles.heuristic_weight_gradient(
        layout.num_rows / experts,
        x.dtype,
        on.shared_memory_limit(x.device),
        capability=on.capability(x.device),
        precision=on.input_precision(x.dtype),
        loads=min(_worst(x, None, (d_weight,)), _worst(d_z, None, ())),
    )
    config = chosen(config, heuristic, WeightGradient(x, layout, x_rows, d_z, d_weight, z_rows))
    work = experts * triton.cdiv(n, config.block_n) * triton.cdiv(k_dim, config.block_k)
    arguments = []
    used = []
    for value, rows, block in ((d_z, z_rows, config.block_n), (x, x_rows, config.block_k)):
        tma = rows is ROW and on.tma_refusal(value) is None
        arguments.append(ragged(value, [config.block_m, block]) if tma else value)
        used.append(tma)
    w_tma = on.tma_refusal(d_weight) is None
    t_w = dense(d_weight, [1, config.block_n, config.block_k]) if w_tma else None
    grid = min(work, on.num_sms(x.device)) if config.flatten else work
    with on.current(x.device):
        kernels.weight_gradient_kernel[(grid,)](
            *arguments, d_weight, t_w, layout.offsets, layout.row_to_slot, experts, layout.top_k, n, k_dim,
            *d_z.stride(), *x.stride(), *d_weight.stride(),
            Z_ROWS=z_rows, X_ROWS=x_rows, Z_TMA=used[0], X_TMA=used[1], W_TMA=w_tma,
            PRECISION=on.input_precision(x.dtype),
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, BLOCK_R=config.block_m, GROUP_M=config.group_m,
            OFFSET=_offset_type(d_z, x, d_weight[:1]), num_warps=config.num_warps, num_stages=config.num_stages,
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

    d_z (R, columns of h), zeros without a slot; a_out (R, N), the scaled output again, possibly grad itself where
    that is in row order; d_scale (T, K), contiguous, at live slots alone. Without h the epilogue is identity.
    """
    assert layout.offsets is not None
    columns, rows = grad.shape[1], layout.num_rows
    if rows == 0 or columns == 0:
        return
    code = device_code(epilogue)
    assert code is not None
    # Behind a gate there are three columns of the result for each: half as many at once.
    most = 256 if epilogue.columns == 1 else 256 // grad.element_size()
    block_n = min(most, triton.next_power_of_2(max(columns, 16)))
    erf = isinstance(epilogue, (Gelu, Geglu))  # takes many registers
    with on.current(grad.device):
        kernels.pre_activation_gradient_kernel[(triton.cdiv(rows, 8),)](
            grad, h, scale, d_z, a_out, d_scale, layout.offsets, layout.row_to_slot, rows,
            layout.offsets.shape[0] - 1, layout.top_k, columns, *grad.stride(), 0 if h is None else h.stride(0),
            *((0, 0) if scale is None else scale.stride()), 0 if d_z is None else d_z.stride(0),
            0 if a_out is None else a_out.stride(0),
            EPILOGUE=code.backward, P=parameters(epilogue), GATED=epilogue.columns == 2, INTERLEAVED=interleaved,
            GRAD_ROWS=grad_rows, HAS_H=h is not None, HAS_SCALE=scale is not None, NEED_Z=d_z is not None,
            NEED_A=a_out is not None, NEED_SCALE=d_scale is not None, BLOCK_M=8, BLOCK_N=block_n,
            OFFSET=_offset_type(grad, h, d_z, scale), num_warps=8 if erf else 4,
        )  # fmt: skip


def bias_gradient(
    d_z: Tensor, layout: ExpertLayout, d_bias: Tensor, *, z_rows: tl.constexpr, scale: Tensor | None = None
) -> None:
    """Writes ``d_bias[expert] = sum of (scale *) d_z over its rows``, (E, N)."""
    experts, n = d_bias.shape
    if d_bias.numel() == 0:
        return
    block = min(128, triton.next_power_of_2(n))
    with on.current(d_z.device):
        kernels.bias_gradient_kernel[(experts, triton.cdiv(n, block))](
            d_z, scale, d_bias, layout.offsets, layout.row_to_slot, layout.top_k, n, *d_z.stride(),
            *((0, 0) if scale is None else scale.stride()), d_bias.stride(0),
            Z_ROWS=z_rows, HAS_SCALE=scale is not None, BLOCK_R=32, BLOCK_N=block, OFFSET=_offset_type(d_z),
            num_warps=4,
        )  # fmt: skip
