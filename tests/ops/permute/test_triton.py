"""What is special to the Triton kernels of permute: many slots, rows without one, maps that do not fit, resources.

They run where there is a GPU, or interpreted on the CPU: TRITON_INTERPRET=1 pytest tests/ops/permute/test_triton.py
"""

import os
from unittest import mock

import pytest
import torch

from anabranch import dispatch
from anabranch.errors import UnsupportedError
from anabranch.layout import ExpertLayout
from anabranch.ops.permute.api import permute, unpermute
from anabranch.testing import (
    STRIDES,
    assert_component_wise,
    assert_same,
    guard_band,
    randn,
    routing,
    strided,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter truncates where it makes bf16.
BF16 = torch.cuda.is_available() and not INTERPRETED
DTYPES = (torch.float32, torch.float16, *[torch.bfloat16] * BF16)

runs = pytest.mark.op("permute", "triton")
# NumPy, which interprets, warns of NaN where a GPU does not, and of how the interpreter reads a scalar.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def sort(tokens, experts, top_k, **kwargs):
    return ExpertLayout.from_topk(routing(tokens, experts, top_k, **kwargs), experts)


LAYOUTS = {
    "top 2": lambda: sort(7, 4, 2),
    "top 1": lambda: sort(9, 3, 1),
    "top 3, dropped": lambda: sort(8, 4, 3, dropped=0.4),
    "top 8": lambda: sort(5, 16, 8),
    "top 19": lambda: sort(4, 32, 19),
    "top 35, dropped": lambda: sort(3, 64, 35, dropped=0.2),
    "all dropped": lambda: sort(40, 3, 2, dropped=1.0),
    "no tokens": lambda: sort(0, 4, 2),
    "spare rows": lambda: ExpertLayout.from_slot_to_row(torch.randperm(20).view(10, 2), 97),
    "too few rows": lambda: ExpertLayout.from_slot_to_row(torch.randperm(20).view(10, 2), 11),
    "counts": lambda: ExpertLayout.from_counts(torch.tensor([2, 0, 3]), 7),
}  # fmt: skip


def with_gradients(out, grad, *leaves):
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def both(layout, x, y, weights, d_rows, d_tokens, backend):
    """Results and gradients of permute, and of unpermute with and without weights."""
    x, y, weights = (v.detach().requires_grad_() for v in (x, y, weights))
    return [
        *with_gradients(permute(x, layout, backend=backend), d_rows, x),
        *with_gradients(unpermute(y, layout, weights, backend=backend), d_tokens, y, weights),
        *with_gradients(unpermute(y, layout, backend=backend), d_tokens, y),
        *with_gradients(unpermute(y, layout, weights.detach(), backend=backend), d_tokens, y),
        *with_gradients(unpermute(y.detach(), layout, weights, backend=backend), d_tokens, weights),
    ]


def inputs(layout, columns, dtype, weights_dtype=torch.float32):
    T, K, R = layout.num_tokens, layout.top_k, layout.num_rows
    sizes = ((T, columns), (R, columns), (T, K), (R, columns), (T, columns))
    x, y, weights, d_rows, d_tokens = (randn(*size, dtype=dtype) for size in sizes)
    return x, y, weights.to(weights_dtype), d_rows, d_tokens


def check(layout, values):
    """Against the reference in fp64, with the bounds of sums of this length."""
    found = both(layout, *values, backend="triton")
    truth = both(layout, *(v.double() for v in values), backend="reference")
    bound = both(layout, *(v.double().abs() for v in values), backend="reference")
    K, H = layout.top_k, values[0].shape[1]
    for i, (length, actual, *these) in enumerate(
        zip((0, K, K, 1, H, K, 0, K, 1, K, H), found, truth, bound, strict=True)
    ):
        # Sums are in fp32, into whatever they are stored.
        actual = actual.float() if actual.dtype == torch.float64 else actual
        assert_component_wise(actual, *these, length, name=f"result {i}")


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_against_the_reference(name, dtype):
    layout = LAYOUTS[name]()
    check(layout, inputs(layout, 37, dtype))


@runs
def test_no_experts_a_token():
    layout = ExpertLayout.from_slot_to_row(torch.zeros(3, 0, dtype=torch.int32), 5)
    for value in both(layout, *inputs(layout, 4, torch.float32), "triton"):
        assert torch.equal(value, torch.zeros_like(value))


@runs
@pytest.mark.parametrize("columns", [0, 1, 130])
@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.float64], ids=str)
def test_other_columns_and_weights(columns, weights_dtype):
    layout = sort(5, 4, 3, dropped=0.2)
    check(layout, inputs(layout, columns, torch.float32, weights_dtype))


@runs
@pytest.mark.parametrize("place", range(5), ids=["x", "y", "weights", "d_rows", "d_tokens"])
@pytest.mark.parametrize("strides", ["transposed", "padded", "every_second", "expanded", "expanded_columns"])
def test_any_strides(strides, place):
    layout = sort(5, 4, 2, dropped=0.2)
    values = list(inputs(layout, 6, torch.float32))
    values[place] = strided(values[place], strides)
    plain = [v.contiguous() for v in values]
    for a, b in zip(both(layout, *values, "triton"), both(layout, *plain, "triton"), strict=True):
        assert_same(a, b)


