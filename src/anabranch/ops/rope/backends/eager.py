"""rope and mrope in plain PyTorch, in blocks of tokens that stay in cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anabranch.ops.precision import wide
from anabranch.ops.rope.call import RopeCall
from anabranch.ops.rope.sections import columns

BLOCK = 2**18
"""Elements of a block: its fp32 copies stay in cache, and its work outweighs the calls."""

VECTOR = 8
"""Complex numbers in the widest vector of a CPU."""

Tables = tuple[Tensor | None, ...]
"""cos and sin of the first channels of the pairs, those of the second, and which pairs are rotated; or
cos + i sin, and which pairs are rotated. Each is (B or 1, S, 1, pairs), the last perhaps with 1 for pairs, or
None where all are."""


def supports(call: RopeCall) -> str | None:
    """Everything."""
    return None


def rotate(call: RopeCall, q_out: Tensor, k_out: Tensor | None) -> None:
    """Writes the rotated q and k; q_out and k_out may be q and k themselves."""
    tables = _tables(call)
    for x, out in ((call.q, q_out), (call.k, k_out)):
        if x is not None and out is not None:
            _rotate(call, tables, call.by_token(x), call.by_token(out))


def _tables(call: RopeCall) -> Tables:
    index, inside = _positions(call)
    made = []
    for table in (call.cos, call.sin):
        if call.positions is not None and table.shape[0] == 0:
            table = table.new_zeros(1, table.shape[1])
        halves = [
            _merge(call, half, index, second=i > 0).to(wide(call.dtype)).unsqueeze(2)
            for i, half in enumerate(_halves(call, table))
        ]
        made.append((halves[0], halves[-1]))
    (cos_a, cos_b), (sin_a, sin_b) = made
    if _fills_vectors(call) and _same(cos_a, cos_b) and _same(sin_a, sin_b):
        return torch.complex(cos_a, -sin_a if call.transpose else sin_a).contiguous(), inside
    return cos_a, sin_a, cos_b, sin_b, inside


def _fills_vectors(call: RopeCall) -> bool:
    """Whether to multiply complex numbers: on the CPU, where it is much faster and values can be read.

    Not with pairs left over by the widest vectors: these are rounded otherwise than the same in a vector, and
    bits would depend on how a tensor lies in memory.
    """
    return call.pairing == "adjacent" and call.device.type == "cpu" and call.pairs % VECTOR == 0


def _same(first: Tensor, second: Tensor) -> bool:
    return first is second or torch.equal(first, second)


def _halves(call: RopeCall, table: Tensor) -> list[Tensor]:
    """What a table says of the first channels of the pairs and of the second; one if it is for both."""
    if table.shape[-1] == call.pairs:
        return [table]
    if call.pairing == "half":
        return list(table.split(call.pairs, dim=-1))
    return [table[..., 0::2], table[..., 1::2]]


def _positions(call: RopeCall) -> tuple[Tensor | None, Tensor | None]:
    """Rows of the tables to read, all of which exist, and which pairs these hold for."""
    if call.positions is None:
        return None, None
    inside = (call.positions >= 0) & (call.positions < call.cos.shape[0])
    index = call.positions.clamp(0, max(call.cos.shape[0] - 1, 0))
    # Reading a value costs nothing on the CPU and a synchronisation elsewhere.
    if call.device.type == "cpu" and bool(inside.all()):
        return index, None
    inside = inside.unsqueeze(-1)
    if call.sections:
        inside = _merge(call, inside.expand(*inside.shape[:-1], call.pairs), None)
    return index, inside.unsqueeze(2)


def _merge(call: RopeCall, half: Tensor, index: Tensor | None, *, second: bool = False) -> Tensor:
    """(B or 1, S, pairs) of half a table: looked up by position, each pair from the row that it follows.

    ``second`` is whether that is the half of the pairs' second channels.
    """
    if not call.sections:
        return half if index is None else _lookup(half, index)
    batch, tokens = half.shape[1:3] if index is None else index.shape[1:]
    merged = half.new_empty(batch, tokens, call.pairs)
    for row, pairs in columns(call.sections, call.order, second=second):
        source = half[row, ..., pairs] if index is None else _lookup(half[:, pairs], index[row])
        merged[..., pairs] = source
    return merged


def _lookup(half: Tensor, index: Tensor) -> Tensor:
    return half.index_select(0, index.reshape(-1)).view(*index.shape, half.shape[1])


def _rotate(call: RopeCall, tables: Tables, x: Tensor, out: Tensor) -> None:
    """One of q and k, as (B, S, H, D)."""
    r = call.rotary_dim
    rotate_block = _rotate_complex if len(tables) == 2 else _rotate_pairs
    batch, tokens, heads, channels = x.shape
    size = max(BLOCK // max(heads * channels, 1), 1)
    if batch * tokens <= size:
        rotate_block(call, tables, x[..., :r], out)
    else:
        batches = max(size // tokens, 1)
        for i in range(0, batch, batches):
            for j in range(0, tokens, size):
                block = slice(i, i + batches), slice(j, j + size)
                part = tuple(_at(table, block) for table in tables)
                rotate_block(call, part, x[block][..., :r], out[block])
    if r < channels and not call.inplace:
        out[..., r:] = x[..., r:]


def _at(table: Tensor | None, block: tuple[slice, slice]) -> Tensor | None:
    if table is None:
        return None
    return table[:, block[1]] if table.shape[0] == 1 else table[block]


def _rotate_pairs(call: RopeCall, tables: Any, x: Tensor, out: Tensor) -> None:
    """Pairs (a, b), multiplied by ((cos_a, upper), (lower, cos_b)) but for the signs off the diagonal."""
    r, pairs = call.rotary_dim, call.pairs
    halves = slice(0, pairs), slice(pairs, r)
    first, second = halves if call.pairing == "half" else (slice(0, r, 2), slice(1, r, 2))
    cos_a, sin_a, cos_b, sin_b, inside = tables
    upper, lower, sign = (sin_b, sin_a, 1) if call.transpose else (sin_a, sin_b, -1)
    x = x.to(cos_a.dtype)
    a, b = x[..., first], x[..., second]
    new_a = torch.mul(a, cos_a).addcmul_(b, upper, value=sign)
    new_b = torch.mul(b, cos_b).addcmul_(a, lower, value=-sign)
    if inside is not None:
        new_a, new_b = torch.where(inside, new_a, a), torch.where(inside, new_b, b)
    # Not before both are computed: out may be x.
    out[..., first] = new_a
    out[..., second] = new_b


def _rotate_complex(call: RopeCall, tables: Any, x: Tensor, out: Tensor) -> None:
    """Pairs as complex numbers, times cos + i sin."""
    turn, inside = tables
    x = x.to(turn.real.dtype).contiguous()
    if x.storage_offset() % 2:
        x = x.clone()
    new = torch.view_as_complex(x.unflatten(-1, (call.pairs, 2))) * turn
    new = torch.view_as_real(new).flatten(-2)
    if inside is not None:
        new = torch.where(inside, new, x)
    out[..., : call.rotary_dim] = new
