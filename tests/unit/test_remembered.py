"""Calls that are remembered give the bits of calls that are not, and are made by their launches alone.

TRITON_INTERPRET=1 pytest tests/unit/test_remembered.py interprets them; on a GPU the launches are in C.
"""

from functools import lru_cache

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm, moe_mlp, multi_gemm, permute, rope, topk_router, unpermute
from anabranch.ops.grouped_gemm import routed
from anabranch.testing import assert_same, randn, routing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
T, H, E, K = 32, 32, 2, 2
CALLS = 5


def ids_of(seed):
    return routing(T, E, K, dropped=0.1, generator=torch.Generator().manual_seed(seed))


def leaf(*shape, dtype=torch.float16):
    return randn(*shape, dtype=dtype).requires_grad_()


def with_gradients(out, *leaves):
    return [out.detach(), *torch.autograd.grad(out, leaves, randn(*out.shape, dtype=out.dtype))]


def gathering(seed, backend):
    layout = ExpertLayout.from_topk(ids_of(seed), E)
    x, weight, bias = leaf(T, H), leaf(E, 64, H), leaf(E, 64)
    out = grouped_gemm(x, weight, layout, gather=True, bias=bias, activation="swiglu", backend=backend)
    return with_gradients(out, x, weight, bias)


def scattering(seed, backend):
    layout = ExpertLayout.from_topk(ids_of(seed), E)
    x, weight, scale = leaf(T * K, H), leaf(E, H, H).mT, leaf(T, K)
    return with_gradients(
        grouped_gemm(x, weight, layout, scatter=True, scale=scale, backend=backend), x, scale
    )


def sorting_within(seed, backend):
    layout = ExpertLayout.from_topk(ids_of(seed), E)
    x, weight, scale = leaf(T * K, H), leaf(E, H, H), leaf(T, K)
    layout_of = layout.counts, layout.row_to_slot, K
    y = routed.grouped_gemm(x, weight, *layout_of, scatter=True, scale=scale, backend=backend)
    return with_gradients(y, x, weight, scale)


def in_order(seed, backend):
    counts = torch.tensor([3 + seed, 40])
    layout = ExpertLayout.from_counts(counts, T * K)
    x, weight = leaf(T * K, H), leaf(E, H, H)
    return with_gradients(grouped_gemm(x, weight, layout, backend=backend), x, weight)


def mlp(seed, backend, **options):
    leaves = leaf(T, H), leaf(E, 2 * H, H), leaf(E, H, H)
    weights, biases = leaf(T, K, dtype=torch.float32), (leaf(E, 2 * H), leaf(E, H))
    out = moe_mlp(
        *leaves,
        ids_of(seed),
        weights,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        backend=backend,
        **options,
    )
    return with_gradients(out, *leaves, weights, *biases)


def mlp_on_input(seed, backend):
    return mlp(seed, backend, weight_on="input", save="inputs", gate_layout="interleaved")


def permuting(seed, backend):
    layout = ExpertLayout.from_topk(ids_of(seed), E)
    x, weights = leaf(T, H), leaf(T, K)
    rows = permute(x, layout, backend=backend)
    return with_gradients(unpermute(rows, layout, weights, backend=backend), x, weights)


def rotating(seed, backend):
    q, k = leaf(1, T, 2, 16).transpose(1, 2), leaf(1, T, 1, 16).transpose(1, 2)
    cos, sin = randn(1, T, 16), randn(1, T, 16)
    return with_gradients(rope(q, k, cos, sin, backend=backend)[0], q)


def choosing(seed, backend):
    logits = leaf(T, 8)
    weights, ids = topk_router(logits, K, backend=backend)
    return [ids, *with_gradients(weights, logits)]


def one_x_twice(seed, backend):
    x, weights = leaf(T, H), [leaf(64, H), leaf(48, H)]
    return with_gradients(multi_gemm([x, x], weights, backend=backend)[1], x, weights[1])


@pytest.fixture
def repeats(monkeypatch):
    """How many calls were made by their launches alone."""
    from anabranch._backends.triton import remembered, replay

    found, original = [], replay.Replay.run
    monkeypatch.setattr(remembered, "_remembered", lru_cache(remembered._remembered.__wrapped__))
    monkeypatch.setattr(
        replay.Replay, "run", lambda self, *given: found.append(self) or original(self, *given)
    )
    return found


