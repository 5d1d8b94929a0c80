"""gpt_oss for Triton kernels; the maths is in :mod:`anabranch.epilogues.gpt_oss`."""

import triton
import triton.language as tl

from anabranch.epilogues.device.silu import sigmoid

NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def forward(gate, up, P):
    alpha: tl.constexpr = P[0]
    limit: tl.constexpr = P[1]
    gate = tl.minimum(gate, limit, propagate_nan=NAN)
    up = tl.clamp(up, -limit, limit, propagate_nan=NAN)
    return (up + 1) * gate * sigmoid(alpha * gate)


@triton.jit
def backward(grad, gate, up, P):
    alpha: tl.constexpr = P[0]
    limit: tl.constexpr = P[1]
    outside = gate > limit
    inside_up = tl.abs(up) <= limit
    gate = tl.minimum(gate, limit, propagate_nan=NAN)
    up = tl.clamp(up, -limit, limit, propagate_nan=NAN)
    s = sigmoid(alpha * gate)
    d_gate = tl.where(outside, 0.0, grad * (up + 1) * s * (1 + alpha * gate * (1 - s)))
    return d_gate, tl.where(inside_up, grad * gate * s, 0.0), (up + 1) * gate * s
