"""What the tuner has to know of a product: what tells it from others, how to run it, and the truth about it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from anabranch import tuning
from anabranch._backends.triton import device as on
from anabranch.epilogues import Epilogue
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, SLOT, TOKEN
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig
from anabranch.tuning import Key, Sample, Trial

SAMPLED = 2**25
"""Elements of a result that are compared with the truth, at most."""
READ = {TOKEN.value: "gather", SLOT.value: "slots"}
"""How an operand's rows are found where they are not in expert order."""


def chosen(
    config: GroupedGemmConfig | str | None, heuristic: GroupedGemmConfig, product: Product
) -> GroupedGemmConfig:
    """The caller's configuration, or the heuristic's if that is asked for, or else the best one known."""
    if isinstance(config, GroupedGemmConfig):
        return config
    return heuristic if config == tuning.HEURISTIC else tuning.choose(product, heuristic)


def refusal(config: GroupedGemmConfig, dtype: torch.dtype, device: torch.device, kind: str) -> str | None:
    """Why a configuration cannot run, or None if it can."""
    return tiles.legal(config, dtype, on.shared_memory_limit(device), kind, on.capability(device))


def kind_of(epilogue: Epilogue, interleaved: bool = False) -> str:
    """Which accumulators the forward kernel keeps for an epilogue."""
    if epilogue.columns == 1:
        return tiles.FORWARD
    return tiles.INTERLEAVED if interleaved else tiles.GATED


@dataclass(frozen=True, eq=False)
class Product:
    """The arguments of a launcher. Subclasses say what is computed of them."""

    x: Tensor
    layout: ExpertLayout
    x_rows: tl.constexpr

    op = "grouped_gemm"
    kind = ""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.x.device

    def refusal(self, config: GroupedGemmConfig) -> str | None:
        """Why a configuration cannot run here."""
        return refusal(config, self.x.dtype, self.device, self.kind)

    def trial(self, default: GroupedGemmConfig) -> Trial:
        """The product as an experiment."""
        key = self.key()
        space = tiles.search_space(
            self.x.dtype,
            on.shared_memory_limit(self.device),
            self.kind,
            capability=on.capability(self.device),
            precision=on.input_precision(self.x.dtype),
        )
        return Trial(key, default, _sensible(space, key), self.family, self.outputs, self.run, self.samples)

    def key(self) -> Key:
        """What tells it from others."""
        raise NotImplementedError

    def family(self, config: GroupedGemmConfig) -> tuple[int, ...]:
        """The shape of the accumulator, and the threads that hold it."""
        return config.block_m, config.block_n, config.num_warps

    def outputs(self) -> Sequence[Tensor]:
        """Memory as the call's own."""
        raise NotImplementedError

    def run(self, config: GroupedGemmConfig, outputs: Sequence[Tensor]) -> None:
        """Launches it."""
        raise NotImplementedError

    def samples(self) -> Sequence[Sample]:
        """The truth about some rows of each output."""
        raise NotImplementedError

    def _key(self, weight: Tensor, *traits: str | None) -> Key:
        experts, n, k_dim = weight.shape
        exact = on.input_precision(self.x.dtype) == "ieee"
        dtype = str(self.x.dtype).removeprefix("torch.") if exact else "tf32"
        rows = tuning.bucket(self.layout.num_rows, experts)
        return Key(self.op, self.kind, dtype, n, k_dim, experts, rows, tuple(t for t in traits if t))

    def _starts(self) -> list[int]:
        assert self.layout.offsets is not None
        return [min(start, self.layout.num_rows) for start in self.layout.offsets.tolist()]


