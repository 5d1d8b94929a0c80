"""Launchers of the kernels: facts about tensors in, a plan, then the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch._backends.triton import operand
from anabranch._backends.triton.gather import gather_rows
from anabranch._backends.triton.operand import tma_refusal
from anabranch._backends.triton.schedule import schedule
from anabranch.epilogues import Epilogue, Identity
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.backends.hopper import plan
from anabranch.ops.grouped_gemm.backends.hopper.config import ROWS, WIDE, Config
from anabranch.ops.grouped_gemm.backends.hopper.plan import Maps
from anabranch.ops.grouped_gemm.backends.hopper.tuned import Gemm, WeightGradient
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN

_IDENTITY = Identity()
GATHERED_COLUMNS = 256
"""A weight's gradient can gather an operand of a multiple of so many columns: copies go past no row's end."""


@dataclass(eq=False)
class Rows:
    """A layout as the kernels read it; products of one layout share it."""

    offsets: Tensor
    row_to_slot: Tensor
    maps: Maps
    layout: ExpertLayout

    @cached_property
    def table(self) -> Tensor:
        """The tiles of the rows, listed on the device."""
        return schedule(self.offsets, self.maps.num_rows, ROWS)

    @cached_property
    def holes(self) -> bool:
        """Whether an expert has rows without a slot. Waits for the device."""
        return bool((self.row_to_slot[: int(self.offsets[-1])] < 0).any())

    @cached_property
    def partial(self) -> bool:
        """Whether there are rows that are nobody's. Waits for the device."""
        return self.holes or int(self.offsets[-1]) < self.maps.num_rows


def rows_of(experts: ExpertLayout) -> Rows:
    """A layout's rows."""
    assert experts.offsets is not None
    return Rows(experts.offsets.contiguous(), experts.row_to_slot.contiguous(), maps_of(experts), experts)


def maps_of(experts: ExpertLayout) -> Maps:
    """What of a layout decides on launches."""
    assert experts.offsets is not None
    slots = experts.slot_to_row
    known = operand.of(experts.offsets.contiguous()), operand.of(experts.row_to_slot.contiguous())
    return Maps(*known, experts.num_rows, slots.numel(), slots.shape[1])


def tiled(value: Tensor) -> bool:
    """Whether tiles of a matrix can be loaded and stored."""
    return tma_refusal(operand.of(value), (9, 0)) is None


def gatherable(x: Tensor) -> bool:
    """Whether rows can be copied 16 bytes at a time, in whole stages, with offsets in int32."""
    known = operand.of(x)
    aligned = tma_refusal(known, (9, 0)) is None and x.shape[1] % WIDE.block_k == 0
    return aligned and operand.reach(known) <= on.INT32_MAX


def inputs(x: Tensor, experts: ExpertLayout, width: int = 1) -> tuple[Tensor, bool]:
    """Tokens as a kernel reads them, and whether it gathers their rows itself; if not, they are a copy in expert order.

    It does so in tiles of ``width`` columns, which have to divide x's.
    """
    if gatherable(x) and x.shape[1] % width == 0:
        return x, True
    return gather_rows(x, experts), False


def gemm(
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    out: Tensor,
    *,
    h: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = _IDENTITY,
    interleaved: bool = False,
    gathered: bool = False,
    config: Config | None = None,
) -> None:
    """Writes ``out[row] = epilogue(x[row] @ weight[expert].T + bias[expert])``, and the pre-activation to h.

    weight is an (E, N, K) view, contiguous along N or K. Rows of ``out`` past the last expert's are left alone, those
    of h become zeros. With ``gathered`` row r reads x at its token; one without a slot reads some other.
    """
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    known, maybe = operand.of, operand.maybe
    found = plan.of_gemm(
        x.device, known(x), known(weight), known(out), maybe(h), maybe(bias), rows.maps, epilogue, interleaved,
        gathered,
    )  # fmt: skip

    def product() -> Gemm:
        return Gemm(
            plan=found, maps=(), x=x, layout=rows.layout, x_rows=TOKEN if gathered else ROW, weight=weight, out=out,
            h=h, bias=bias, scale=None, epilogue=epilogue, interleaved=interleaved, out_rows=ROW, rows=rows,
        )  # fmt: skip

    launch = found.launch(config, x.device, product)
    up = h[:, out.shape[1] :] if h is not None and epilogue.columns == 2 and not interleaved else None
    launch(
        x, weight, out, h, up, out if h is None else h, out if bias is None else bias, rows.row_to_slot, rows.table
    )  # fmt: skip


def weight_gradient(
    a: Tensor,
    b: Tensor,
    rows: Rows,
    d_weight: Tensor,
    *,
    a_gathered: bool = False,
    b_gathered: bool = False,
    config: Config | None = None,
) -> None:
    """Writes ``d_weight[expert] = a[rows].T @ b[rows]``, (E, M, N), zeros for an empty expert.

    Rows of a and b in expert order, or one's gathered from tokens, and then its width is a multiple of
    GATHERED_COLUMNS.
    """
    known = operand.of
    found = plan.of_weight_gradient(
        a.device, known(a), known(b), known(d_weight), rows.maps, a_gathered, b_gathered
    )

    def product() -> WeightGradient:
        z_rows, x_rows = (TOKEN if gathered else ROW for gathered in (a_gathered, b_gathered))
        return WeightGradient(
            plan=found, maps=(), x=b, layout=rows.layout, x_rows=x_rows, d_z=a, d_weight=d_weight, z_rows=z_rows,
            holes=False, rows=rows,
        )  # fmt: skip

    launch = found.launch(config, a.device, product)
    launch(a, b, d_weight, rows.row_to_slot, rows.offsets)
