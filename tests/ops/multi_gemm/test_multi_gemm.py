"""multi_gemm and dual_gemm over all backends and named cases: values, gradients, memory layouts, out=."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from anabranch.errors import ArgumentError
from anabranch.ops.multi_gemm.api import dual_gemm, multi_gemm
from anabranch.testing import (
    STRIDES,
    assert_component_wise,
    assert_same,
    guard_band,
    randn,
    strided,
)

pytestmark = pytest.mark.op("multi_gemm")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRANSPOSES = list(itertools.product([False, True], repeat=2))

# (m, n, k) of each expert
CASES = {
    "different": [(5, 3, 4), (7, 6, 2), (1, 9, 8)],
    "same": [(4, 8, 16), (4, 8, 16)],
    "one_expert": [(3, 5, 7)],
    "empty_first": [(0, 6, 8), (9, 5, 8)],
    "empty_last": [(9, 6, 8), (0, 5, 8)],
    "all_empty": [(0, 6, 8), (0, 5, 8)],
    "one_row": [(1, 6, 8), (1, 5, 8)],
    "long_and_one": [(127, 12, 10), (1, 7, 10)],
    "ones": [(1, 1, 1), (2, 1, 1)],
    "nothing_to_sum": [(3, 4, 0), (2, 3, 5)],
    "no_columns": [(3, 0, 4), (2, 3, 5)],
    "odd": [(17, 33, 65), (31, 15, 47), (2, 3, 129)],
}


def make(sizes, dtype, transpose_x=False, transpose_weight=False) -> tuple[list[Tensor], ...]:
    """xs, weights and a gradient for each result."""
    xs = [randn(*((k, m) if transpose_x else (m, k)), dtype=dtype) for m, _, k in sizes]
    weights = [randn(*((k, n) if transpose_weight else (n, k)), dtype=dtype) for _, n, k in sizes]
    return xs, weights, [randn(m, n, dtype=dtype) for m, n, _ in sizes]


def exact(x: Tensor, weight: Tensor, grad: Tensor, transpose_x: bool, transpose_weight: bool) -> list[Tensor]:
    """One expert's result and gradients, each written out, in fp64."""
    x, w, g = (v.detach().double() for v in (x, weight, grad))
    x, w = x.T if transpose_x else x, w.T if transpose_weight else w
    y, d_x, d_w = x @ w.T, g @ w, g.T @ x
    return [y, d_x.T if transpose_x else d_x, d_w.T if transpose_weight else d_w]


def check(sizes, xs, weights, grads, found, *flags) -> None:
    """Holds results, and where given gradients of xs and of weights, to their error bounds."""
    for i, ((m, n, k), x, weight, grad) in enumerate(zip(sizes, xs, weights, grads, strict=True)):
        truth = exact(x, weight, grad, *flags)
        magnitude = exact(x.abs(), weight.abs(), grad.abs(), *flags)
        lengths = (max(k, 1), max(n, 1), max(m, 1))
        for name, values, *expected in zip("yxw", found, truth, magnitude, lengths, strict=False):
            assert values[i].dtype == x.dtype
            assert_component_wise(values[i], *expected, name=f"{name}[{i}]")


