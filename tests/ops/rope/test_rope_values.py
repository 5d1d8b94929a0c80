"""Values and gradients of rope, on every backend, by the oracle of complex numbers."""

import pytest
import torch

from anabranch.ops.rope.api import rope
from anabranch.ops.rope.backends import eager
from anabranch.testing import assert_same, assert_within_budget, randn, strided

pytestmark = pytest.mark.op("rope")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def make_angles(*positions_shape, pairs, base=500_000.0, positions=None):
    """Angles (..., S, pairs) in fp64: those of positions from 0, or of the given ones."""
    if positions is None:
        positions = torch.arange(positions_shape[-1]).expand(positions_shape)
    return positions.double().unsqueeze(-1) * base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)


def widen(table, pairing):
    return torch.cat((table, table), -1) if pairing == "half" else table.repeat_interleave(2, -1)


def run(q, k, grads, cos, sin, **kwargs):
    """Outputs and gradients of q and k."""
    leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
    outs = rope(*leaves, cos, sin, **kwargs)
    return (*(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, grads))


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "r", "head_axis"),
    [
        ((2, 3, 5, 16), (2, 1, 5, 16), 16, 1),
        ((2, 5, 3, 16), (2, 5, 2, 16), 16, 2),
        ((5, 3, 16), (5, 1, 16), 16, 1),
        ((5, 3, 16), (5, 7, 16), 6, 2),
        ((1, 2, 2, 128), (1, 1, 2, 128), 128, 1),
        ((1, 2, 1, 128), (1, 1, 1, 128), 128, 1),
        ((2, 3, 4, 128), (2, 2, 4, 128), 32, 1),
        ((2, 3, 4, 80), (2, 2, 4, 80), 20, 1),
        ((2, 4, 3, 64), (2, 4, 1, 64), 16, 2),
        ((1, 2, 3, 256), (1, 1, 3, 256), 64, 1),
        ((2, 3, 5, 2), (2, 1, 5, 2), 2, 1),
    ],
    ids=str,
)
def test_against_complex_numbers(backend, oracle, baseline, pairing, dtype, q_shape, k_shape, r, head_axis):
    packed = len(q_shape) == 3
    tokens = q_shape[0] if packed else q_shape[3 - head_axis]
    angles = make_angles(1 if packed else q_shape[0], tokens, pairs=r // 2) * 7
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    # The oracle turns by the angle that the rounded tables hold; their length is 1 up to that rounding.
    options = dict(pairing=pairing, head_axis=head_axis)
    q, k, dq, dk = (randn(*shape, dtype=dtype) for shape in (q_shape, k_shape) * 2)
    results = run(q, k, (dq, dk), cos, sin, rotary_dim=r, backend=backend, **options)
    inputs = (q, k, dq, dk)
    for name, x, y, sign in zip(("q", "k", "dq", "dk"), inputs, results, (1, 1, -1, -1), strict=True):
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_same(y[..., r:], x[..., r:], name=name)
        guess = baseline(x, cos, sign * sin, **options)
        truth = oracle(x, sign * angles, **options)
        if dtype == torch.float64:
            # The oracle rounds as often as the result.
            guess = truth + 2.0**-51 * truth.abs().amax()
        assert_within_budget(y, truth, guess, name=name)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("pairs", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_width_is_half_width(backend, pairing, pairs, dtype):
    angles = make_angles(2, 5, pairs=pairs)
    cos, sin = angles.cos().float(), angles.sin().float()
    q, k, dq, dk = (randn(2, h, 5, 2 * pairs, dtype=dtype) for h in (3, 2, 3, 2))
    half = run(q, k, (dq, dk), cos, sin, pairing=pairing, backend=backend)
    full = run(q, k, (dq, dk), widen(cos, pairing), widen(sin, pairing), pairing=pairing, backend=backend)
    assert not torch.equal(half[0], q)
    for a, b in zip(half, full, strict=True):
        assert_same(a, b)


@pytest.mark.fp64
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_every_channel_uses_its_own_entry(backend, pairing):
    cos, sin = randn(2, 5, 8, dtype=torch.float64), randn(2, 5, 8, dtype=torch.float64)
    first, second = (slice(0, 4), slice(4, 8)) if pairing == "half" else (slice(0, 8, 2), slice(1, 8, 2))
    q, k, dq, dk = (randn(2, h, 5, 8, dtype=torch.float64) for h in (3, 2, 3, 2))
    results = run(q, k, (dq, dk), cos, sin, pairing=pairing, backend=backend)
    c, s = cos[:, None], sin[:, None]
    for x, y in zip((q, k), results[:2], strict=True):
        a, b = x[..., first], x[..., second]
        torch.testing.assert_close(y[..., first], a * c[..., first] - b * s[..., first])
        torch.testing.assert_close(y[..., second], b * c[..., second] + a * s[..., second])
    for d, dx in zip((dq, dk), results[2:], strict=True):
        a, b = d[..., first], d[..., second]
        torch.testing.assert_close(dx[..., first], a * c[..., first] + b * s[..., second])
        torch.testing.assert_close(dx[..., second], b * c[..., second] - a * s[..., first])


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_of_any_dtype(backend, baseline, dtype, table_dtype):
    cos, sin = randn(2, 5, 8, dtype=table_dtype), randn(2, 5, 8, dtype=table_dtype)
    q = randn(2, 3, 5, 16, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    y, none = rope(q, None, cos, sin, backend=backend)
    assert none is None
    truth = baseline(q.double(), cos.to(wide).double(), sin.to(wide).double())
    guess = baseline(q, cos.to(wide), sin.to(wide))
    if dtype == torch.float64:
        guess = truth + 2.0**-51 * truth.abs().amax()
    assert_within_budget(y, truth, guess)


def test_fp32_tables_keep_far_positions(backend, oracle):
    positions = torch.tensor([[0, 1, 257, 1857, 8191, 131071]])
    angles = make_angles(pairs=64, positions=positions)
    cos, sin = angles.cos().float(), angles.sin().float()
    q = randn(1, 4, 6, 128, dtype=torch.bfloat16)
    y, _ = rope(q, None, cos, sin, backend=backend)
    truth = oracle(q, angles)
    ulp = 2.0 ** (truth.abs().clamp(min=1e-3).log2().floor() - 7)
    assert ((y.double() - truth).abs() <= ulp).all()
    # What the test is worth: positions held in bf16, as models under a blanket cast do, are far off.
    lost = make_angles(pairs=64, positions=positions.bfloat16())
    wrong, _ = rope(q, None, lost.cos().float(), lost.sin().float(), backend=backend)
    assert ((wrong.double() - truth).abs() > 16 * ulp).any()


POSITIONS = [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]


@pytest.mark.parametrize("head_axis", [1, 2])
@pytest.mark.parametrize("shape", ["BSW", "B1SW", "1SW", "11SW", "SW", "expanded"])
def test_broadcast_tables(backend, oracle, shape, head_axis):
    rows = torch.tensor(POSITIONS) if shape in ("BSW", "B1SW") else torch.tensor(POSITIONS[:1])
    angles = make_angles(pairs=4, positions=rows)
    q = randn(3, 2, 5, 8) if head_axis == 1 else randn(3, 5, 2, 8)
    truth = oracle(q, angles, head_axis=head_axis)
    given = angles
    if shape in ("B1SW", "11SW"):
        given = angles.unsqueeze(head_axis)
    elif shape == "SW":
        given = angles[0]
    elif shape == "expanded":
        given = angles.expand(3, -1, -1)
    y, _ = rope(q, None, given.cos().float(), given.sin().float(), head_axis=head_axis, backend=backend)
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["transposed", "offset", "padded", "every_second", "expanded_columns"])
@pytest.mark.parametrize(("pairing", "channels"), [("half", 8), ("adjacent", 8), ("adjacent", 16)])
@pytest.mark.parametrize("head_axis", [1, 2])
def test_any_strides(backend, layout, pairing, channels, head_axis):
    shapes = [(2, h, 5) if head_axis == 1 else (2, 5, h) for h in (3, 2, 3, 2)]
    q, k, dq, dk = (strided(randn(*shape, channels), layout) for shape in shapes)
    cos, sin = (strided(randn(2, 5, 8), layout) for _ in range(2))
    options = dict(pairing=pairing, head_axis=head_axis, backend=backend)
    results = run(q, k, (dq, dk), cos, sin, **options)
    q, k, dq, dk, cos, sin = (x.contiguous() for x in (q, k, dq, dk, cos, sin))
    again = run(q, k, (dq, dk), cos, sin, **options)
    for a, b in zip(results, again, strict=True):
        assert a.is_contiguous()
        assert_same(a, b)


@pytest.mark.parametrize("shape", [(1, 5, 1, 8), (2, 3, 4, 8)])
def test_transposed_views(backend, shape):
    """q and k as models make them: (B, S, H, D) in memory, one head in k."""
    base = randn(*shape)
    cos, sin = randn(shape[1], 8), randn(shape[1], 8)
    _, view = rope(base.transpose(1, 2), base[:, :, :1].transpose(1, 2), cos, sin, backend=backend)
    expected, _ = rope(base[:, :, :1].contiguous(), None, cos, sin, head_axis=2, backend=backend)
    assert not torch.equal(view, base[:, :, :1].transpose(1, 2))
    assert_same(view, expected.transpose(1, 2))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8), (0, 3, 8), (3, 0, 8)], ids=str)
