"""Rotary: tables from positions, checked against Python's own cosine and against transformers."""

import math

import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.nn import Rotary
from anabranch.ops.rope.api import mrope
from anabranch.testing import assert_same, randn

B, HQ, HK, S, D = 2, 3, 1, 5, 16
FAR = [0, 1, 257, 1857, 8191, 131071]


def turned(x, positions, dim, base, adjacent=False):
    """x (..., S, D) in fp64, the first dim channels rotated by Python's cosine."""
    out = x.double().clone()
    for s, position in enumerate(positions):
        for i in range(dim // 2):
            angle = position * base ** (-2 * i / dim)
            a, b = (2 * i, 2 * i + 1) if adjacent else (i, i + dim // 2)
            c, d = math.cos(angle), math.sin(angle)
            out[..., s, a] = x[..., s, a].double() * c - x[..., s, b].double() * d
            out[..., s, b] = x[..., s, b].double() * c + x[..., s, a].double() * d
    return out


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_rotates(pairing, rotary_dim):
    rotary = Rotary(D, base=500.0, pairing=pairing, rotary_dim=rotary_dim)
    q, k = (randn(B, h, S, D, dtype=torch.float64).requires_grad_() for h in (HQ, HK))
    positions = torch.tensor([7, 0, 3, 3, 1000])
    found = rotary(q, k, positions)
    for x, y in zip((q, k), found, strict=True):
        expected = turned(x, positions.tolist(), rotary_dim or D, 500.0, pairing == "adjacent")
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    (found[0].sum() + found[1].sum()).backward()
    assert q.grad.isfinite().all()
    assert (k.grad != 0).any()


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=str)
def test_far_positions_in_bf16(cast):
    rotary = nn.Sequential(Rotary(128, base=500000.0)).to(cast)[0]
    q = randn(1, 2, len(FAR), 128, dtype=torch.bfloat16)
    y, none = rotary(q, None, torch.tensor([FAR]))
    assert none is None
    truth = turned(q, FAR, 128, 500000.0)
    # One unit in the last place: rounding takes half, the tables' own rounding next to nothing.
    ulp = torch.finfo(torch.bfloat16).eps * 2.0 ** truth.abs().log2().floor()
    assert ((y.double() - truth).abs() <= ulp).all()
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tables_are_rounded_once(dtype):
    cos, sin = Rotary(128, base=500000.0).tables(torch.tensor(FAR), dtype)
    assert cos.shape == sin.shape == (len(FAR), 64)
    angles = [[p * 500000.0 ** (-2 * i / 128) for i in range(64)] for p in FAR]
    for table, function in ((cos, math.cos), (sin, math.sin)):
        truth = torch.tensor([[function(a) for a in row] for row in angles], dtype=torch.float64)
        # An angle near 1e5 rounds by 1e-11 even in fp64.
        bound = torch.finfo(dtype).eps / 2 * truth.abs() + 1e-10
        assert ((table.double() - truth).abs() <= bound).all()


def test_same_as_transformers():
    config = LlamaConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D)
    config.rope_parameters = dict(rope_type="default", rope_theta=10000.0)
    q, k, positions = randn(B, 4, S, D), randn(B, 2, S, D), torch.tensor([[0, 1, 2, 0, 1], [9, 30, 2, 3, 4]])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    for found, expected in zip(Rotary(D)(q, k, positions), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["blocked", "interleaved"])
