"""What is decided of a product before it is launched, once for all calls that look alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton

from anabranch import tuning
from anabranch._backends.hopper.descriptors import Tiles, dense, layout, ragged
from anabranch._backends.hopper.serves import k_major, size_refusal, weight_refusal
from anabranch._backends.triton import device as on
from anabranch._backends.triton.operand import Operand, tma_refusal
from anabranch._backends.triton.prepared import REMEMBERED, Launch
from anabranch._backends.triton.schedule import max_tiles
from anabranch.epilogues import Epilogue
from anabranch.ops.grouped_gemm.backends.hopper import config as tiles
from anabranch.ops.grouped_gemm.backends.hopper import product
from anabranch.ops.grouped_gemm.backends.hopper import weight_gradient as dw
from anabranch.ops.grouped_gemm.backends.hopper.config import ROWS, Config
from anabranch.ops.grouped_gemm.backends.triton.plan import device_code, parameters
from anabranch.tuning import Key, Product


class Maps(NamedTuple):
    """What of a layout decides on launches."""

    offsets: Operand
    row_to_slot: Operand
    num_rows: int
    num_slots: int
    top_k: int


@dataclass(frozen=True, eq=False)
class Plan:
    """A product, decided but for how it is cut and staged.

    Attributes:
        key: what the tuner tells it by.
        heuristic: the configuration without tuning.
        prepare: the launch with some configuration, prepared once for each.
        settled: the launch that the tuner came to.
    """

    key: Key
    heuristic: Config
    prepare: Callable[[Config], Any]
    settled: tuning.Settled = field(default_factory=tuning.Settled)

    def launch(self, config: Config | None, device: torch.device, product: Callable[[], Product]) -> Any:
        """The launch with the caller's configuration, or else with the best one known for a product."""
        if config is not None:
            return self.prepare(config)
        return self.settled.get(device, lambda: self.prepare(tuning.choose(product(), self.heuristic)))


def key_of(kind: str, dtype: torch.dtype, sizes: tuple[int, ...], rows: int, **traits: bool) -> Key:
    """What the tuner tells a product by: of a weight of ``sizes``, (E, N, K_dim), with the traits that are true."""
    experts, n, k_dim = sizes
    name = str(dtype).removeprefix("torch.")
    bucket = tuning.bucket(rows, experts)
    return Key("grouped_gemm", kind, name, n, k_dim, experts, bucket, tuple(t for t in traits if traits[t]))