@runs
@pytest.mark.parametrize("strides", [s for s in STRIDES if "expanded" not in s])
def test_maps_of_any_strides(strides):
    plain = sort(5, 4, 2)
    odd = ExpertLayout(None, None, strided(plain.row_to_slot, strides), strided(plain.slot_to_row, strides))
    values = inputs(plain, 6, torch.float32)
    for a, b in zip(both(odd, *values, "triton"), both(plain, *values, "triton"), strict=True):
        assert_same(a, b)


@runs
def test_what_has_no_partner_is_not_read():
    """NaN in a dropped slot's weight, in a row without a slot and in its gradient stays there."""
    layout = sort(8, 4, 3, dropped=0.4)
    x, y, weights, d_rows, d_tokens = inputs(layout, 5, torch.float32)
    clean = both(layout, x, y, weights, d_rows, d_tokens, "triton")
    no_slot, no_row = layout.row_to_slot < 0, layout.slot_to_row < 0
    for v in (y, d_rows):
        v[no_slot] = torch.nan
    weights[no_row] = torch.nan
    for a, b in zip(both(layout, x, y, weights, d_rows, d_tokens, "triton"), clean, strict=True):
        assert a.isfinite().all()
        assert_same(a, b)
    # An infinite gradient meets the zero that stands for a missing row.
    d_tokens[:] = torch.inf
    *_, d_weights = both(layout, x, y, weights, d_rows, d_tokens, "triton")
    assert (d_weights[no_row] == 0).all()


@runs
@pytest.mark.parametrize("value", [torch.nan, -0.0])
def test_copies_are_exact(value):
    layout = sort(3, 4, 2)
    x = torch.full((3, 4), value).view(torch.int32).add(0).view(torch.float32)
    if value != value:
        x.view(torch.int32).add_(0x1234)
    rows = permute(x, layout, backend="triton")
    assert torch.equal(rows.view(torch.int32), x.view(torch.int32).repeat_interleave(2, 0))


@runs
@pytest.mark.parametrize(
    ("row_to_slot", "slot_to_row"),
    [
        ([0, 9], [[0], [1]]),
        ([0, 0], [[0], [-1]]),
        ([0, -1], [[0], [0]]),
        ([1, 0], [[0], [1]]),
        ([-7, 2**30], [[-(2**31)], [2**31 - 1]]),
    ],
)
def test_maps_that_do_not_fit(row_to_slot, slot_to_row):
    """Nothing beside the results is written, all of them is, and what two claim goes to the one named back."""
    from anabranch.ops.permute.backends import triton as backend
    from anabranch.ops.permute.call import PermuteCall

    maps = (torch.tensor(m, dtype=torch.int32) for m in (row_to_slot, slot_to_row))
    layout = ExpertLayout(None, None, *maps)
    out, unchanged = guard_band((2, 5), torch.float32)
    x = torch.tensor([[1.0], [2.0]]).expand(2, 5)
    backend.permute(PermuteCall(x, layout), out)
    unchanged()
    expected = torch.zeros(2)
    for row, slot in enumerate(row_to_slot):
        if 0 <= slot < 2 and slot_to_row[slot][0] == row:
            expected[row] = slot + 1
    assert torch.equal(out, expected[:, None].expand(2, 5))
    for tensor in both(layout, *inputs(layout, 5, torch.float32), "triton"):
        assert tensor.isfinite().all()


@runs
def test_tiles_do_not_show(monkeypatch):
    from anabranch._backends.triton import combine
    from anabranch.ops.permute.backends import triton as backend

    layout = sort(6, 8, 5, dropped=0.4)
    values = inputs(layout, 70, torch.float32)
    expected = both(layout, *values, "triton")
    # Dots add up otherwise, to other bits: leave them out.
    keep = [i for i in range(11) if i not in (4, 10)]
    monkeypatch.setattr(backend, "ROWS", 4)
    monkeypatch.setattr(backend, "TILE_BYTES", 512)
    monkeypatch.setattr(combine, "UNROLL", 2)
    monkeypatch.setattr(combine, "prepare", combine.prepare.__wrapped__)
    found = both(layout, *values, "triton")
    for i in keep:
        assert_same(found[i], expected[i])
    check(layout, values)


@runs
def test_fp64_is_refused():
    layout = sort(1, 1, 1)
    with pytest.raises(UnsupportedError, match="triton: it accumulates in fp32, too coarse for float64"):
        permute(torch.zeros(1, 1, dtype=torch.float64), layout, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="compiles, which an interpreting Triton cannot")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_without_spills(arch):
    """Ahead of time, with no GPU: the kernels of real models' shapes."""
    pytest.importorskip("triton")
    from anabranch.testing.aot import compiling

    layouts = [ExpertLayout.from_topk(torch.zeros(4, K, dtype=torch.int64), 8) for K in (2, 8, 22)]
    with mock.patch.object(dispatch, "probe", return_value=None), compiling(arch) as found:
        for layout in layouts:
            y = torch.zeros(layout.num_rows, 2048, dtype=torch.bfloat16, requires_grad=True)
            weights = torch.zeros(4, layout.top_k, requires_grad=True)
            tokens = unpermute(y, layout, weights, backend="triton")
            tokens.backward(torch.zeros_like(tokens))
            permute(tokens.detach(), layout, backend="triton")
    assert len(found) == 9
    for kernel in found:
        assert kernel.spilled_bytes in (0, None), kernel
