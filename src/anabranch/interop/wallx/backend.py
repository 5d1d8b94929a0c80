"""The lower level of wall-x's operators: outputs and gradients are arguments and results, by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from anabranch.interop.wallx.shared import (
    NO_HEAD_AXIS,
    WEIGHT_NAMES,
    check_rows,
    one_row,
    read_map,
    sort_slots,
    weights_of,
)
from anabranch.ops import checks
from anabranch.ops.multi_gemm.api import dual_gemm
from anabranch.ops.permute import api as api_permute
from anabranch.ops.permute.autograd import unpermute_backward
from anabranch.ops.permute.call import bind_unpermute
from anabranch.ops.precision import wide
from anabranch.ops.rope import api as api_rope
from anabranch.ops.rope.autograd import rope as run_rope
from anabranch.ops.rope.call import bind_mrope, bind_rope
from anabranch.ops.wording import speaks_of

__all__ = ["asym_dual_gmm_separated", "permute", "rope", "rope_bwd", "unpermute", "unpermute_bwd"]

Sections = Any
"""Three ints, or None, False or an empty list."""
SECTION_NAMES = {
    "sections": "mrope_section_doubled",
    'order="channels"': "mrope_section_doubled",
    "rotary_dim": "D",
    **NO_HEAD_AXIS,
}


@speaks_of(
    {
        "x0": "input_expert0",
        "x1": "input_expert1",
        **WEIGHT_NAMES,
        "out[0]": "output_expert0",
        "out[1]": "output_expert1",
        "out": "output_expert0 and output_expert1",
        "transpose_x": "trans_a",
    }
)
def asym_dual_gmm_separated(
    input_expert0: Tensor,
    input_expert1: Tensor,
    weight_expert0: Tensor,
    weight_expert1: Tensor,
    output_expert0: Tensor | None = None,
    output_expert1: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
) -> tuple[Tensor, Tensor]:
    """Multiplies the rows of two experts by their weights, in one launch on a GPU: ``input_i @ weight_i``.

    Args:
        input_expert0: (m_0, k_0), or (k_0, m_0) with ``trans_a``; fp16, bf16, fp32 or fp64, any strides.
        input_expert1: (m_1, k_1) likewise; no size need be that of the other expert, and any may be 0.
        weight_expert0: (k_0, n_0), or (n_0, k_0) with ``trans_b``.
        weight_expert1: (k_1, n_1) likewise.
        output_expert0: (m_0, n_0) to write; None makes one. With an output given no gradient can be needed.
        output_expert1: (m_1, n_1) likewise.
        trans_a: both inputs are transposed.
        trans_b: both weights are transposed, as nn.Linear stores them.

    Returns:
        The two outputs.
    """
    checks.flag("dual_gemm", trans_b=trans_b)
    out: Any = None
    if output_expert0 is not None or output_expert1 is not None:
        # One may be left to us.
        if output_expert0 is None:
            output_expert0 = _space(output_expert1, input_expert0, weight_expert0, trans_a, trans_b)
        if output_expert1 is None:
            output_expert1 = _space(output_expert0, input_expert1, weight_expert1, trans_a, trans_b)
        out = (output_expert0, output_expert1)
    return dual_gemm(
        input_expert0,
        input_expert1,
        weight_expert0,
        weight_expert1,
        transpose_x=trans_a,
        transpose_weight=not trans_b,
        out=out,
    )


def _space(like: Any, x: Tensor, weight: Tensor, trans_a: bool, trans_b: bool) -> Tensor | None:
    """Room for a product. Arguments that have none get none, and dual_gemm says what is wrong with them."""
    if not all(isinstance(value, Tensor) for value in (like, x, weight)) or x.dim() != 2 or weight.dim() != 2:
        return None
    return like.new_empty(x.shape[1 if trans_a else 0], weight.shape[0 if trans_b else 1])


@speaks_of({"x": "input", "layout": "indices", "num_rows": "num_out_tokens", "row_to_slot": "indices"})
def permute(
    input: Tensor,
    indices: Tensor,
    num_out_tokens: int,
    workspace: object,
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, object]:
    """Copies the row of each token to the places of its slots, in a stable order of experts.

    Args:
        input: (T, H); fp16, bf16, fp32 or fp64, any strides.
        indices: (T, topK) or (T,) expert ids, of int8 to int64; any number of experts. A negative one is dropped.
        num_out_tokens: rows of the result: slots whose row would be beyond are dropped, rows without a slot are 0.
            0 is T * topK.
        workspace: not needed; returned as it is.
        max_expanded_token_num: not needed.

    Returns:
        permuted, (rows, H). row_id_map, (topK * T,) int32: entry k * T + t is the row of token t's k-th slot, or
        -1. workspace.
    """
    layout, row_id_map = sort_slots("permute", indices, num_out_tokens)
    return api_permute.permute(input, layout), row_id_map, workspace


@speaks_of({"y": "input", "layout": "row_id_map", "slot_to_row": "row_id_map", "weights": "prob"})
def unpermute(
    input: Tensor, row_id_map: Tensor, prob: Tensor | None, max_tokens: int, num_topK: int
) -> Tensor:
    """Adds up the rows of each token's slots, ``prob[t, k] * input[row_id_map[k * T + t]]``, in fp32.

    Args:
        input: (rows, H); fp16, bf16, fp32 or fp64, any strides.
        row_id_map: (topK * T,) int32 or int64, as from :func:`permute`; slots whose row is not there add nothing.
        prob: (T, topK) of any float dtype; None or an empty tensor is 1 everywhere.
        max_tokens: T.
        num_topK: topK, at least 1.

    Returns:
        (T, H).
    """
    checks.integer("unpermute", "max_tokens", max_tokens, minimum=0)
    checks.integer("unpermute", "num_topK", num_topK, minimum=1)
    weights = weights_of("unpermute", "prob", prob, row_id_map)
    return api_permute.unpermute(
        input, read_map("unpermute", input, row_id_map, max_tokens, num_topK), weights
    )


@speaks_of({"y": "input_fwd", "layout": "row_id_map", "slot_to_row": "row_id_map", "weights": "prob"})
def unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, row_id_map: Tensor, prob: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`unpermute`.

    Args:
        input_bwd: (T, H), the gradient of the result.
        input_fwd: (rows, H), what was unpermuted; input_bwd's dtype.
        row_id_map: (topK * T,) as in unpermute.
        prob: (T, topK) as in unpermute; None or an empty tensor is topK = 1 with ones.

    Returns:
        act_grad, (rows, H): ``prob[t, k] * input_bwd[t]``, and 0 in rows without a slot. prob_grad, (T, topK)
        fp32 (fp64 for an fp64 prob, or for none beside fp64 inputs): ``<input_bwd[t], input_fwd[row]>``, and 0
        for slots without a row.
    """
    op = "unpermute_bwd"
    checks.tensor(op, "input_bwd", input_bwd, "(T, H)", checks.FLOATS)
    weights = weights_of(op, "prob", prob, row_id_map)
    if weights is None:
        weights = input_bwd.new_ones(input_bwd.shape[0], 1, dtype=wide(input_bwd.dtype))
    layout = read_map(op, input_fwd, row_id_map, input_bwd.shape[0], weights.shape[1])
    # Before the weights that are made on its device.
    checks.same_device(op, input_fwd, "input_fwd", input_bwd=input_bwd)
    call = bind_unpermute(input_fwd, layout, weights.to(wide(weights.dtype)))
    checks.same_dtype(op, "input_bwd", input_bwd, input_fwd, "input_fwd")
    checks.shape(
        op, "input_bwd", input_bwd, input_bwd.shape[0], input_fwd.shape[1], means="(T, input_fwd's H)"
    )
    act_grad, prob_grad = unpermute_backward(
        [True, True], input_bwd, call.y, call.weights, layout.row_to_slot, layout.slot_to_row, None
    )
    return act_grad, prob_grad