def test_empty(backend, shape):
    q = torch.randn(shape, requires_grad=True)
    tokens = shape[0] if len(shape) == 3 else shape[2]
    for positions, rows in ((None, tokens), (torch.zeros(tokens, dtype=torch.int64), 4)):
        cos = torch.ones(rows, 8)
        y, z = rope(q, q.detach(), cos, cos, positions=positions, backend=backend)
        assert y.shape == z.shape == shape
        (grad,) = torch.autograd.grad(y.sum(), q)
        assert grad.shape == shape


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_blocks_change_nothing(backend, pairing, monkeypatch):
    cos, sin, more = randn(3, 7, 8), randn(3, 7, 8), randn(1, 7, 8)
    q = randn(3, 2, 7, 18)
    index = torch.randint(-1, 8, (3, 7))
    options = dict(rotary_dim=16, pairing=pairing, backend=backend)
    calls = [
        lambda: rope(q, q, cos, sin, **options),
        lambda: rope(q, q, more, more, **options),
        lambda: rope(q, q, cos[0], sin[0], positions=index, **options),
    ]
    whole = [call() for call in calls]
    for size in (1, 45, 150, 300):
        monkeypatch.setattr(eager, "BLOCK", size)
        for call, expected in zip(calls, whole, strict=True):
            for a, b in zip(call(), expected, strict=True):
                assert_same(a, b)


def test_autocast_changes_nothing(backend, device):
    q, cos, sin = randn(2, 3, 5, 8), randn(5, 8), randn(5, 8)
    expected, _ = rope(q, None, cos, sin, backend=backend)
    with torch.autocast(device, torch.bfloat16):
        y, _ = rope(q, None, cos, sin, backend=backend)
    assert_same(y, expected)
