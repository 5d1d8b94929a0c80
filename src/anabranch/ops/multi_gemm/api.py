"""multi_gemm and dual_gemm: one matrix product for each of a few experts that share no size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anabranch.ops.multi_gemm import autograd, reference
from anabranch.ops.multi_gemm.call import MultiGemmCall, bind_dual_gemm, bind_multi_gemm
from anabranch.ops.precision import without_autocast


def multi_gemm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    transpose_x: bool = False,
    transpose_weight: bool = False,
    out: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> list[Tensor]:
    """Multiplies each expert's rows by that expert's weight: ``y[i] = xs[i] @ weights[i].T``.

    Expert i has m_i rows of k_i columns and a weight with n_i rows; all three may differ from one expert to
    the next, and each may be 0 (a sum of nothing is 0). Products accumulate in fp32 (fp64 for fp64) and are
    rounded once. Gradients reach every x and weight, each computed only if needed: a frozen expert costs
    nothing. Those of an expert without rows are zeros. They are products of the same kind, so second
    derivatives work.

    Args:
        xs: one (m_i, k_i) per expert, or (k_i, m_i) with ``transpose_x``; fp16, bf16, fp32 or fp64, one dtype
            for all; any strides.
        weights: one (n_i, k_i) per expert as nn.Linear stores it, or (k_i, n_i) with ``transpose_weight``;
            dtype and device of xs; any strides.
        transpose_x: every x is (k_i, m_i).
        transpose_weight: every weight is (k_i, n_i).
        out: where to write the results, one (m_i, n_i) per expert in xs's dtype, apart from each other and
            from what is read; returned. Refused while a gradient is needed.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.

    Returns:
        A list of (m_i, n_i), one per expert.

    Raises:
        ArgumentError: a wrong number, rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Under autocast xs and weights are cast as torch.matmul's operands are.
    """
    return _run(
        bind_multi_gemm(
            xs, weights, transpose_x=transpose_x, transpose_weight=transpose_weight, out=out, backend=backend
        )
    )


def dual_gemm(
    x0: Tensor,
    x1: Tensor,
    w0: Tensor,
    w1: Tensor,
    *,
    transpose_x: bool = False,
    transpose_weight: bool = False,
    out: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiplies the rows of two experts by their weights: :func:`multi_gemm` of two.

    Args:
        x0: (m_0, k_0), or (k_0, m_0) with ``transpose_x``; fp16, bf16, fp32 or fp64; any strides.
        x1: (m_1, k_1) likewise, in x0's dtype.
        w0: (n_0, k_0) as nn.Linear stores it, or (k_0, n_0) with ``transpose_weight``; x0's dtype; any
            strides.
        w1: (n_1, k_1) likewise.
        transpose_x: x0 and x1 are (k_i, m_i).
        transpose_weight: w0 and w1 are (k_i, n_i).
        out: where to write the two results; as for multi_gemm.
        backend: as for multi_gemm.

    Returns:
        ``(x0 @ w0.T, x1 @ w1.T)`` of shapes (m_0, n_0) and (m_1, n_1).

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Under autocast x0, x1, w0 and w1 are cast as torch.matmul's operands are.
    """
    call = bind_dual_gemm(
        x0,
        x1,
        w0,
        w1,
        transpose_x=transpose_x,
        transpose_weight=transpose_weight,
        out=out,
        backend=backend,
    )
    y0, y1 = _run(call)
    return y0, y1


def _run(call: MultiGemmCall) -> list[Tensor]:
    if call.backend == "reference":
        with without_autocast(call.device):
            return reference.multi_gemm(call)
    return autograd.multi_gemm(call)
