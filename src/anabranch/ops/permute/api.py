"""permute and unpermute: rows from token order to expert order, and their weighted sum back."""

from __future__ import annotations

from torch import Tensor

from anabranch.layout import ExpertLayout
from anabranch.ops.permute import autograd, reference
from anabranch.ops.permute.call import bind_permute, bind_unpermute


def permute(x: Tensor, layout: ExpertLayout, *, backend: str | None = None) -> Tensor:
    """Copies each token's row to the places of its slots: ``out[r] = x[slot(r) // K]``.

    Letters: T tokens of H columns, K experts per token, R = ``layout.num_rows`` rows. Rows without a slot are
    zero. The gradient is :func:`unpermute` without weights, a sum over K in fp32 that is rounded once.

    Args:
        x: (T, H) in token order; fp16, bf16, fp32 or fp64; any strides.
        layout: which row each slot has, on x's device; one of maps alone will do.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.

    Returns:
        (R, H) in expert order.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    The two functions are each other's gradient because the layout's maps are each other's inverse: a slot has
    one row or none, and a row has one slot or none. Autocast casts nothing here.
    """
    call = bind_permute(x, layout, backend=backend)
    return reference.permute(call) if backend == "reference" else autograd.permute(call)


def unpermute(
    y: Tensor, layout: ExpertLayout, weights: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Adds up the rows of each token's slots: ``out[t] = sum over k of weights[t, k] * y[row(t, k)]``.

    Letters as in :func:`permute`. The sum runs in slot order in fp32 (fp64 for fp64) and is rounded once,
    so it is the same every time. A slot without a row adds nothing, whatever its weight holds; a row
    without a slot changes nothing, whatever it holds.

    Gradients reach y and weights, each computed only if needed: ``d_y[r] = weights[slot(r)] * grad[slot(r)
    // K]`` and ``d_weights[t, k] = <grad[t], y[row(t, k)]>``, each in fp32 with one rounding, and zero for
    a row without a slot or a slot without a row. Second derivatives work.

    Args:
        y: (R, H) in expert order; fp16, bf16, fp32 or fp64; any strides.
        layout: which row each slot has, on y's device; one of maps alone will do.
        weights: (T, K) factor of each slot, any float dtype, multiplied in fp32; None is 1 everywhere.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.

    Returns:
        (T, H) in token order and y's dtype. The gradient of weights has their own dtype.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Autocast casts nothing here.
    """
    call = bind_unpermute(y, layout, weights, backend=backend)
    return reference.unpermute(call) if backend == "reference" else autograd.unpermute(call)
