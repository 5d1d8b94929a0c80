"""clamped_swiglu for Triton kernels; the maths is in :mod:`anabranch.epilogues.clamped_swiglu`."""

import triton
import triton.language as tl

from anabranch.epilogues.device import silu

NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def forward(gate, up, P):
    limit: tl.constexpr = P[0]
    return silu.forward(tl.minimum(gate, limit, propagate_nan=NAN), P) * tl.clamp(
        up, -limit, limit, propagate_nan=NAN
    )


@triton.jit
def backward(grad, gate, up, P):
    limit: tl.constexpr = P[0]
    outside = gate > limit
    inside_up = tl.abs(up) <= limit
    up = tl.clamp(up, -limit, limit, propagate_nan=NAN)
    d_gate, a = silu.backward(grad * up, tl.minimum(gate, limit, propagate_nan=NAN), P)
    return tl.where(outside, 0.0, d_gate), tl.where(inside_up, grad * a, 0.0), a * up