def run(xs, weights, grads, **options) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    xs, weights = ([v.detach().requires_grad_() for v in values] for values in (xs, weights))
    ys = multi_gemm(xs, weights, **options)
    found = torch.autograd.grad(ys, [*xs, *weights], grads)
    return [y.detach() for y in ys], list(found[: len(xs)]), list(found[len(xs) :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_multi_gemm(backend, name, dtype):
    sizes = CASES[name]
    for flags in TRANSPOSES:
        values = make(sizes, dtype, *flags)
        found = run(*values, transpose_x=flags[0], transpose_weight=flags[1], backend=backend)
        check(sizes, *values, found, *flags)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_inputs(backend, dtype, scale):
    sizes = CASES["odd"]
    xs, weights, grads = make(sizes, dtype)
    xs = [x * scale for x in xs]
    check(sizes, xs, weights, grads, run(xs, weights, grads, backend=backend), False, False)


@pytest.mark.parametrize("flags", TRANSPOSES, ids=["plain", "transpose_weight", "transpose_x", "both"])
@pytest.mark.parametrize("sizes", [(0, 9), (9, 0), (0, 0), (1, 1), (127, 1)], ids=str)
def test_dual_gemm(backend, sizes, flags):
    """Two experts of 96 and 40 columns; the weight of one without rows has a gradient of zeros, not None."""
    sizes = [(m, n, 64) for m, n in zip(sizes, (96, 40), strict=True)]
    xs, weights, grads = make(sizes, torch.bfloat16, *flags)
    leaves = [v.requires_grad_() for v in (*xs, *weights)]
    ys = dual_gemm(*leaves, transpose_x=flags[0], transpose_weight=flags[1], backend=backend)
    assert isinstance(ys, tuple)
    torch.autograd.backward(ys, grads)
    found = list(ys), [x.grad for x in xs], [w.grad for w in weights]
    check(sizes, xs, weights, grads, found, *flags)
    for (m, _, _), weight in zip(sizes, weights, strict=True):
        assert (weight.grad.count_nonzero() == 0) == (m == 0)


def test_full_fp32(backend):
    """1 + 2**-12 survives a product in fp32; with fewer bits the sum would be 64."""
    (y,) = multi_gemm([torch.full((2, 64), 1 + 2**-12)], [torch.ones(3, 64)], backend=backend)
    assert torch.equal(y, torch.full((2, 3), 64.015625))


@pytest.mark.parametrize("flags", TRANSPOSES, ids=["plain", "transpose_weight", "transpose_x", "both"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(backend, dtype, strides, flags):
    """Inputs, weights and incoming gradients in turn."""
    sizes = [(4, 6, 5), (3, 2, 7)]
    values = make(sizes, dtype, *flags)
    for place in range(3):
        given = list(values)
        given[place] = [strided(v, strides) for v in values[place]]
        found = run(*given, transpose_x=flags[0], transpose_weight=flags[1], backend=backend)
        check(sizes, *given, found, *flags)


def test_square_layouts_are_not_guessed(backend):
    """Where every size is the same, only the flag says how a weight is stored."""
    x, w = randn(8, 8), torch.arange(8.0)[:, None] - 2 * torch.arange(8.0)
    (plain,), (transposed,) = (
        multi_gemm([x], [w], transpose_weight=flag, backend=backend) for flag in (False, True)
    )
    check([(8, 8, 8)], [x], [w], [x], [[plain]], False, False)
    check([(8, 8, 8)], [x], [w], [x], [[transposed]], False, True)
    assert not torch.allclose(plain, transposed)


@pytest.mark.fp64
@pytest.mark.parametrize("flags", TRANSPOSES, ids=["plain", "transpose_weight", "transpose_x", "both"])
def test_gradients_of_any_order(backend, flags):
    xs, weights, _ = make([(2, 3, 4), (0, 2, 1), (3, 1, 2)], torch.float64, *flags)
    leaves = [v.requires_grad_() for v in (*xs, *weights)]

    def function(*leaves):
        xs, weights = list(leaves[:3]), list(leaves[3:])
        return tuple(
            multi_gemm(xs, weights, transpose_x=flags[0], transpose_weight=flags[1], backend=backend)
        )

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("columns", [0, 42])
@pytest.mark.parametrize("flags", TRANSPOSES, ids=["plain", "transpose_weight", "transpose_x", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out(backend, dtype, flags, columns):
    """Every result lands in the tensor given, which is returned, and nowhere else."""
    sizes = [(5, 47, 8), (0, 3, 2), (3, 1, 9), (2, 6, 0)]
    xs, weights, grads = make(sizes, dtype, *flags)
    out, checks = zip(*(guard_band((m, n), dtype, columns=columns) for m, n, _ in sizes), strict=True)
    options = {"transpose_x": flags[0], "transpose_weight": flags[1], "backend": backend}
    ys = multi_gemm(xs, weights, out=out, **options)
    assert isinstance(ys, list)
    assert all(y is given for y, given in zip(ys, out, strict=True))
    check(sizes, xs, weights, grads, [ys], *flags)
    for untouched in checks:
        untouched()


@pytest.mark.parametrize("strides", ["transposed", "every_second", "padded", "offset"])
def test_out_of_any_strides(backend, strides):
    sizes = [(4, 6, 5), (3, 2, 7)]
    xs, weights, grads = make(sizes, torch.float32)
    out = [strided(torch.zeros(m, n), strides) for m, n, _ in sizes]
    dual_gemm(*xs, *weights, out=out, backend=backend)
    check(sizes, xs, weights, grads, [out], False, False)


def test_out_side_by_side(backend):
    """Columns of one buffer interleave in memory without overlapping."""
    sizes = [(4, 6, 5), (3, 2, 5)]
    xs, weights, grads = make(sizes, torch.float32)
    buffer = torch.full((4, 13), 123.0)
    out = (buffer[:, 2:8], buffer[1:, 8:10])
    dual_gemm(*xs, *weights, out=out, backend=backend)
    check(sizes, xs, weights, grads, [out], False, False)
    assert buffer[:, :2].eq(123).all()
    assert buffer[:, 10:].eq(123).all()
    assert buffer[0, 8:].eq(123).all()


def test_out_that_overlaps(backend):
    buffer = torch.zeros(200)
    x0, x1 = buffer[:20].view(4, 5), buffer[20:35].view(3, 5)
    w0, w1 = buffer[35:65].view(6, 5), buffer[65:75].view(2, 5)
    free = [buffer[100:124].view(4, 6), buffer[124:130].view(3, 2)]
    cases = [
        (free[0], buffer[10:16].view(3, 2), "out[1]", "x0", "xs[0]"),
        (free[0], buffer[34:40].view(3, 2), "out[1]", "x1", "xs[1]"),
        (buffer[60:84].view(4, 6), free[1], "out[0]", "w0", "weights[0]"),
        (free[0], buffer[66:72].view(3, 2), "out[1]", "w1", "weights[1]"),
        (free[0], buffer[123:129].view(3, 2), "out[1]", "out[0]", "out[0]"),
        (buffer.view(-1, 10)[12:16, :6], buffer.view(-1, 10)[13:16, 5:7], "out[1]", "out[0]", "out[0]"),
        (buffer.view(-1, 20)[5:9, 5:11], buffer.view(-1, 20)[6:9, 4:6], "out[1]", "out[0]", "out[0]"),
    ]
    for *out, argument, dual_name, multi_name in cases:
        for op, function, name in (
            ("dual_gemm", lambda out: dual_gemm(x0, x1, w0, w1, out=out, backend=backend), dual_name),
            ("multi_gemm", lambda out: multi_gemm([x0, x1], [w0, w1], out=out, backend=backend), multi_name),
        ):
            with pytest.raises(ArgumentError) as error:
                function(out)
            message = f"{argument}: expected memory apart from {name}, got overlapping memory"
            assert str(error.value) == f"{op}: {message}"
    assert buffer.count_nonzero() == 0
    dual_gemm(x0, x1, w0, w1, out=free, backend=backend)


def test_repeats_are_equal_to_the_bit():
    values = make(CASES["odd"], torch.bfloat16)
    first, *others = (list(itertools.chain(*run(*values))) for _ in range(3))
    for other in others:
        for actual, expected in zip(other, first, strict=True):
            assert_same(actual, expected)
