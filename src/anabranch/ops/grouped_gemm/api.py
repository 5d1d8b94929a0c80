"""grouped_gemm: one matrix product per expert, with the routing and an epilogue fused in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anabranch.epilogues import Epilogue
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm import autograd, reference
from anabranch.ops.grouped_gemm.call import bind_gradient, bind_grouped_gemm
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig, GroupedGemmConfigs
from anabranch.ops.precision import without_autocast


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    layout: ExpertLayout,
    *,
    gather: bool = False,
    scatter: bool = False,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    activation: str | Epilogue | None = None,
    transpose_weight: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    config: GroupedGemmConfig | GroupedGemmConfigs | str | None = None,
) -> Tensor:
    """Multiplies each expert's rows by that expert's weight: ``y[r] = scale * act(W[e] x[r] + bias[e])``.

    Letters: T tokens, K experts per token, E experts, R = ``layout.num_rows`` rows; the output has
    N columns, or N / 2 with a gated activation. Products accumulate in fp32 (fp64 for fp64), bias, activation
    and scale apply to the accumulator, and the result is rounded once to x's dtype (on the CPU bf16's and fp16's
    accumulator may come rounded already). Rows of dropped slots
    and rows past ``offsets[E]`` are zero. Gradients reach x, weight, bias and scale, each computed only if needed.

    Args:
        x: (R, K_dim) in expert order, or (T, K_dim) in token order with ``gather``; fp16, bf16, fp32 or fp64.
        weight: (E, N, K_dim) as nn.Linear stores it, or (E, K_dim, N) with ``transpose_weight``; any strides;
            x's dtype.
        layout: which rows belong to which expert, on x's device.
        gather: row r reads ``x[slot(r) // K]``.
        scatter: row r is stored at its slot, so the output has T * K rows in token order.
        bias: (E, N) added to the accumulator; x's dtype.
        scale: (T, K) factor of each slot, any float dtype, multiplied in fp32 after the activation.
        activation: an epilogue by name or value (:mod:`anabranch.epilogues`); None is identity. A gated one
            reads gate columns ``[0, N / 2)`` and up columns ``[N / 2, N)``.
        transpose_weight: weight is (E, K_dim, N).
        out: where to write the result, (R or T * K, N or N / 2) in x's dtype; returned. Refused while a gradient
            is needed.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.
        config: tiles of the product, a :class:`anabranch.tuning.GroupedGemmConfig`, which the triton backend runs
            with; or ``"heuristic"``, for what it would choose if nothing had ever been tuned. None lets it use
            tuned results. With either, the gradients keep the heuristic's tiles; a
            :class:`anabranch.tuning.GroupedGemmConfigs` gives them theirs. Backends without tiles refuse.

    Returns:
        (R, N) in expert order, or (T * K, N) in slot order with ``scatter``; N / 2 columns if gated.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Under autocast x, weight and bias are cast as torch.matmul's operands are; scale keeps its dtype.
    """
    call = bind_grouped_gemm(
        x,
        weight,
        layout,
        gather=gather,
        scatter=scatter,
        bias=bias,
        scale=scale,
        activation=activation,
        transpose_weight=transpose_weight,
        out=out,
        backend=backend,
        config=config,
    )
    if backend == "reference":
        with without_autocast(call.device):
            return reference.grouped_gemm(call)
    return autograd.grouped_gemm(call)


def grouped_gemm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    layout: ExpertLayout,
    needs: Sequence[bool],
    *,
    gather: bool = False,
    scatter: bool = False,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    activation: str | Epilogue | None = None,
    transpose_weight: bool = False,
    backend: str | None = None,
    config: GroupedGemmConfig | GroupedGemmConfigs | str | None = None,
) -> list[Tensor | None]:
    """The gradients of :func:`grouped_gemm` without its forward, for whoever keeps its arguments and no graph.

    Args:
        grad: that of the output, of its shape and x's dtype.
        x: the forward's, as are the arguments that are not told of here.
        weight: the forward's; of one whose own gradient alone is needed only the shape is used, without an activation.
        layout: the forward's.
        needs: which of the gradients of x, weight, bias and scale to compute.
        config: the forward's, too.

    Returns:
        Four of them, None where not needed. With an activation the pre-activation is computed for it again.

    Raises:
        ArgumentError, ArgumentTypeError, UnsupportedError: as the forward.
    """
    call = bind_grouped_gemm(
        x,
        weight,
        layout,
        gather=gather,
        scatter=scatter,
        bias=bias,
        scale=scale,
        activation=activation,
        transpose_weight=transpose_weight,
        backend=backend,
        config=config,
    )
    return autograd.gradients(call, bind_gradient(call, grad), needs)
