"""Named shapes of real models, with the tables their angles make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """The heads of one attention layer, and how it rotates them."""

    name: str
    q_heads: int
    k_heads: int
    channels: int
    rotary_dim: int | None = None
    pairing: str = "half"
    half_width: bool = False
    sections: Sequence[int] = ()
    order: str = "blocked"
    packed: bool = False
    base: float = 10_000.0

    @property
    def width(self) -> int:
        """rotary_dim, where it is D too."""
        return self.rotary_dim or self.channels

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (..., W) in fp32 of positions (...), with the angles computed in fp64."""
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        angles = positions.double().unsqueeze(-1) * self.base**-exponent
        if not self.half_width:
            angles = (
                torch.cat((angles, angles), -1) if self.pairing == "half" else angles.repeat_interleave(2, -1)
            )
        return angles.cos().float(), angles.sin().float()

    def arguments(
        self,
        batch: int,
        tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> dict[str, Any]:
        """Arguments of rope, or of mrope where there are sections; a packed case takes a batch of 1."""

        def draw(heads: int) -> Tensor:
            shape = (tokens, heads) if self.packed else (batch, heads, tokens)
            x = torch.randn(*shape, self.channels, generator=generator, dtype=torch.float64)
            return x.to(device, dtype)

        positions = torch.arange(tokens, device=device)
        if self.sections:
            # Text up to the middle, an image eight patches wide after it.
            image = (positions - tokens // 2).clamp(min=0)
            start = torch.minimum(positions, positions.new_tensor(tokens // 2))
            rows = torch.stack((start, start + image // 8, start + image % 8))
            positions = rows.unsqueeze(1).expand(-1, batch, -1)
        cos, sin = self.tables(positions)
        arguments: dict[str, Any] = {"q": draw(self.q_heads), "k": draw(self.k_heads), "cos": cos, "sin": sin}
        if self.sections:
            return {
                **arguments,
                "sections": list(self.sections),
                "order": self.order,
                "rotary_dim": self.rotary_dim,
            }
        return {**arguments, "pairing": self.pairing, "rotary_dim": self.rotary_dim}


CASES = (
    Case("llama3_8b", 32, 8, 128, base=500_000.0),
    Case("qwen3_30b_a3b", 32, 4, 128, base=1_000_000.0),
    Case("gpt_oss_20b", 64, 8, 64, half_width=True, base=150_000.0),
    Case("deepseek_v3", 128, 1, 64, pairing="adjacent", half_width=True),
    Case("gpt_j_6b", 16, 16, 256, rotary_dim=64, pairing="adjacent"),
    Case("gpt_neox_20b", 64, 64, 96, rotary_dim=24),
    Case("phi_2", 32, 32, 80, rotary_dim=32),
    Case("qwen2_vl_7b", 28, 4, 128, sections=(16, 24, 24), base=1_000_000.0),
    Case("qwen2_vl_vision", 16, 16, 80, packed=True),
    Case("qwen3_vl_8b", 32, 8, 128, sections=(24, 20, 20), order="interleaved", base=5_000_000.0),
    Case("qwen3_5_35b_a3b", 16, 2, 256, rotary_dim=64, sections=(11, 11, 10), order="interleaved", base=1e7),
)
