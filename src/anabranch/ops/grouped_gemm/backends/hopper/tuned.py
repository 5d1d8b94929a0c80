"""What the tuner has to know of Hopper's products: Triton's, of the same truth, launched with other configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from anabranch._backends.triton import device as on
from anabranch.ops.grouped_gemm.backends.hopper import config as tiles
from anabranch.ops.grouped_gemm.backends.hopper import unused
from anabranch.ops.grouped_gemm.backends.hopper.config import Config
from anabranch.ops.grouped_gemm.backends.triton import tuned
from anabranch.ops.grouped_gemm.backends.triton.kernels import TOKEN
from anabranch.tuning import Sample
from anabranch.tuning.search import NothingToCheck

if TYPE_CHECKING:
    from anabranch.ops.grouped_gemm.backends.hopper.launch import Rows


@dataclass(eq=False)
class Gemm(tuned.Gemm):
    """launch.gemm."""

    rows: Rows

    def refusal(self, config: Config) -> str | None:
        return tiles.legal(config, tiles.shared_memory(config), on.shared_memory_limit(self.device))

    def candidates(self, default: Config) -> Sequence[Config]:
        lags = (2,) if self.x_rows is TOKEN else ()
        # A reduction of few stages has its halves side by side.
        deep = self.weight.shape[2] > default.block_k * (default.num_stages - 1)
        space = tiles.search_space(default, tiles.VARIANTS, (0, 1) if deep else (), lags, halves=True)
        return [config for config in space if self.refusal(config) is None]

    def family(self, config: Config) -> tuple[int, ...]:
        return tiles.family(config)

    def run(self, config: Config, outputs: Sequence[Tensor]) -> None:
        from anabranch.ops.grouped_gemm.backends.hopper import launch

        launch.gemm(
            self.x,
            self.weight,
            self.rows,
            outputs[0],
            h=outputs[1] if len(outputs) > 1 else None,
            bias=self.bias,
            epilogue=self.epilogue,
            interleaved=self.interleaved,
            gathered=self.x_rows is TOKEN,
            config=config,
        )
        clear_unused(self.rows, outputs)


@dataclass(eq=False)
class WeightGradient(tuned.WeightGradient):
    """launch.weight_gradient, whose operands a and b are d_z and x here."""

    rows: Rows

    def refusal(self, config: Config) -> str | None:
        return tiles.legal(config, tiles.shared_memory(config), on.shared_memory_limit(self.device))

    def candidates(self, default: Config) -> Sequence[Config]:
        space = tiles.search_space(default, tiles.VARIANTS)
        return [config for config in space if self.refusal(config) is None]

    def family(self, config: Config) -> tuple[int, ...]:
        return tiles.family(config)

    def run(self, config: Config, outputs: Sequence[Tensor]) -> None:
        from anabranch.ops.grouped_gemm.backends.hopper import launch

        launch.weight_gradient(
            self.d_z,
            self.x,
            self.rows,
            outputs[0],
            a_gathered=self.z_rows is TOKEN,
            b_gathered=self.x_rows is TOKEN,
            config=config,
        )

    def samples(self) -> Sequence[Sample]:
        if self.rows.holes:
            raise NothingToCheck  # what lies in rows without a slot counts here, and a pass of its own puts it right
        return super().samples()


def clear_unused(rows: Rows, outputs: Sequence[Tensor]) -> None:
    """Zeros in rows of a trial's outputs that are nobody's, which kernels leave alone, if there are any."""
    if rows.partial:
        for value in outputs:
            unused.clear(value, rows.offsets, rows.row_to_slot)
