"""What is decided of a product before it is launched, once for all calls that look alike.

A plan is a pure function of the facts about a call's tensors, so it is remembered by them; with a configuration of
tiles it gives a :class:`Launch`, and the descriptors that go with it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from anabranch import tuning
from anabranch._backends.triton.device import Gpu
from anabranch._backends.triton.operand import VECTOR, Operand, reach, tma_refusal
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.ragged import dense, ragged, store_width
from anabranch._backends.triton.schedule import max_tiles
from anabranch.epilogues import Epilogue
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.backends.triton import kernels
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, SLOT, TOKEN
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig
from anabranch.tuning import Key

READ = {TOKEN.value: "gather", SLOT.value: "slots"}
"""How an operand's rows are found where they are not in expert order."""
GATHERED, SCATTERED = "its rows are gathered", "its rows are scattered"
"""Why an operand's tiles are none in memory."""
HOW = {rows.value: rows for rows in (ROW, TOKEN, SLOT)}


class Maps(NamedTuple):
    """The fields of a layout that kernels read."""

    offsets: Operand
    row_to_slot: Operand
    slot_to_row: Operand


@cache
def device_code(epilogue: Epilogue) -> ModuleType | None:
    """The module with an epilogue's device functions, or None if it has none."""
    name = epilogue.device_code
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def parameters(epilogue: Epilogue) -> tuple[float, ...]:
    """An epilogue's parameters in the order of its fields."""
    return tuple(getattr(epilogue, f.name) for f in fields(epilogue)) if is_dataclass(epilogue) else ()


def kind_of(epilogue: Epilogue, interleaved: bool = False) -> str:
    """Which accumulators the forward kernel keeps for an epilogue."""
    if epilogue.columns == 1:
        return tiles.FORWARD
    return tiles.INTERLEAVED if interleaved else tiles.GATED


def offset_type(gpu: Gpu, *values: Operand | None) -> Any:
    """Of offsets into all of these."""
    return tl.int32 if all(reach(v) <= gpu.int32_max for v in values) else tl.int64


def inner(value: Operand) -> int:
    """The dimension that an operand's tiles are contiguous along, if they are along any of the last two."""
    last = len(value.shape) - 1
    return last - 1 if value.stride[-1] != 1 and value.stride[-2] == 1 else last


def access(value: Operand, gpu: Gpu) -> int:
    """How tiles of a tensor can be loaded or stored, along whichever of its last two dimensions is contiguous."""
    along = inner(value)
    if tma_refusal(value, gpu.capability, along) is None:
        return tiles.TMA
    outer = [step for dim, step in enumerate(value.stride) if dim != along]
    aligned = value.shift == 0 and all(n % 16 == 0 for n in (value.shape[along], *outer))
    return tiles.COPIED if aligned and value.stride[along] == 1 else tiles.ELEMENTWISE


def _worst(gpu: Gpu, x: Operand, weight: Operand | None, *stored: Operand | None) -> int:
    """What decides on tiles: few pointers for x or for results cost little, element by element a lot."""
    found = [tiles.TMA if weight is None else access(weight, gpu)]
    found.append(tiles.ELEMENTWISE if access(x, gpu) == tiles.ELEMENTWISE else tiles.TMA)
    found += [tiles.COPIED for v in stored if v is not None and access(v, gpu) == tiles.ELEMENTWISE]
    return min(found)


def _word(name: str, value: Operand, gpu: Gpu, scattered: bool = False) -> str | None:
    """For an operand that is slower to load or store than others, ``scattered`` rows being so by nature."""
    found = access(value, gpu)
    if found == tiles.ELEMENTWISE:
        return f"{name}_odd"
    return f"{name}_copied" if found == tiles.COPIED and not scattered else None


def _key(kind: str, precision: str, x: Operand, weight: Operand, rows: int, *traits: str | None) -> Key:
    """What the tuner tells a product by."""
    experts, n, k_dim = weight.shape
    dtype = str(x.dtype).removeprefix("torch.") if precision == "ieee" else "tf32"
    bucket = tuning.bucket(rows, experts)
    return Key("grouped_gemm", kind, dtype, n, k_dim, experts, bucket, tuple(t for t in traits if t))


@dataclass(frozen=True, eq=False)
class Plan:
    """A product, decided but for its tiles.

    Attributes:
        refusals: why an operand's tiles are not moved by the tensor memory accelerator, or None if they are.
        key: what the tuner tells it by; its kind is that of its tiles.
        heuristic: the tiles without tuning.
        prepare: the launch with some tiles, prepared once for each.
        settled: the tiles that the tuner came to.
    """

    refusals: Mapping[str, str | None]
    key: Key
    heuristic: GroupedGemmConfig
    prepare: Callable[[GroupedGemmConfig], Any]
    settled: tuning.Settled = field(default_factory=tuning.Settled)


