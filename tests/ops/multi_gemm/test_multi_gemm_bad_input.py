"""What multi_gemm and dual_gemm refuse, and in which words."""

from __future__ import annotations

import pytest
import torch

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.ops.multi_gemm.api import dual_gemm, multi_gemm

X0, X1, W0, W1 = torch.ones(4, 5), torch.ones(3, 7), torch.ones(6, 5), torch.ones(2, 7)
Y0, Y1 = torch.ones(4, 6), torch.ones(3, 2)
FLOATS = "float16 or bfloat16 or float32 or float64"


def refused(function, arguments, kind, message):
    with pytest.raises(kind) as error:
        function(**arguments)
    assert str(error.value) == f"{function.__name__}: {message}"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"xs": X0}, ArgumentTypeError, "xs: expected a list or tuple of tensors, got Tensor"),
        ({"xs": []}, ArgumentError, "xs: expected at least one tensor, got none"),
        ({"weights": None}, ArgumentTypeError, "weights: expected a list or tuple of tensors, got NoneType"),
        ({"weights": [W0]}, ArgumentError, "weights: expected 2 tensors, one per x, got 1"),
        ({"xs": [X0, 2]}, ArgumentTypeError, "xs[1]: expected a tensor (m, k), got int"),
        ({"xs": [X0, X1[0]]}, ArgumentError, "xs[1]: expected shape (m, k), got shape (7,)"),
        ({"xs": [X0.int(), X1]}, ArgumentTypeError, f"xs[0]: expected dtype {FLOATS}, got int32"),
        ({"xs": [X0, X1.half()]}, ArgumentTypeError, "xs[1]: expected xs[0]'s dtype float32, got float16"),
        ({"weights": [W0, None]}, ArgumentTypeError, "weights[1]: expected a tensor (n, k), got NoneType"),
        (
            {"weights": [W0.bfloat16(), W1]},
            ArgumentTypeError,
            "weights[0]: expected xs[0]'s dtype float32, got bfloat16",
        ),
        (
            {"weights": [W0, W1.to("meta")]},
            ArgumentError,
            "weights[1]: expected xs[0]'s device cpu, got meta",
        ),
        (
            {"weights": [W0, W1.T]},
            ArgumentError,
            "weights[1]: expected shape (n, xs[1]'s k) = (7, 7), got shape (7, 2)",
        ),
        (
            {"transpose_weight": True},
            ArgumentError,
            "weights[0]: expected shape (xs[0]'s k, n) = (5, 5), got shape (6, 5), which fits transpose_weight=False",
        ),
        (
            {"weights": [W0.T, W1.T]},
            ArgumentError,
            "weights[0]: expected shape (n, xs[0]'s k) = (5, 5), got shape (5, 6), which fits transpose_weight=True",
        ),
        (
            {"transpose_x": True},
            ArgumentError,
            "weights[0]: expected shape (n, xs[0]'s k) = (6, 4), got shape (6, 5)",
        ),
        ({"out": Y0}, ArgumentTypeError, "out: expected a list or tuple of tensors, got Tensor"),
        ({"out": [Y0]}, ArgumentError, "out: expected 2 tensors, one per x, got 1"),
        ({"out": [Y0, None]}, ArgumentTypeError, "out[1]: expected a tensor (m, n), got NoneType"),
        (
            {"out": [Y0, Y1.T]},
            ArgumentError,
            "out[1]: expected shape of the result = (3, 2), got shape (2, 3)",
        ),
        ({"out": [Y0.half(), Y1]}, ArgumentTypeError, "out[0]: expected xs[0]'s dtype float32, got float16"),
        ({"out": [Y0, Y1.to("meta")]}, ArgumentError, "out[1]: expected xs[0]'s device cpu, got meta"),
        (
            {"backend": "cpu"},
            ArgumentError,
            "backend: expected None or one of hopper, triton, eager, reference, got 'cpu'",
        ),
    ],
)
def test_multi_gemm(arguments, kind, message):
    refused(multi_gemm, {"xs": [X0, X1], "weights": (W0, W1), **arguments}, kind, message)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"x0": [1]}, ArgumentTypeError, "x0: expected a tensor (m, k), got list"),
        ({"x1": X1.half()}, ArgumentTypeError, "x1: expected x0's dtype float32, got float16"),
        ({"w0": W0[None]}, ArgumentError, "w0: expected shape (n, k), got shape (1, 6, 5)"),
        ({"w1": W0}, ArgumentError, "w1: expected shape (n, x1's k) = (6, 7), got shape (6, 5)"),
        (
            {"w1": W0, "transpose_weight": True, "w0": W0.T},
            ArgumentError,
            "w1: expected shape (x1's k, n) = (7, 5), got shape (6, 5)",
        ),
        ({"w0": W0.to("meta")}, ArgumentError, "w0: expected x0's device cpu, got meta"),
        ({"out": (Y0,)}, ArgumentError, "out: expected 2 tensors, one per x, got 1"),
        ({"out": (Y0, Y1.double())}, ArgumentTypeError, "out[1]: expected x0's dtype float32, got float64"),
    ],
)
def test_dual_gemm(arguments, kind, message):
    refused(dual_gemm, {"x0": X0, "x1": X1, "w0": W0, "w1": W1, **arguments}, kind, message)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_out_and_gradients(backend, place):
    """A call that writes has no gradient, so it refuses what wants one; without grad mode it runs."""
    values = [v.clone() for v in (X0, X1, W0, W1, Y0, Y1)]
    values[place].requires_grad_()
    message = "out: expected no tensor that requires grad (a mutating call has no gradient), "
    name = ("x0", "x1", "w0", "w1", "out[0]", "out[1]")[place]
    message += f"got {name}, which does; use torch.no_grad()"

    def call(*, out):
        return dual_gemm(*values[:4], out=out, backend=backend)

    call.__name__ = "dual_gemm"
    refused(call, {"out": values[4:]}, ArgumentError, message)
    with torch.no_grad():
        assert call(out=values[4:])[0] is values[4]


def test_which_weight_needs_a_gradient():
    weights = [W0, W1.clone().requires_grad_()]
    with pytest.raises(ArgumentError, match=r"got weights\[1\], which does; use torch.no_grad\(\)"):
        multi_gemm([X0, X1], weights, out=[Y0, Y1])


@pytest.mark.parametrize("out", [None, [Y0, Y1]], ids=["returned", "out"])
def test_a_backend_that_cannot(out):
    expected = r"multi_gemm: backend: expected a backend that can serve this call, got hopper: "
    with pytest.raises(UnsupportedError, match=expected):
        multi_gemm([X0, X1], [W0, W1], out=out, backend="hopper")
