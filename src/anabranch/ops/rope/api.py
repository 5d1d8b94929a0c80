"""rope and mrope: queries and keys rotated by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from anabranch.ops.rope import autograd, reference
from anabranch.ops.rope.call import RopeCall, bind_mrope, bind_rope
from anabranch.ops.wording import speaks_of


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: Literal["half", "adjacent"] = "half",
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    head_axis: int = 1,
    inplace: bool = False,
    out: tuple[Tensor, Tensor | None] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotates pairs of channels of queries and keys by the angles in ``cos`` and ``sin``.

    Letters: B batch, H heads, S tokens, D channels, r = ``rotary_dim``, W width of a table, P its rows.
    A pair (a, b) of channels becomes ``(a * c - b * s, b * c' + a * s')`` (RoFormer, arXiv 2104.09864). Pairs
    are (i, i + r / 2) with ``pairing="half"`` (Llama, GPT-NeoX) and (2i, 2i + 1) with ``"adjacent"`` (GPT-J).
    Channels from r on come back bit for bit, as do the vectors of positions outside the table.

    Half-width tables (W = r / 2) hold one value a pair: c = c'. Full-width ones (W = r) hold one a channel,
    and each channel uses its own: c and s at a's place, c' and s' at b's. So those of a rotation repeat
    themselves: "half" has two equal halves, "adjacent" each value twice in a row (GPT-J's repeat_interleave).
    DeepSeek-V3's interleaved function has equal halves though its pairs are adjacent, and returns the even
    channels before the odd ones. Give its tables to "adjacent" as ``cos[..., : r // 2]``; the result keeps
    q's order of channels, which no product of q and k depends on.

    Arithmetic is in fp32, fp64 for an fp64 q, and rounds once. Make tables in fp32: 16 bits lose the angle.
    Gradients reach q and k, each only if it is needed; the tables have none. Nothing is saved for them but
    the tables and positions. Derivatives of every order are right.

    Args:
        q: (B, H, S, D), (B, S, H, D) with ``head_axis=2``, or packed (S, H, D); fp16, bf16, fp32 or fp64.
        k: like q, with any number of heads; None rotates q alone.
        cos: (B or 1, S, W), (S, W) or with a dimension of 1 in the heads' place; any float dtype; W is r or
            r / 2. A packed q takes (S, W) or (1, S, W). With ``positions``, (P, W).
        sin: like cos.
        pairing: "half" or "adjacent".
        rotary_dim: how many channels are rotated, from the first; even. None is D.
        positions: (B or 1, S) or (S,), for a packed q (S,), int32 or int64: each token's row of cos and sin.
            A token whose position is outside [0, P) is not rotated (with ANABRANCH_CHECK_VALUES=1 it raises).
        head_axis: where H is, 1 or 2; a packed q has it at 1 whatever is said here.
        inplace: rotates q and k in their own memory and returns them. Refused while a gradient is needed, and
            where two elements of q and k share memory.
        out: where to write the results, a pair of q's and k's shapes, dtype and device, None for a k that is None;
            any strides. Each is q or k itself, in its own place, or apart from all that is read. Refused while a
            gradient is needed.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.

    Returns:
        (q, k) rotated: contiguous tensors of the same shapes and dtype, or the arguments with ``inplace``, or
        ``out``. k is None if it was.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Autocast changes nothing here: q, k and the tables keep their dtypes.
    """
    return _run(
        bind_rope(
            q,
            k,
            cos,
            sin,
            pairing=pairing,
            rotary_dim=rotary_dim,
            positions=positions,
            head_axis=head_axis,
            inplace=inplace,
            out=out,
            backend=backend,
        )
    )


def mrope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    sections: Sequence[int],
    *,
    order: Literal["blocked", "interleaved", "channels"] = "blocked",
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    head_axis: int = 1,
    inplace: bool = False,
    out: tuple[Tensor, Tensor | None] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`rope` for tokens with three positions, temporal, height and width (Qwen2-VL, arXiv 2409.12191).

    Each pair (i, i + r / 2) of channels follows one of the three rows of the tables; both of its channels
    follow the same, but for the last order. With rows that are equal the result is that of rope, bit for bit.

    Letters are those of rope. With i counting pairs, from 0 to r / 2:

    - ``order="blocked"`` (Qwen2-VL, Qwen2.5-VL): the first ``sections[0]`` pairs are temporal, the next
      ``sections[1]`` height, the last ``sections[2]`` width.
    - ``order="interleaved"`` (Qwen3-VL): pairs 1, 4, 7, ... are height, ``sections[1]`` of them; pairs 2, 5,
      8, ... are width, ``sections[2]`` of them; all others are temporal.
    - ``order="channels"`` (wall-x): sections count channels: the first ``sections[0]`` of the r are temporal,
      the next ``sections[1]`` height, the rest width. Each channel takes its own cos and sin from its own row,
      so this is no rotation where a pair's two differ.

    Args:
        q: as in rope.
        k: as in rope.
        cos: (3, B or 1, S, W), packed (3, S, W); W is r or r / 2. Text, whose rows are equal, may give one
            for all: (B or 1, S, W) or (S, W), packed (S, W); this is rope then. With ``positions``, (P, W).
        sin: like cos.
        sections: three ints, not doubled: they add up to r / 2. Interleaved, they must leave room for one
            another: ``3 * sections[1] - 2`` and ``3 * sections[2] - 1`` are pairs, thus below r / 2. For
            "channels" they add up to r.
        order: "blocked", "interleaved" or "channels", which takes tables of W = r and no positions.
        rotary_dim: as in rope.
        positions: (3, B or 1, S), packed (3, S), int32 or int64; for text (B or 1, S) or (S,), packed (S,).
            A pair whose position is outside [0, P) is not rotated.
        head_axis: as in rope.
        inplace: as in rope.
        out: as in rope.
        backend: as in rope.

    Returns:
        (q, k) rotated, as in rope.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).
    """
    return _run(
        bind_mrope(
            q,
            k,
            cos,
            sin,
            sections,
            order=order,
            rotary_dim=rotary_dim,
            positions=positions,
            head_axis=head_axis,
            inplace=inplace,
            out=out,
            backend=backend,
        )
    )


def _rotate(call: RopeCall) -> tuple[Tensor, Tensor | None]:
    if call.backend == "reference":
        return reference.rope(call)
    return autograd.rope(call)


# In the words of an out that holds q and k themselves.
_INTO_OUT = {op: speaks_of({"q": "out[0]", "k": "out[1]"}, op)(_rotate) for op in ("rope", "mrope")}


def _run(call: RopeCall) -> tuple[Tensor, Tensor | None]:
    return _INTO_OUT[call.op](call) if call.out_is_input else _rotate(call)