class GemmLaunch(NamedTuple):
    """The forward kernel with its tiles, of ``block_m`` rows.

    Results that the tensor memory accelerator stores are given to the kernel once more, to be described; ``up`` is the
    column of h at which a second descriptor of it starts.
    """

    launch: Launch
    block_m: int
    out_tma: bool
    h_tma: bool
    up: int | None

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        maps: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        h: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        table: Tensor,
    ) -> None:
        """Launches it for tensors like the plan's operands, and the table of their tiles."""
        up = h[:, self.up :] if h is not None and self.up is not None else None
        self.launch(
            x, weight, out, h, bias, scale, out if self.out_tma else None, h if self.h_tma else None, up,
            *maps, table,
        )  # fmt: skip


@lru_cache(REMEMBERED)
def of_gemm(
    gpu: Gpu,
    precision: str,
    x: Operand,
    weight: Operand,
    maps: Maps,
    out: Operand,
    h: Operand | None,
    bias: Operand | None,
    scale: Operand | None,
    epilogue: Epilogue,
    interleaved: bool,
    x_rows: int,
    out_rows: int,
) -> Plan:
    """The plan of launch.gemm."""
    experts, n, k_dim = weight.shape
    num_rows, (num_tokens, top_k) = maps.row_to_slot.shape[0], maps.slot_to_row.shape
    direct, in_order = x_rows == ROW.value, out_rows == ROW.value
    gated = epilogue.columns == 2
    columns = n // epilogue.columns
    two = gated and not interleaved  # two accumulators; gate and up tiles of h end at column N and 2 N
    kind = kind_of(epilogue, interleaved)
    heuristic = tiles.heuristic(
        num_rows / experts,
        x.dtype,
        gpu.shared_memory,
        kind,
        epilogue=epilogue,
        pointers=(not direct) + (not in_order),
        capability=gpu.capability,
        precision=precision,
        loads=_worst(gpu, x, weight, out, h),
    )
    k_major = weight.stride[2] == 1 or weight.stride[1] != 1
    key = _key(
        kind, precision, x, weight, num_rows,
        READ.get(x_rows),
        None if in_order else "scatter",
        None if h is None else "keep_h",
        None if k_major else "n_major",
        _word("x", x, gpu, not direct),
        _word("w", weight, gpu),
        _word("out", out, gpu, not in_order),
    )  # fmt: skip
    source = weight if k_major else weight.mT
    halves: tuple[Operand, ...] = (
        () if h is None else (h.columns(0, columns), h.columns(columns, n)) if two else (h,)
    )
    refusals = {
        "x": tma_refusal(x, gpu.capability) if direct else GATHERED,
        "weight": tma_refusal(source, gpu.capability),
        "out": tma_refusal(out, gpu.capability) if in_order else SCATTERED,
    }
    if two and not k_major and columns * x.dtype.itemsize % VECTOR:
        # A tile's first column, too, has to be at a multiple of 16 bytes, or the GPU stops at an illegal instruction.
        refusals["weight"] = refusals["weight"] or f"up starts at column {columns}, no multiple of 16 bytes"
    if h is not None:
        refusals["h"] = next(filter(None, (tma_refusal(half, gpu.capability) for half in halves)), None)
    x_tma, w_tma, out_tma = (refusals[name] is None for name in ("x", "weight", "out"))
    h_tma = h is not None and refusals["h"] is None
    code = device_code(epilogue)
    assert code is not None
    offset = offset_type(gpu, x, weight._replace(shape=(1, n, k_dim)), out, h, scale)

    @cache
    def prepare(config: GroupedGemmConfig) -> GemmLaunch:
        width = config.block_n // epilogue.columns
        w_width, h_width = (width, width) if two else (config.block_n, config.block_n)
        w_block = [1, w_width, config.block_k] if k_major else [1, config.block_k, w_width]
        size = max_tiles(num_rows, experts, config.block_m)
        launch = Launch(
            gpu.device, kernels.forward_kernel, (min(gpu.num_sms, max(1, size * triton.cdiv(columns, width))),),
            size, num_rows, num_tokens * top_k, experts, top_k, columns, k_dim,
            *x.stride, *weight.stride, *out.stride, 0 if h is None else h.stride[0],
            *((0, 0) if bias is None else bias.stride), *((0, 0) if scale is None else scale.stride),
            EPILOGUE=code.forward, P=parameters(epilogue), GATED=gated, INTERLEAVED=interleaved,
            X_ROWS=HOW[x_rows], OUT_ROWS=HOW[out_rows], HAS_BIAS=bias is not None, HAS_SCALE=scale is not None,
            KEEP_H=h is not None, X_TMA=x_tma, W_TMA=w_tma, OUT_TMA=out_tma, H_TMA=h_tma, K_MAJOR=k_major,
            EVEN_K=k_dim % config.block_k == 0, PRECISION=precision,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            OFFSET=offset, FLATTEN=config.flatten, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        h_tiles = ragged(halves[0], [config.block_m, store_width(h_width)]) if h_tma else None
        launch.tiled(
            {
                0: dense(x, [config.block_m, config.block_k]) if x_tma else None,
                1: dense(source, w_block) if w_tma else None,
                6: ragged(out, [config.block_m, store_width(width)]) if out_tma else None,
                7: h_tiles,
                8: h_tiles if two else None,
            }
        )
        return GemmLaunch(launch, config.block_m, out_tma, h_tma, columns if two and h_tma else None)

    return Plan(refusals, key, heuristic, prepare)


@lru_cache(REMEMBERED)
def of_weight_gradient(
    gpu: Gpu,
    precision: str,
    d_z: Operand,
    x: Operand,
    maps: Maps,
    d_weight: Operand,
    z_rows: int,
    x_rows: int,
) -> Plan:
    """The plan of launch.weight_gradient."""
    experts, n, k_dim = d_weight.shape
    num_rows, (num_tokens, top_k) = maps.row_to_slot.shape[0], maps.slot_to_row.shape
    heuristic = tiles.heuristic_weight_gradient(
        num_rows / experts,
        x.dtype,
        gpu.shared_memory,
        capability=gpu.capability,
        precision=precision,
        loads=min(_worst(gpu, x, None, d_weight), _worst(gpu, d_z, None)),
    )
    z_how, x_how = READ.get(z_rows), READ.get(x_rows)
    key = _key(
        tiles.WEIGHT_GRADIENT, precision, x, d_weight, num_rows,
        z_how and f"z_{z_how}",
        x_how and f"x_{x_how}",
        _word("z", d_z, gpu, z_how is not None),
        _word("x", x, gpu, x_how is not None),
        _word("out", d_weight, gpu),
    )  # fmt: skip
    refusals = {
        "d_z": GATHERED if z_how else tma_refusal(d_z, gpu.capability),
        "x": GATHERED if x_how else tma_refusal(x, gpu.capability),
        "d_weight": tma_refusal(d_weight, gpu.capability),
    }
    z_tma, x_tma, w_tma = (refusal is None for refusal in refusals.values())
    offset = offset_type(gpu, d_z, x, d_weight._replace(shape=(1, n, k_dim)))

    @cache
    def prepare(config: GroupedGemmConfig) -> Launch:
        work = experts * triton.cdiv(n, config.block_n) * triton.cdiv(k_dim, config.block_k)
        launch = Launch(
            gpu.device, kernels.weight_gradient_kernel, (min(work, gpu.num_sms) if config.flatten else work,),
            experts, num_rows, num_tokens * top_k, top_k, n, k_dim,
            *d_z.stride, *x.stride, *d_weight.stride,
            Z_ROWS=HOW[z_rows], X_ROWS=HOW[x_rows], Z_TMA=z_tma, X_TMA=x_tma, W_TMA=w_tma, PRECISION=precision,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, BLOCK_R=config.block_m, GROUP_M=config.group_m,
            OFFSET=offset, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return launch.tiled(
            {
                0: ragged(d_z, [config.block_m, config.block_n]) if z_tma else None,
                1: ragged(x, [config.block_m, config.block_k]) if x_tma else None,
                3: dense(d_weight, [1, config.block_n, config.block_k]) if w_tma else None,
            }
        )

    return Plan(refusals, key, heuristic, prepare)


@lru_cache(REMEMBERED)
def of_pre_activation_gradient(
    gpu: Gpu,
    grad: Operand,
    h: Operand | None,
    scale: Operand | None,
    d_z: Operand | None,
    a_out: Operand | None,
    d_scale: Operand | None,
    maps: Maps,
    epilogue: Epilogue,
    interleaved: bool,
    grad_rows: int,
) -> Launch:
    """What launch.pre_activation_gradient launches."""
    columns = grad.shape[1]
    num_rows, (num_tokens, top_k) = maps.row_to_slot.shape[0], maps.slot_to_row.shape
    code = device_code(epilogue)
    assert code is not None
    # Behind a gate there are three columns of the result for each: half as many at once.
    most = 256 if epilogue.columns == 1 else 256 // grad.dtype.itemsize
    erf = epilogue.name in ("gelu", "geglu")  # takes many registers
    return Launch(
        gpu.device, kernels.pre_activation_gradient_kernel, (triton.cdiv(num_rows, 8),),
        num_rows, maps.offsets.shape[0] - 1, num_tokens * top_k, top_k, columns,
        *grad.stride, 0 if h is None else h.stride[0], *((0, 0) if scale is None else scale.stride),
        0 if d_z is None else d_z.stride[0], 0 if a_out is None else a_out.stride[0],
        EPILOGUE=code.backward, P=parameters(epilogue), GATED=epilogue.columns == 2, INTERLEAVED=interleaved,
        GRAD_ROWS=HOW[grad_rows], HAS_H=h is not None, HAS_SCALE=scale is not None, NEED_Z=d_z is not None,
        NEED_A=a_out is not None, NEED_SCALE=d_scale is not None, BLOCK_M=8,
        BLOCK_N=min(most, triton.next_power_of_2(max(columns, 16))),
        OFFSET=offset_type(gpu, grad, h, d_z, scale), num_warps=8 if erf else 4,
    )  # fmt: skip