def test_sections(order):
    rotary = Rotary(D, sections=[4, 2, 2], order=order)
    q, k = randn(B, HQ, S, D), randn(B, HK, S, D)
    positions = torch.randint(0, 50, (3, B, S))
    cos, sin = rotary.tables(positions)
    assert cos.shape == (3, B, S, D // 2)
    for found, expected in zip(
        rotary(q, k, positions), mrope(q, k, cos, sin, [4, 2, 2], order=order), strict=True
    ):
        assert_same(found, expected)
    rows = {"blocked": [0, 0, 0, 0, 1, 1, 2, 2], "interleaved": [0, 1, 2, 0, 1, 2, 0, 0]}[order]
    for pair, row in enumerate(rows):
        y, _ = Rotary(D)(q, k, positions[row])
        both = [pair, pair + D // 2]
        assert_same(rotary(q, k, positions)[0][..., both], y[..., both])


def test_text_positions_with_sections_are_plain():
    q, k, positions = randn(B, HQ, S, D), randn(B, HK, S, D), torch.randint(0, 50, (B, S))
    plain = Rotary(D)(q, k, positions)
    for rows in (positions, positions.expand(3, B, S)):
        for found, expected in zip(Rotary(D, sections=[2, 3, 3])(q, k, rows), plain, strict=True):
            assert_same(found, expected)


def test_layouts():
    q, k, positions = randn(B, HQ, S, D), randn(B, HK, S, D), torch.randint(0, 50, (B, S)).int()
    expected = Rotary(D)(q, k, positions)
    swapped = Rotary(D, head_axis=2)(q.transpose(1, 2), k.transpose(1, 2), positions)
    packed = Rotary(D)(q[0].transpose(0, 1), k[0].transpose(0, 1), positions[0])
    for a, b, c in zip(expected, swapped, packed, strict=True):
        assert_same(b.transpose(1, 2), a)
        assert_same(c.transpose(0, 1), a[0])


def test_inputs_are_left_alone():
    q, k = randn(B, HQ, S, D), randn(B, HK, S, D)
    kept = q.clone(), k.clone()
    Rotary(D)(q, k, torch.arange(S))
    assert_same(q, kept[0])
    assert_same(k, kept[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(dim=15), ArgumentError, "dim: expected an even number without rotary_dim, got 15"),
        (dict(rotary_dim=7), ArgumentError, "rotary_dim: expected an even number up to dim = 16, got 7"),
        (dict(rotary_dim=18), ArgumentError, "rotary_dim: expected an even number up to dim = 16, got 18"),
        (dict(base=0), ArgumentError, "base: expected a finite float above 0, got 0"),
        (dict(base=float("inf")), ArgumentError, "base: expected a finite float above 0, got inf"),
        (dict(base=10**400), ArgumentError, "base: expected a finite float above 0, got 1000"),
        (dict(base="1"), ArgumentTypeError, "base: expected a float, got str"),
        (dict(pairing="none"), ArgumentError, "pairing: expected 'half' or 'adjacent', got 'none'"),
        (dict(order="none"), ArgumentError, "order: expected 'blocked' or 'interleaved', got 'none'"),
        (dict(head_axis=3), ArgumentError, "head_axis: expected 1 or 2, got 3"),
        (dict(sections=[4, 4, 4]), ArgumentError, "sections: expected three sizes that add up to .* = 8"),
        (
            dict(sections=[4, 2, 2], pairing="adjacent"),
            ArgumentError,
            "pairing: expected 'half' with sections",
        ),
    ],
)
def test_wrong_options(arguments, error, message):
    with pytest.raises(error, match=f"Rotary: {message}"):
        Rotary(**(dict(dim=D) | arguments))


def test_tables_of_integers_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"^Rotary: dtype: expected None or float16 or .*, got int32"):
        Rotary(D).tables(torch.arange(3), torch.int32)


def test_wrong_inputs():
    q, k, positions = randn(B, HQ, S, D), randn(B, HK, S, D), torch.arange(S)
    rotary = Rotary(D)
    with pytest.raises(ArgumentError, match="Rotary: q: expected a last dimension D = 16"):
        rotary(q[..., :8], k[..., :8], positions)
    with pytest.raises(ArgumentTypeError, match="Rotary: positions: expected"):
        rotary(q, k, positions.float())
    with pytest.raises(ArgumentError, match="Rotary: positions: expected"):
        rotary(q, k, positions[:-1])
    with pytest.raises(ArgumentError, match="Rotary: positions: expected"):
        rotary(q, k, positions.expand(3, B, S))
    with pytest.raises(ArgumentError, match=r"Rotary: k: .*, which fits head_axis=2$"):
        rotary(q.transpose(1, 2), k.transpose(1, 2), positions)
    with pytest.raises(NotImplementedError, match="Rotary: backend: expected a backend that can"):
        Rotary(D, backend="hopper")(q, k, positions)
    with pytest.raises(ArgumentError, match="Rotary: k: expected"):
        rotary(q, k[:, :, :-1], positions)


def test_has_no_state():
    rotary = Rotary(D)
    assert not rotary.state_dict()
    assert not list(rotary.buffers())


def test_repr():
    assert repr(Rotary(16)) == "Rotary(16, base=10000.0)"
    assert repr(Rotary(16, base=5e5, sections=(4, 2, 2), order="interleaved", head_axis=2)) == (
        "Rotary(16, base=500000.0, sections=[4, 2, 2], order='interleaved', head_axis=2)"
    )
    assert repr(Rotary(16, pairing="adjacent", rotary_dim=8)) == (
        "Rotary(16, base=10000.0, pairing='adjacent', rotary_dim=8)"
    )
