"""Layouts that nobody's constructor made: whatever they hold, nothing beyond an operand is read or written.

What such a call returns is unspecified. In the interpreter each operand lies among memory that is watched (what is
written) and NaN (what is read, as far as a NaN would show); an access far outside ends the process.
"""

import os

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm, permute, unpermute
from anabranch.testing import guard_band, randn

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
T, K, E, H, N = 6, 2, 3, 16, 32
FAR = 2**31 - 1
ENTRIES = {
    "near": [-2, -1, 0, 1, 5, T * K - 1, T * K, T * K + 1, 100],
    "far": [-FAR - 1, -FAR, -1, 0, 3, T * K, 2**20, 2**30, FAR],
}


@pytest.fixture(params=[False, True], ids=["pointers", "descriptors"])
def paths(request, monkeypatch):
    """Both ways to move tiles."""
    from anabranch._backends.triton import device

    monkeypatch.setattr(device, "capability", lambda _: (9, 0) if request.param else (0, 0))


def garbage(kind, seed, dtype=torch.int32, rows=T * K):
    """A layout of random entries, each out of range about half of the time; and the checks of what is around."""
    generator = torch.Generator().manual_seed(seed)
    entries = torch.tensor(ENTRIES[kind])
    if kind == "far" and dtype == torch.int64:
        entries *= 2**20 + 1  # not what their lower halves say

    def some(*shape):
        value, check = guard_band(shape, dtype)
        value.copy_(entries[torch.randint(len(entries), shape, generator=generator)])
        checks.append(check)
        return value

    checks = []
    layout = ExpertLayout(some(E), some(E + 1), some(rows), some(T, K))
    return layout, checks


def inside(value, sentinel=float("nan")):
    """The same values with memory around them that nobody may read."""
    copy, check = guard_band(tuple(value.shape), value.dtype, sentinel=123.0)
    copy.copy_(value)
    return copy, check


def inputs(rows=T * K):
    sizes = dict(x=(rows, H), tokens=(T, H), up=(E, N, H), down=(E, H, N // 2), bias=(E, N), scale=(T, K))
    made = {name: inside(randn(*size)) for name, size in sizes.items()}
    return {name: value for name, (value, _) in made.items()}, [check for _, check in made.values()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ENTRIES)
def test_grouped_gemm(kind, seed, paths):
    layout, checks = garbage(kind, seed, torch.int64 if seed == 3 else torch.int32)
    given, more = inputs()
    for flags in (
        dict(),
        dict(gather=True, activation="swiglu", bias=given["bias"], scale=given["scale"]),
        dict(scatter=True, activation="gpt_oss", scale=given["scale"]),
    ):
        out, check = guard_band((T * K, N // (2 if "activation" in flags else 1)), torch.float32)
        x = given["tokens"] if flags.get("gather") else given["x"]
        grouped_gemm(x, given["up"], layout, out=out, backend="triton", **flags)
        check()
        leaves = [x.requires_grad_(), given["up"].requires_grad_()]
        leaves += [flags[name].requires_grad_() for name in ("bias", "scale") if name in flags]
        result = grouped_gemm(x, given["up"], layout, backend="triton", **flags)
        torch.autograd.grad(result, leaves, randn(*result.shape))
        for leaf in leaves:
            leaf.requires_grad_(False)
    for check in (*checks, *more):
        check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("kind", ENTRIES)
def test_moe_mlp(kind, weight_on, seed, paths):
    """Its layout is its own, but its operators take one."""
    from anabranch.epilogues import resolve
    from anabranch.ops.moe_mlp.backends import triton as backend
    from anabranch.ops.moe_mlp.call import MoeMlpCall

    layout, checks = garbage(kind, seed)
    given, more = inputs()
    down_bias, check = inside(randn(E, H))
    call = MoeMlpCall(
        given["tokens"], given["up"], given["down"], given["scale"], given["bias"], down_bias,
        resolve("test", "swiglu"), False, "concatenated", weight_on, "triton", layout=layout,
    )  # fmt: skip
    out, written = guard_band((T, H), torch.float32)
    h, kept = guard_band((T * K, N), torch.float32)
    backend.forward_routed(call, out, h)
    backend.backward(call, randn(T, H), h, [True] * 6)
    for around in (*checks, *more, check, written, kept):
        around()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ENTRIES)
def test_permute(kind, seed):
    layout, checks = garbage(kind, seed)
    given, more = inputs()
    x, y, w = (given[name].requires_grad_() for name in ("tokens", "x", "scale"))
    rows = permute(x, layout, backend="triton")
    torch.autograd.grad(rows, x, randn(*rows.shape))
    tokens = unpermute(y, layout, w, backend="triton")
    torch.autograd.grad(tokens, (y, w), randn(*tokens.shape))
    for check in (*checks, *more):
        check()


@pytest.mark.parametrize("top_k", [0, 2])
def test_rows_without_slots(top_k, paths):
    """A layout of no tokens, or of no slots a token, with rows: all of them are nobody's."""
    tokens = 0 if top_k else 5
    layout = ExpertLayout(
        torch.tensor([4, 0, 3], dtype=torch.int32),
        torch.tensor([0, 4, 4, 7], dtype=torch.int32),
        torch.arange(9, dtype=torch.int32),
        torch.zeros(tokens, top_k, dtype=torch.int32),
    )
    given, _ = inputs(9)
    up = given["up"].requires_grad_()
    for gather in (False, True):
        x = (given["tokens"][:tokens] if gather else given["x"]).detach().requires_grad_()
        out = grouped_gemm(x, up, layout, gather=gather, activation="swiglu", backend="triton")
        assert torch.equal(out, torch.zeros(9, N // 2))
        for grad, leaf in zip(torch.autograd.grad(out, (x, up), torch.ones_like(out)), (x, up), strict=True):
            assert torch.equal(grad, torch.zeros_like(leaf))


def test_maps_with_gaps(paths):
    """Strides of maps that a caller made are followed."""
    plain = ExpertLayout.from_topk(torch.arange(T * K).remainder(E).view(T, K), E)
    gaps = ExpertLayout(
        plain.counts,
        torch.stack((plain.offsets, plain.offsets), 1)[:, 0],
        torch.stack((plain.row_to_slot, plain.row_to_slot * 0 + 9**8), 1)[:, 0],
        plain.slot_to_row.T.contiguous().T,
    )
    given, _ = inputs()
    tokens, up = given["tokens"].requires_grad_(), given["up"].requires_grad_()
    results = []
    for layout in (plain, gaps):
        out = grouped_gemm(tokens, up, layout, gather=True, activation="swiglu", backend="triton")
        results.append((out, *torch.autograd.grad(out, (tokens, up), torch.ones_like(out))))
    for actual, expected in zip(*reversed(results), strict=True):
        assert torch.equal(actual, expected)
