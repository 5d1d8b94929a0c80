"""Rotary: positions in, rotated queries and keys out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from anabranch.dispatch import check_name
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops import checks
from anabranch.ops.precision import wide
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.rope.call import PAIRINGS
from anabranch.ops.rope.operands import check_head_axis, check_positions, check_rotary_dim, check_vectors
from anabranch.ops.rope.sections import PAIR_ORDERS, check_sections
from anabranch.ops.wording import speaks_of


class Rotary(nn.Module):
    """Rotary position embeddings (RoFormer, arXiv 2104.09864): :func:`anabranch.rope`, or with ``sections``
    :func:`anabranch.mrope`, with tables made from the positions.

    Pair i of channels turns by ``position * base ** (-2 * i / rotary_dim)``. The module has no parameter
    and no buffer, so no cast, device move or initialisation from the meta device can harm its frequencies:
    angles are computed in fp64 each time, and cosine and sine rounded once, to fp32 (they stay fp64 for an
    fp64 q). An angle in fp32 would be off by 0.01 at position 131071, more than bf16 resolves.

    Args:
        dim: D, channels of a head.
        base: of the frequencies, theta.
        pairing: ``"half"`` pairs channel i with i + rotary_dim / 2, ``"adjacent"`` 2i with 2i + 1.
        sections: pairs of channels that follow temporal, height and width positions (Qwen2-VL, arXiv
            2409.12191), three ints that add up to rotary_dim / 2; None where tokens have one position.
        order: of the sections, ``"blocked"`` (Qwen2-VL) or ``"interleaved"`` (Qwen3-VL).
        rotary_dim: how many channels turn, from the first; None is D. Frequencies are those of rotary_dim.
        head_axis: where q and k have their heads: 1 for (B, H, S, D), 2 for (B, S, H, D).
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.
    """

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        pairing: Literal["half", "adjacent"] = "half",
        sections: Sequence[int] | None = None,
        order: Literal["blocked", "interleaved"] = "blocked",
        rotary_dim: int | None = None,
        head_axis: int = 1,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        checks.integer("Rotary", "dim", dim, minimum=2)
        if rotary_dim is None and dim % 2:
            raise ArgumentError("Rotary", "dim", expected="an even number without rotary_dim", got=dim)
        rotary_dim = check_rotary_dim("Rotary", rotary_dim, dim, "dim")
        if isinstance(base, bool) or not isinstance(base, (int, float)):
            raise ArgumentTypeError("Rotary", "base", expected="a float", got=type(base).__name__)
        if not 0 < base <= sys.float_info.max:
            raise ArgumentError("Rotary", "base", expected="a finite float above 0", got=base)
        checks.choice("Rotary", "pairing", pairing, PAIRINGS)
        checks.choice("Rotary", "order", order, PAIR_ORDERS)
        check_head_axis("Rotary", head_axis)
        check_name("Rotary", backend)
        if sections is not None:
            sections = check_sections("Rotary", sections, order, rotary_dim // 2)
            if pairing != "half":
                raise ArgumentError("Rotary", "pairing", expected="'half' with sections", got=repr(pairing))
        self.dim = dim
        self.base = float(base)
        self.pairing = pairing
        self.sections = sections
        self.order = order
        self.rotary_dim = rotary_dim
        self.head_axis = head_axis
        self.backend = backend

    def tables(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(cos, sin) of integer positions, of shape (*positions.shape, rotary_dim / 2).

        Layers that share positions can share them too: hand them to :func:`anabranch.rope`.
        """
        checks.dense("Rotary", "positions", positions, "of any rank", checks.INTEGERS)
        checks.float_dtype("Rotary", dtype)
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float64, device=positions.device)
        frequencies = torch.pow(self.base, -2 * pairs / self.rotary_dim)
        angles = positions.unsqueeze(-1) * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @speaks_of(name="Rotary")
    def forward(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotates q and k.

        Args:
            q: (B, H, S, D), (B, S, H, D) with ``head_axis=2``, or packed (S, H, D).
            k: like q, with any number of heads; None rotates q alone.
            positions: (B or 1, S) or (S,) int32 or int64, (S,) for a packed q. With sections also (3, B or
                1, S), packed (3, S); without the 3 all sections follow the one position.

        Returns:
            (q, k) rotated, in their own shapes and dtype.
        """
        sizes = check_vectors("Rotary", q, k, self.head_axis, positions)
        if sizes.channels != self.dim:
            expected = f"a last dimension D = {self.dim}"
            raise ArgumentError("Rotary", "q", expected=expected, got=f"shape {tuple(q.shape)}")
        check_positions("Rotary", positions, sizes, rows=self.sections is not None)
        checks.same_device("Rotary", q, "q", positions=positions)
        cos, sin = self.tables(positions, wide(q.dtype))
        if self.sections is None:
            return rope(
                q,
                k,
                cos,
                sin,
                pairing=self.pairing,
                rotary_dim=self.rotary_dim,
                head_axis=self.head_axis,
                backend=self.backend,
            )
        return mrope(
            q,
            k,
            cos,
            sin,
            self.sections,
            order=self.order,
            rotary_dim=self.rotary_dim,
            head_axis=self.head_axis,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """The arguments, without those at their defaults."""
        shown = [f"{self.dim}, base={self.base}"]
        shown += [f"pairing={self.pairing!r}"] if self.pairing != "half" else []
        if self.sections is not None:
            shown += [f"sections={list(self.sections)}, order={self.order!r}"]
        shown += [f"rotary_dim={self.rotary_dim}"] if self.rotary_dim != self.dim else []
        shown += [f"head_axis={self.head_axis}"] if self.head_axis != 1 else []
        shown += [f"backend={self.backend!r}"] if self.backend is not None else []
        return ", ".join(shown)
