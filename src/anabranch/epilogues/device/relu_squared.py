"""relu_squared for Triton kernels; the maths is in :mod:`anabranch.epilogues.relu_squared`."""

import triton
import triton.language as tl


@triton.jit
def forward(z, P):
    r = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r


@triton.jit
def backward(grad, z, P):
    r = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return 2 * grad * r, r * r
