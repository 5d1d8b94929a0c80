"""rope in the memory of q and k."""

import pytest
import torch

from anabranch.errors import ArgumentError
from anabranch.ops.rope.api import mrope, rope
from anabranch.testing import assert_same, guard_band, randn, strided

pytestmark = pytest.mark.op("rope")


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "padded", "every_second"])
def test_same_bits(backend, pairing, dtype, layout):
    cos, sin = randn(2, 5, 8), randn(2, 5, 8)
    q, k = (strided(randn(2, h, 5, 18, dtype=dtype), layout) for h in (3, 1))
    kept = q.clone()
    options = dict(rotary_dim=16, pairing=pairing, backend=backend)
    expected = rope(q, k, cos, sin, **options)
    versions = q._version, k._version
    outs = rope(q, k, cos, sin, inplace=True, **options)
    assert outs[0] is q
    assert outs[1] is k
    assert q._version > versions[0]
    assert k._version > versions[1]
    assert not torch.equal(q, kept)
    for x, y in zip((q, k), expected, strict=True):
        assert_same(x, y)


def test_q_alone_and_rows(backend):
    cos, sin = randn(3, 2, 5, 8), randn(3, 2, 5, 8)
    q = randn(2, 5, 3, 8)
    options = dict(sections=[1, 2, 1], head_axis=2, backend=backend)
    expected, _ = mrope(q, None, cos, sin, **options)
    out, none = mrope(q, None, cos, sin, inplace=True, **options)
    assert out is q
    assert none is None
    assert_same(q, expected)


def test_positions_outside_stay(backend):
    q = randn(2, 3, 4, 8)
    cos, sin = randn(3, 8), randn(3, 8)
    positions = torch.tensor([[0, -1, 2, 3], [1, 2, 100, 0]])
    expected, _ = rope(q, None, cos, sin, positions=positions, backend=backend)
    kept = q.clone()
    rope(q, None, cos, sin, positions=positions, inplace=True, backend=backend)
    assert_same(q, expected)
    assert_same(q[0, :, 1], kept[0, :, 1])


def test_guard_bands(backend):
    buffer, check = guard_band((6, 32), torch.float32, columns=8)
    buffer.copy_(randn(6, 32))
    q = buffer.unflatten(1, (4, 8))
    cos, sin = randn(6, 4), randn(6, 4)
    expected, _ = rope(q, None, cos, sin, rotary_dim=8, backend=backend)
    rope(q, None, cos, sin, inplace=True, backend=backend)
    check()
    assert_same(q, expected)


def test_views_of_one_projection(backend):
    qkv = randn(2, 5, 6, 8)
    cos, sin = randn(2, 5, 8), randn(2, 5, 8)
    expected = rope(qkv[:, :, :3], qkv[:, :, 3:5], cos, sin, head_axis=2, backend=backend)
    v = qkv[:, :, 5:].clone()
    rope(qkv[:, :, :3], qkv[:, :, 3:5], cos, sin, head_axis=2, inplace=True, backend=backend)
    assert_same(qkv, torch.cat((*expected, v), 2))


@pytest.mark.parametrize("name", ["q", "k"])
def test_refuses_expanded(backend, name):
    x = {"q": randn(2, 3, 5, 8), "k": randn(2, 3, 5, 8)}
    x[name] = randn(2, 1, 5, 8).expand(2, 3, 5, 8)
    kept = x[name].clone()
    with pytest.raises(ArgumentError, match=f"rope: {name}: expected no two elements in one place"):
        rope(**x, cos=randn(5, 8), sin=randn(5, 8), inplace=True, backend=backend)
    assert_same(x[name], kept)


def test_refuses_shared_memory(backend):
    x = randn(2, 5, 4, 8)
    cos, sin = randn(2, 5, 8), randn(2, 5, 8)
    with pytest.raises(ArgumentError, match="rope: k: expected memory apart from q"):
        rope(x, x, cos, sin, head_axis=2, inplace=True, backend=backend)
    with pytest.raises(ArgumentError, match="rope: k: expected memory apart from q"):
        rope(x[:, :, :3], x[:, :, 2:], cos, sin, head_axis=2, inplace=True, backend=backend)
    with pytest.raises(ArgumentError, match="rope: q: expected memory apart from sin"):
        rope(x[:, :, :2], None, cos, x[:, :, 1], head_axis=2, inplace=True, backend=backend)


def test_refuses_gradients(backend):
    q, cos = randn(2, 3, 5, 8).requires_grad_(), randn(5, 8)
    message = "rope: inplace: expected no tensor that requires grad"
    with pytest.raises(ArgumentError, match=message):
        rope(q, None, cos, cos, inplace=True, backend=backend)
    with pytest.raises(ArgumentError, match=message):
        rope(q.detach(), q, cos, cos, inplace=True, backend=backend)
    with torch.no_grad():
        rope(q, None, cos, cos, inplace=True, backend=backend)
