"""moe_mlp: the experts' whole MLP, from token rows to token rows."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anabranch.epilogues import Epilogue
from anabranch.ops.moe_mlp import autograd, reference
from anabranch.ops.moe_mlp.call import bind_moe_mlp
from anabranch.ops.precision import without_autocast


def moe_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    activation: str | Epilogue = "swiglu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transpose_weight: bool = False,
    gate_layout: Literal["concatenated", "interleaved"] = "concatenated",
    weight_on: Literal["output", "input"] = "output",
    save: Literal["activations", "inputs"] = "activations",
    backend: str | None = None,
) -> Tensor:
    """Sends each token through its K experts and sums: ``out[t] = sum_k w[t, k] * f_e(x[t])``, e = ids[t, k].

    ``f_e(x) = down[e] @ act(gate_up[e] @ x + gate_up_bias[e]) + down_bias[e]``. Letters: T tokens, H hidden size,
    I intermediate size, E experts, K experts per token. Products accumulate in fp32 (fp64 for fp64); the sum
    over K is in fp32, in slot order, rounded once. An id outside ``[0, E)`` is dropped: it adds nothing, and its
    weight gets gradient 0. The same expert twice for one token adds up.

    For the backward only the pre-activation (T * K, 2 * I) and the routing are kept beyond the inputs, with
    ``save="inputs"`` the routing alone; without gradients nothing. Gradients reach x, gate_up, down, expert_weights
    and both biases, each only if needed.

    Args:
        x: (T, H); fp16, bf16, fp32 or fp64.
        gate_up: (E, 2 * I, H) as nn.Linear stores it, or (E, H, 2 * I) with ``transpose_weight``; I instead of
            2 * I for an activation without a gate. x's dtype, any strides.
        down: (E, H, I), or (E, I, H) with ``transpose_weight``; x's dtype, any strides.
        expert_ids: (T, K) int64 or int32.
        expert_weights: (T, K) routing weights, any float dtype, which they keep.
        activation: an epilogue by name or value (:mod:`anabranch.epilogues`).
        gate_up_bias: (E, 2 * I), or (E, I) without a gate; x's dtype.
        down_bias: (E, H), x's dtype; weighted as the output is.
        transpose_weight: both weights are stored (E, in, out).
        gate_layout: ``concatenated`` has all gate columns, then all up columns; ``interleaved`` has gate in the
            even and up in the odd ones, as gpt-oss stores them.
        weight_on: ``output`` weights f's result; ``input`` weights x instead, as Llama 4 does: ``f_e(w[t, k] * x[t])``,
            with the product rounded to x's dtype.
        save: what the forward keeps for the backward. ``activations`` keeps the pre-activation. ``inputs`` does not:
            the backward makes it again, to the same bits, by the up-projection alone. Counting multiplications and
            additions, that is 4 TKHI more than the 18 TKHI of a step, 2/9 (without a gate 1/6: 2 more than 12);
            torch.utils.checkpoint would repeat the whole forward, 1/3.
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.

    Returns:
        (T, H) in x's dtype.

    Raises:
        ArgumentError: a wrong rank, shape, device or value (a ValueError).
        ArgumentTypeError: a wrong type or dtype (a TypeError).
        UnsupportedError: the backend asked for cannot serve the call (a NotImplementedError).

    Under autocast x, the expert matrices and the biases are cast as torch.matmul's operands are; expert_weights
    are not.
    """
    call = bind_moe_mlp(
        x,
        gate_up,
        down,
        expert_ids,
        expert_weights,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        transpose_weight=transpose_weight,
        gate_layout=gate_layout,
        weight_on=weight_on,
        save=save,
        backend=backend,
    )
    if backend == "reference":
        with without_autocast(call.device):
            if save == "inputs":
                return checkpoint(reference.moe_mlp, call, use_reentrant=False, preserve_rng_state=False)
            return reference.moe_mlp(call)
    return autograd.moe_mlp(call)
