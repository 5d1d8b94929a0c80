"""rope into memory that the caller gives."""

import pytest
import torch

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.rope.autograd import rope_out
from anabranch.testing import assert_same, guard_band, randn, strided

pytestmark = pytest.mark.op("rope")


def problem(dtype=torch.float32):
    return randn(2, 3, 5, 18, dtype=dtype), randn(2, 1, 5, 18, dtype=dtype), randn(2, 5, 8), randn(2, 5, 8)


def spaces(*like):
    return tuple(torch.full_like(x, float("nan")) for x in like)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "padded", "every_second"])
def test_same_bits(backend, pairing, dtype, layout):
    q, k, cos, sin = problem(dtype)
    kept = q.clone(), k.clone()
    options = dict(rotary_dim=16, pairing=pairing, backend=backend)
    expected = rope(q, k, cos, sin, **options)
    out = tuple(strided(x, layout) for x in spaces(q, k))
    versions = [x._version for x in out]
    found = rope(q, k, cos, sin, out=out, **options)
    for x, y, z, version in zip(found, out, expected, versions, strict=True):
        assert x is y
        assert x._version > version
        assert_same(x, z)
    for x, y in zip((q, k), kept, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("own", ["q", "k", "both", "other_objects"])
def test_in_its_own_place(backend, own):
    q, k, cos, sin = problem()
    options = dict(rotary_dim=16, backend=backend)
    expected = rope(q, k, cos, sin, **options)
    out = (
        q if own in ("q", "both") else torch.empty_like(q),
        k if own in ("k", "both") else torch.empty_like(k),
    )
    if own == "other_objects":
        out = q.detach(), k.view(k.shape)
    found = rope(q, k, cos, sin, out=out, **options)
    for x, y, z in zip(found, out, expected, strict=True):
        assert x is y
        assert_same(x, z)


def test_q_alone_and_rows(backend):
    q, _, cos, sin = problem()
    cos, sin = torch.stack((cos, sin, cos)), torch.stack((sin, cos, sin))
    options = dict(sections=[3, 3, 2], rotary_dim=16, backend=backend)
    expected, _ = mrope(q, None, cos, sin, **options)
    buffer, check = guard_band((30, 18), torch.float32, columns=6)
    out = buffer.unflatten(0, (2, 3, 5))
    found, none = mrope(q, None, cos, sin, out=(out, None), **options)
    check()
    assert found is out
    assert none is None
    assert_same(out, expected)


def test_refuses_shared_memory(backend):
    q, k, cos, sin = problem()
    options = dict(rotary_dim=16, backend=backend)
    buffer = torch.zeros(2, 3, 6, 18)
    for out, message in (
        ((buffer[:, :, 1:], buffer[:, :1, 1:]), r"out\[1\]: expected memory apart from out\[0\]"),
        ((k.expand(2, 3, 5, 18), k.clone()), r"out\[0\]: expected no two elements in one place"),
        ((q.clone(), q[:, :1]), r"out\[1\]: expected memory apart from q"),
    ):
        with pytest.raises(ArgumentError, match=f"rope: {message}"):
            rope(q, k, cos, sin, out=out, **options)
    with pytest.raises(ArgumentError, match=r"rope: out\[0\]: expected memory apart from q"):
        rope(buffer[:, :, :5], None, cos, sin, out=(buffer[:, :, 1:], None), **options)


def test_an_out_that_is_q_goes_by_its_own_name(backend):
    """q and k in their own place are a call in place, which would blame q and k."""
    buffer = torch.ones(200)
    cos = buffer[100:180].view(5, 16)
    q, k = (buffer[i : i + 80].view(1, 1, 5, 16) for i in (30, 0))
    options = dict(cos=cos, sin=torch.ones(5, 16), backend=backend)
    for given, message in (
        (dict(q=q, k=None, out=(q, None)), "out[0]: expected memory apart from cos"),
        (dict(q=k, k=q, out=(k, q)), "out[1]: expected memory apart from out[0]"),
        (dict(q=q, k=None, inplace=True), "q: expected memory apart from cos"),
    ):
        with pytest.raises(ArgumentError) as caught:
            rope(**given, **options)
        assert str(caught.value) == f"rope: {message}, got overlapping memory"
    with pytest.raises(ArgumentError, match=r"mrope: out\[0\]: expected memory apart from cos"):
        mrope(
            q,
            None,
            cos.expand(3, 1, 5, 16),
            cos.expand(3, 1, 5, 16),
            [4, 2, 2],
            out=(q, None),
            backend=backend,
        )


def test_refuses_gradients(backend):
    q, k, cos, sin = problem()
    options = dict(rotary_dim=16, backend=backend)
    for wanting in ((q.clone().requires_grad_(), k), (q, k.clone().requires_grad_())):
        with pytest.raises(ArgumentError, match="rope: out: expected no tensor that requires grad"):
            rope(*wanting, cos, sin, out=spaces(q, k), **options)
        with torch.no_grad():
            rope(*wanting, cos, sin, out=spaces(q, k), **options)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (
            lambda q, k: q,
            ArgumentTypeError,
            "out: expected a pair of tensors, its second None where k is, got Tensor",
        ),
        (lambda q, k: (q, None), ArgumentTypeError, r"out: expected a pair .*, got \(Tensor, NoneType\)"),
        (lambda q, k: (q, k, k), ArgumentTypeError, "out: expected a pair"),
        (lambda q, k: (3, k), ArgumentTypeError, r"out\[0\]: expected a tensor of q's shape, got int"),
        (
            lambda q, k: (q[0], k),
            ArgumentError,
            r"out\[0\]: expected shape of q = \(2, 3, 5, 18\), got shape",
        ),
        (lambda q, k: (q, q), ArgumentError, r"out\[1\]: expected shape of k = \(2, 1, 5, 18\), got shape"),
        (
            lambda q, k: (q.double(), k),
            ArgumentTypeError,
            r"out\[0\]: expected q's dtype float32, got float64",
        ),
    ],
)
def test_refuses(out, error, message):
    q, k, cos, sin = problem()
    with pytest.raises(error, match=f"rope: {message}"):
        rope(q, k, cos, sin, rotary_dim=16, out=out(*spaces(q, k)))


@pytest.mark.cpu
def test_refuses_inplace_beside_it():
    q, k, cos, sin = problem()
    with pytest.raises(ArgumentError, match="rope: out: expected None with inplace, got a pair"):
        rope(q, k, cos, sin, rotary_dim=16, inplace=True, out=(q, k))


@pytest.mark.cpu
@pytest.mark.parametrize("with_k", [True, False])
def test_operator(with_k):
    q, k, cos, sin = problem()
    q_out, k_out = spaces(q, k)
    k, k_out = (k, k_out) if with_k else (None, None)
    rest = (cos, sin, None, "half", 16, 1, [], "blocked", False, None)
    results = torch.library.opcheck(rope_out, (q_out, k_out, q, k, *rest))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.cpu
def test_compiles_whole():
    def step(q, k, cos, sin):
        q_out, q_own = torch.empty_like(q), q.clone()
        rope(q, None, cos, sin, rotary_dim=16, out=(q_out, None))
        rope(q_own, k, cos, sin, rotary_dim=16, out=(q_own, torch.empty_like(k)))
        return q_out, q_own

    torch._dynamo.reset()
    q, k, cos, sin = problem()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(compiled(q, k, cos, sin), step(q, k, cos, sin), strict=True):
        assert_same(mine, eager)