@dataclass(frozen=True, eq=False)
class Gemm(Product):
    """launch.gemm."""

    weight: Tensor
    out: Tensor
    h: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    epilogue: Epilogue
    interleaved: bool
    out_rows: tl.constexpr

    @property
    def kind(self) -> str:  # type: ignore[override]
        return kind_of(self.epilogue, self.interleaved)

    def key(self) -> Key:
        k_major = self.weight.stride(2) == 1 or self.weight.stride(1) != 1
        return self._key(
            self.weight,
            READ.get(self.x_rows.value),
            None if self.out_rows is ROW else "scatter",
            None if self.h is None else "keep_h",
            None if k_major else "n_major",
            _loads("x", self.x) if self.x_rows is ROW else None,
            _loads("w", self.weight if k_major else self.weight.mT),
            _loads("out", self.out) if self.out_rows is ROW else None,
        )

    def outputs(self) -> Sequence[Tensor]:
        return [_like(value) for value in (self.out, self.h) if value is not None]

    def run(self, config: GroupedGemmConfig, outputs: Sequence[Tensor]) -> None:
        from anabranch.ops.grouped_gemm.backends.triton import launch

        launch.gemm(
            self.x,
            self.weight,
            self.layout,
            outputs[0],
            h=outputs[1] if len(outputs) > 1 else None,
            bias=self.bias,
            scale=self.scale,
            epilogue=self.epilogue,
            interleaved=self.interleaved,
            x_rows=self.x_rows,
            out_rows=self.out_rows,
            config=config,
        )

    def samples(self) -> Sequence[Sample]:
        starts, layout = self._starts(), self.layout
        rows = _spread(starts, max(1, SAMPLED // max(self.weight.shape[1], 1)))
        # Rows that are nobody's are zero, and so are slots without a row.
        unused = list(range(starts[-1], layout.num_rows))[:: max(1, (layout.num_rows - starts[-1]) // 64)]
        index = torch.tensor([*itertools.chain(*rows), *unused], device=self.device)
        slots = layout.row_to_slot[index].long()
        live = slots >= 0
        counts = [*map(len, rows), len(unused)]
        z, y = self._values(index, slots, live, counts, torch.float64)
        plain_z, plain_y = self._values(index, slots, live, counts, None)
        if self.out_rows is ROW:
            out = Sample("out", index, y, plain_y)
        else:
            empty = torch.nonzero(layout.slot_to_row.reshape(-1) < 0)[:64, 0]
            places = torch.cat((slots[live], empty))
            zeros = y.new_zeros(len(empty), y.shape[1])
            plain = torch.cat((plain_y[live], zeros.to(plain_y)))
            out = Sample("out", places, torch.cat((y[live], zeros)), plain)
        return [out] if self.h is None else [out, Sample("h", index, z, plain_z)]

    def _values(
        self, rows: Tensor, slots: Tensor, live: Tensor, counts: Sequence[int], wide: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """(pre-activation, output) of rows, in fp64 or as PyTorch computes in their precision."""
        top_k = self.layout.top_k
        slots = slots.clamp(min=0)
        source = _places(rows, slots, top_k, self.x_rows)
        x = self.x[source].masked_fill(~live[:, None], 0)
        dtype = wide or self.x.dtype
        z = x.new_zeros(len(rows), self.weight.shape[1], dtype=dtype)
        stop = 0
        for expert, count in enumerate(counts[:-1]):
            start, stop = stop, stop + count
            if count:
                bias = None if self.bias is None else self.bias[expert].to(dtype)
                z[start:stop] = F.linear(x[start:stop].to(dtype), self.weight[expert].to(dtype), bias)
        z.masked_fill_(~live[:, None], 0)
        parts = (z[:, 0::2], z[:, 1::2]) if self.interleaved else z.chunk(self.epilogue.columns, -1)
        y = self.epilogue.forward(*(part.to(wide or torch.float32) for part in parts))
        if self.scale is not None:
            y = y * self.scale.reshape(-1, 1)[slots].masked_fill(~live[:, None], 0).to(y.dtype)
        return z, y.masked_fill(~live[:, None], 0).to(dtype)


@dataclass(frozen=True, eq=False)
class WeightGradient(Product):
    """launch.weight_gradient."""

    d_z: Tensor
    d_weight: Tensor
    z_rows: tl.constexpr

    kind = tiles.WEIGHT_GRADIENT

    def family(self, config: GroupedGemmConfig) -> tuple[int, ...]:
        return config.block_n, config.block_k, config.num_warps

    def key(self) -> Key:
        return self._key(
            self.d_weight,
            None if self.z_rows is ROW else f"z_{READ[self.z_rows.value]}",
            None if self.x_rows is ROW else f"x_{READ[self.x_rows.value]}",
            _loads("z", self.d_z) if self.z_rows is ROW else None,
            _loads("x", self.x) if self.x_rows is ROW else None,
            _loads("out", self.d_weight),
        )

    def outputs(self) -> Sequence[Tensor]:
        return [_like(self.d_weight)]

    def run(self, config: GroupedGemmConfig, outputs: Sequence[Tensor]) -> None:
        from anabranch.ops.grouped_gemm.backends.triton import launch

        launch.weight_gradient(
            self.d_z, self.x, self.layout, outputs[0], z_rows=self.z_rows, x_rows=self.x_rows, config=config
        )

    def samples(self) -> Sequence[Sample]:
        experts, n, k_dim = self.d_weight.shape
        (columns,) = _spread([0, n], max(1, min(32, SAMPLED // max(experts * k_dim, 1))))
        some = torch.tensor(columns, device=self.device)
        truth = torch.zeros(experts, len(columns), k_dim, dtype=torch.float64, device=self.device)
        plain = torch.zeros_like(truth, dtype=self.x.dtype)
        for expert, (start, stop) in enumerate(itertools.pairwise(self._starts())):
            rows = torch.arange(start, stop, device=self.device)
            slots = self.layout.row_to_slot[start:stop].long()
            rows, slots = rows[slots >= 0], slots[slots >= 0]
            top_k = self.layout.top_k
            d_z = self.d_z[_places(rows, slots, top_k, self.z_rows)][:, some]
            x = self.x[_places(rows, slots, top_k, self.x_rows)]
            plain[expert] = d_z.T @ x
            for some_z, some_x in zip(d_z.split(8192), x.split(8192), strict=True):
                truth[expert] += some_z.double().T @ some_x.double()
        index = torch.arange(experts, device=self.device)[:, None] * n + some
        return [Sample("d_weight", index.reshape(-1), truth.flatten(0, 1), plain.flatten(0, 1))]


def _sensible(space: Iterable[GroupedGemmConfig], key: Key) -> list[GroupedGemmConfig]:
    """Those whose tiles are not far from as high as an expert has rows: compiling is what a search spends."""
    if key.kind == WeightGradient.kind:
        return list(space)
    low = 64 if key.rows >= 256 else 16
    return [config for config in space if low <= config.block_m <= max(64, 2 * key.rows)]


def _places(rows: Tensor, slots: Tensor, top_k: int, how: tl.constexpr) -> Tensor:
    """Where an operand keeps rows."""
    return rows if how is ROW else slots // top_k if how is TOKEN else slots


def _loads(name: str, value: Tensor) -> str | None:
    """A word for an operand that cannot come or go through TMA where others can."""
    return None if on.tma_refusal(value) is None else f"{name}_by_pointers"


def _like(value: Tensor) -> Tensor:
    """Memory of its own with a tensor's strides, and its address's distance from a multiple of 16 bytes."""
    shift = value.data_ptr() % 16 // value.element_size()
    steps = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps) if value.numel() else 0
    return value.new_empty(span + shift).as_strided(value.shape, value.stride(), shift)


def _spread(starts: Sequence[int], limit: int) -> list[list[int]]:
    """Some of each range: all of a short one, else from its first to its last alike; about ``limit`` in all."""
    lengths = [max(0, stop - start) for start, stop in itertools.pairwise(starts)]
    each = max(4, limit // max(1, sum(map(bool, lengths))))
    return [
        [start + i for i in range(length)]
        if length <= each
        else [start + i * (length - 1) // (each - 1) for i in range(each)]
        for start, length in zip(starts, lengths, strict=False)
    ]