@lru_cache(REMEMBERED)
def refusal(
    capability: tuple[int, int], epilogue: Epilogue, x: Operand | None, weight: Operand, maps: Maps
) -> str | None:
    """Why the kernels cannot serve such operands, an (E, N, K) view of the weight among them, or None if they can.

    ``x`` is None where its rows are gathered.
    """
    if device_code(epilogue) is None:
        return f"the epilogue {epilogue.name} has no device code ({epilogue.device_code})"
    _, n, k_dim = weight.shape
    columns = epilogue.columns
    reason = size_refusal(**{"N" if columns == 1 else f"N / {columns}": n // columns, "K_dim": k_dim})
    if reason is not None:
        return reason
    if maps.num_slots == 0:
        return "there is nothing to multiply"
    if maps.offsets.dtype != torch.int32 or maps.row_to_slot.dtype != torch.int32:
        return "the layout's maps are not of int32"
    reason = None if x is None else tma_refusal(x, capability)
    return weight_refusal("weight", weight, capability) if reason is None else f"x: {reason}"


@lru_cache(REMEMBERED)
def of_gemm(
    device: torch.device, x: Operand, weight: Operand, out: Operand, h: Operand | None, bias: Operand | None,
    maps: Maps, epilogue: Epilogue, interleaved: bool, gathered: bool,
) -> Plan:  # fmt: skip
    """The plan of launch.gemm."""
    experts, n, k_dim = weight.shape
    columns = out.shape[1]
    gated, by_k = epilogue.columns == 2, k_major(weight)
    split = gated and not interleaved
    kind = tiles.GATED if split else tiles.INTERLEAVED if gated else tiles.FORWARD
    traits = dict(gather=gathered, keep_h=h is not None, n_major=not by_k)
    key = key_of(kind, x.dtype, weight.shape, maps.num_rows, **traits)
    code = device_code(epilogue)
    assert code is not None

    @cache
    def prepare(config: Config) -> Launch:
        width = config.block_n // epilogue.columns
        # The second half could miss one of two starts.
        skew = config.skew if triton.cdiv(k_dim, config.block_k) >= config.num_stages else 0
        if by_k and split:
            halves = weight._replace(
                shape=(experts, 2, columns, k_dim),
                stride=(weight.stride[0], columns * weight.stride[1], *weight.stride[1:]),
            )
            t_w = dense(halves, [1, 2, width, config.block_k])
        else:
            t_w = weight_tiles(weight, width if split else config.block_n, config.block_k)
        block = [64, config.store_n]
        t_h = None if h is None else ragged(h.columns(0, columns) if split else h, block)
        rows = [64, config.block_k]
        t_x = None if gathered else ragged(x, rows)
        a_layout = layout(rows) if t_x is None else t_x.layout
        launch = Launch(
            device, product.product_kernel, (on.num_sms(device),),
            x.stride[0], 0 if bias is None else bias.stride[0], max_tiles(maps.num_rows, experts, ROWS),
            maps.num_rows, maps.num_slots, columns, k_dim,
            A_LAYOUT=a_layout, TOP_K=maps.top_k, EPILOGUE=code.forward, P=parameters(epilogue),
            GATED=gated, INTERLEAVED=interleaved, KEEP_H=h is not None, HAS_BIAS=bias is not None,
            GATHERED=gathered, K_MAJOR=by_k, BN=config.block_n, BK=config.block_k, STAGES=config.num_stages,
            EPI_N=config.store_n, NBUF=config.num_buffers, GROUP_M=config.group_m, STEADY=config.steady, SKEW=skew,
            LAG=config.lag, WARPS=2 if gathered else 1, CONSUMER_REGISTERS=208 if gathered else 240,
            PRODUCER_REGISTERS=88 if gathered else 24, num_warps=4,
        )  # fmt: skip
        return launch.tiled(
            {
                0: t_x,
                1: t_w,
                2: ragged(out, block),
                3: t_h,
                4: t_h if split else None,
            }
        )

    return Plan(key, tiles.heuristic(n, maps.num_rows // experts), prepare)


@lru_cache(REMEMBERED)
def of_weight_gradient(
    device: torch.device, a: Operand, b: Operand, d_weight: Operand, maps: Maps, a_gathered: bool, b_gathered: bool,
) -> Plan:  # fmt: skip
    """The plan of launch.weight_gradient."""
    experts, m, n = d_weight.shape
    gathered = a_gathered or b_gathered
    traits = dict(a_gather=a_gathered, b_gather=b_gathered)
    key = key_of(tiles.WEIGHT_GRADIENT, a.dtype, d_weight.shape, maps.num_rows, **traits)

    @cache
    def prepare(config: Config) -> Launch:
        blocks = [config.block_k, 64], [config.block_k, config.block_n]
        a_layout, b_layout = (
            layout(block if how else [1, 1, *block])
            for how, block in zip((a_gathered, b_gathered), blocks, strict=True)
        )
        work = experts * triton.cdiv(m, ROWS) * triton.cdiv(n, config.block_n)
        launch = Launch(
            device, dw.weight_gradient_kernel, (min(work, on.num_sms(device)),),
            a.stride[0], b.stride[0], experts, maps.num_rows, maps.num_slots, m, n,
            A_LAYOUT=a_layout, B_LAYOUT=b_layout, TOP_K=maps.top_k, A_GATHERED=a_gathered, B_GATHERED=b_gathered,
            BN=config.block_n, BK=config.block_k, STAGES=config.num_stages, EPI_N=config.store_n,
            NBUF=config.num_buffers, GROUP_M=config.group_m, WARPS=4 if gathered else 1,
            CONSUMER_REGISTERS=216 if gathered else 240, PRODUCER_REGISTERS=72 if gathered else 24, num_warps=4,
        )  # fmt: skip
        t_a, t_b = (
            None if how else ragged(value, block)
            for value, how, block in zip((a, b), (a_gathered, b_gathered), blocks, strict=True)
        )
        return launch.tiled({0: t_a, 1: t_b, 2: dense(d_weight, [1, 64, config.store_n])})

    return Plan(key, tiles.heuristic(n), prepare)


def weight_tiles(weight: Operand, block_n: int, block_k: int) -> Tiles:
    """Of an (E, N, K) view: (block_n, block_k), or where N is contiguous (block_k, block_n)."""
    if k_major(weight):
        return dense(weight, [1, block_n, block_k])
    return dense(weight.mT, [1, block_k, block_n])
