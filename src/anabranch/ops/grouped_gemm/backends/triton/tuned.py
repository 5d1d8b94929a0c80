"""What the tuner has to know of a product: what tells it from others, how to run it, and the truth about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from anabranch import tuning
from anabranch._backends.triton import device as on
from anabranch.epilogues import Epilogue
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.backends.triton import truth
from anabranch.ops.grouped_gemm.backends.triton.plan import Plan
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig
from anabranch.tuning import Key, Sample, Trial


def chosen(
    config: GroupedGemmConfig | str | None, product: Product, *, search: bool = True
) -> GroupedGemmConfig:
    """The caller's configuration, or the heuristic's if that is asked for, or else the best one known.

    Without ``search`` none is looked for that is not known yet.
    """
    if isinstance(config, GroupedGemmConfig):
        return config
    plan: Plan = product.plan
    if config == tuning.HEURISTIC:
        return plan.heuristic
    return plan.settled.get(product.device, lambda: tuning.choose(product, plan.heuristic, may_search=search))


def refusal(config: GroupedGemmConfig, dtype: torch.dtype, device: torch.device, kind: str) -> str | None:
    """Why a configuration cannot run, or None if it can."""
    return tiles.legal(config, dtype, on.shared_memory_limit(device), kind, on.capability(device))


@dataclass(eq=False)  # made at every launch, so not frozen, which takes three times as long
class Product:
    """The arguments of a launcher, and the plan for them. Subclasses say what is computed.

    The plan is of Triton or of Hopper, and so are configurations.
    """

    plan: Any
    maps: Sequence[Tensor]
    x: Tensor
    layout: ExpertLayout
    x_rows: tl.constexpr

    op = "grouped_gemm"

    @property
    def kind(self) -> str:
        """Which tiles it takes."""
        return self.plan.key.kind

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.layout.device

    def refusal(self, config: Any) -> str | None:
        """Why a configuration cannot run here."""
        return refusal(config, self.x.dtype, self.device, self.kind)

    def trial(self, default: Any) -> Trial:
        """The product as an experiment."""
        candidates = self.candidates(default)
        return Trial(self.key(), default, candidates, self.family, self.outputs, self.run, self.samples)

    def candidates(self, default: Any) -> Sequence[Any]:
        """What is tried beside the heuristic's configuration."""
        space = tiles.search_space(
            self.x.dtype,
            on.shared_memory_limit(self.device),
            self.kind,
            capability=on.capability(self.device),
            precision=on.input_precision(self.x.dtype),
        )
        return _sensible(space, self.key())

    def key(self) -> Key:
        """What tells it from others."""
        return self.plan.key

    def family(self, config: Any) -> tuple[int, ...]:
        """The shape of the accumulator, and the threads that hold it."""
        return config.block_m, config.block_n, config.num_warps

    def outputs(self) -> Sequence[Tensor]:
        """Memory as the call's own."""
        raise NotImplementedError

    def run(self, config: Any, outputs: Sequence[Tensor]) -> None:
        """Launches it."""
        raise NotImplementedError

    def samples(self) -> Sequence[Sample]:
        """The truth about some rows of each output."""
        raise NotImplementedError


@dataclass(eq=False)
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

    def outputs(self) -> Sequence[Tensor]:
        return [like(value) for value in (self.out, self.h) if value is not None]

    def run(self, config: Any, outputs: Sequence[Tensor]) -> None:
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
        return truth.of_gemm(self)


@dataclass(eq=False)
class WeightGradient(Product):
    """launch.weight_gradient."""

    d_z: Tensor
    d_weight: Tensor
    z_rows: tl.constexpr
    holes: bool

    def family(self, config: Any) -> tuple[int, ...]:
        return config.block_n, config.block_k, config.num_warps

    def outputs(self) -> Sequence[Tensor]:
        return [like(self.d_weight)]

    def run(self, config: Any, outputs: Sequence[Tensor]) -> None:
        from anabranch.ops.grouped_gemm.backends.triton import launch

        launch.weight_gradient(
            self.d_z,
            self.x,
            self.layout,
            outputs[0],
            z_rows=self.z_rows,
            x_rows=self.x_rows,
            holes=self.holes,
            config=config,
        )

    def samples(self) -> Sequence[Sample]:
        return truth.of_weight_gradient(self)


def _sensible(space: Iterable[GroupedGemmConfig], key: Key) -> list[GroupedGemmConfig]:
    """Those whose tiles are not far from as high as an expert has rows: compiling is what a search spends."""
    if key.kind == tiles.WEIGHT_GRADIENT:
        return list(space)
    low = 64 if key.rows >= 256 else 16
    return [config for config in space if low <= config.block_m <= max(64, 2 * key.rows)]


def like(value: Tensor) -> Tensor:
    """Memory of its own with a tensor's strides, and its address's distance from a multiple of 16 bytes."""
    shift = value.data_ptr() % 16 // value.element_size()
    steps = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps) if value.numel() else 0
    return value.new_empty(span + shift).as_strided(value.shape, value.stride(), shift)
