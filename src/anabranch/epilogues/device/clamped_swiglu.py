"""clamped_swiglu for Triton kernels; the maths is in :mod:`anabranch.epilogues.clamped_swiglu`."""

import triton
import triton.language as tl

from anabranch.epilogues.device import silu


@triton.jit
def forward(gate, up, P):
    limit: tl.constexpr = P[0]
    return silu.forward(tl.minimum(gate, limit), P) * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def backward(grad, gate, up, P):
    limit: tl.constexpr = P[0]
    inside_gate = gate <= limit
    inside_up = tl.abs(up) <= limit
    up = tl.minimum(tl.maximum(up, -limit), limit)
    d_gate, a = silu.backward(grad * up, tl.minimum(gate, limit), P)
    return tl.where(inside_gate, d_gate, 0.0), tl.where(inside_up, grad * a, 0.0), a * up