@pytest.mark.op("grouped_gemm", "triton")
@pytest.mark.parametrize("backend", ["triton", *([None] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(
    "call",
    [
        gathering,
        scattering,
        sorting_within,
        in_order,
        mlp,
        mlp_on_input,
        permuting,
        rotating,
        choosing,
        one_x_twice,
    ],
    ids=lambda call: call.__name__,
)
def test_a_remembered_call_gives_the_same_bits(call, backend, device, repeats, monkeypatch):
    from anabranch.ops import operator

    kept = []
    for seed in range(CALLS):
        found = []
        for remembers in (True, False):
            with monkeypatch.context() as patch:
                if not remembers:
                    patch.setattr(operator, "_launches", lambda _: False)
                torch.manual_seed(seed)
                found.append(call(seed, backend))
        for value, expected in zip(*found, strict=True):
            assert value.any()
            assert_same(value, expected)
        kept += [(value, value.clone()) for value in found[0]]
    # On the CPU routing among other things is eager's, which is no launch.
    operators = 1 if call in (mlp, mlp_on_input, sorting_within) and device == "cpu" else 2
    assert len(repeats) >= operators * (CALLS - 2)
    for value, copy in kept:
        assert_same(value, copy)  # no later call wrote to it


def plant(device_code, function):
    """Registers an epilogue of one name, anew each time."""
    from anabranch.epilogues import Epilogue, register

    class Planted(Epilogue):
        name = "planted"

        def forward(self, z):
            return function(z)

        def backward(self, grad, z):
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                return torch.autograd.grad(function(z), z, grad)

        @property
        def device_code(self):
            return f"anabranch.epilogues.device.{device_code}"

    register(Planted)


@pytest.mark.op("grouped_gemm", "triton")
def test_an_epilogue_that_is_registered_anew_is_another(device, repeats, monkeypatch):
    from anabranch.epilogues import base

    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))
    monkeypatch.setattr(base, "PARAMETERS", dict(base.PARAMETERS))
    layout = ExpertLayout.from_topk(ids_of(0), E)
    x, weight = leaf(T, H), leaf(E, 16, H)
    seen = []
    for name, function in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda z: torch.nn.functional.gelu(z, approximate="tanh")),
    ):
        plant(name, function)
        for activation in ("planted", name):
            for _ in range(3):
                out = grouped_gemm(x, weight, layout, gather=True, activation=activation, backend="triton")
                (d_x,) = torch.autograd.grad(out, x, out.detach())
            seen.append((out.detach(), d_x))
        assert_same(seen[-2][0], seen[-1][0])
        assert_same(seen[-2][1], seen[-1][1])
    assert not torch.equal(seen[0][0], seen[2][0])
    assert repeats


@pytest.mark.op("grouped_gemm", "triton")
def test_every_way_to_allow_tf32_counts(device, repeats, monkeypatch):
    from anabranch._backends.triton import prepared

    made, original = [], prepared.Launch.__init__

    def note(self, *args, **constants):
        made.extend(constants[name] for name in ("PRECISION",) if name in constants)
        original(self, *args, **constants)

    monkeypatch.setattr(prepared.Launch, "__init__", note)
    layout, x, weight = ExpertLayout.from_topk(ids_of(0), E), randn(T, H), randn(E, 24, H)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision == "tf32"
    found = []
    try:
        for name, value in (
            ("allow_tf32", False),
            ("fp32_precision", "tf32"),
            ("allow_tf32", False),
            ("allow_tf32", True),
            ("fp32_precision", "ieee"),
        ):
            setattr(matmul, name, value)
            for _ in range(3):
                grouped_gemm(x, weight, layout, gather=True, backend="triton")
            found.append(made[-1:] or None)
            made.clear()
    finally:
        matmul.allow_tf32 = before
    # What was launched before is remembered.
    assert found == [["ieee"], ["tf32"], None, None, None]
    assert len(repeats) == 1 + 1 + 3 + 3 + 3


@pytest.mark.op("grouped_gemm", "triton")
@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int16], ids=str)
def test_a_launch_that_reads_memory_as_another_dtype_is_not_remembered(dtype, allocates, device):
    from anabranch._backends.triton.prepared import recorder
    from anabranch._backends.triton.recording import recording

    x = torch.zeros(8, dtype=torch.float16, device=device)
    with recording([x]) as found:
        value = torch.empty_like(x) if allocates else x
        recorder.recording(
            lambda *_: None, [None, value.view(dtype), value[4:].view(dtype) if allocates else None]
        )
    assert found.whole == (dtype == x.dtype)


@pytest.mark.op("grouped_gemm", "triton")
@pytest.mark.parametrize("size", [(0,), (5,), (3, 700)], ids=str)
def test_passes_that_pytorch_has_too(size, device):
    from anabranch._backends.triton import fill

    where = torch.device(device)
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(fill.zeros(size, dtype, where), torch.zeros(size, dtype=dtype, device=where))
        parts = torch.randint(-8, 8, (7, *size)).to(dtype)
        out = torch.empty(size, dtype=torch.float16, device=where)
        assert fill.add_up(parts, out) is out
        assert torch.equal(out, parts.sum(0).to(torch.float16))
        assert torch.equal(fill.converted(parts, torch.float16), parts.to(torch.float16))
    assert fill.converted(parts, torch.float32) is parts