@speaks_of({"out[0]": "q_out", "out[1]": "k_out", "out": "q_out, k_out", **SECTION_NAMES})
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    mrope_section_doubled: Sections,
) -> None:
    """Writes ``x * cos + rotate_half(x) * sin`` of q and k, where ``rotate_half(x) = cat(-x[D/2:], x[:D/2])``.

    Args:
        q: (B, Hq, S, D); fp16, bf16, fp32 or fp64, any strides.
        k: (B, Hk, S, D).
        cos: (3, B, S, D) of any float dtype, or (B, S, D) without sections.
        sin: like cos.
        q_out: like q, in memory of its own or q itself.
        k_out: like k, in memory of its own or k itself.
        mrope_section_doubled: three ints that add up to D: the first so many channels follow row 0 of cos and sin,
            the next row 1, the last row 2. None, False or an empty list: there is one row.
    """
    out = (q_out, k_out)
    if one_row(mrope_section_doubled):
        api_rope.rope(q, k, cos, sin, out=out)
    else:
        check_rows("rope", q, k, cos)
        api_rope.mrope(q, k, cos, sin, mrope_section_doubled, order="channels", out=out)


@speaks_of(
    {
        "q": "grad_q_out",
        "k": "grad_k_out",
        "out[0]": "grad_q",
        "out[1]": "grad_k",
        "out": "grad_q, grad_k",
        **SECTION_NAMES,
    }
)
def rope_bwd(
    grad_q_out: Tensor,
    grad_k_out: Tensor,
    q: object,
    k: object,
    cos: Tensor,
    sin: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    mrope_section_doubled: Sections,
) -> None:
    """Writes the gradients of :func:`rope`, the product with the transposed matrices, to grad_q and grad_k.

    Args:
        grad_q_out: (B, Hq, S, D), the gradient of q_out.
        grad_k_out: (B, Hk, S, D), the gradient of k_out.
        q: not needed.
        k: not needed.
        cos: as in rope.
        sin: as in rope.
        grad_q: like grad_q_out, in memory of its own or grad_q_out itself.
        grad_k: like grad_k_out, in memory of its own or grad_k_out itself.
        mrope_section_doubled: as in rope.
    """
    out = (grad_q, grad_k)
    if one_row(mrope_section_doubled):
        call = bind_rope(grad_q_out, grad_k_out, cos, sin, out=out)
    else:
        check_rows("rope_bwd", grad_q_out, grad_k_out, cos)
        call = bind_mrope(grad_q_out, grad_k_out, cos, sin, mrope_section_doubled, order="channels", out=out)
    run_rope(replace(call, transpose=True))
