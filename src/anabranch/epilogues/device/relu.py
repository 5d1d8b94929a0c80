"""relu for Triton kernels; the maths is in :mod:`anabranch.epilogues.relu`."""

import triton
import triton.language as tl


@triton.jit
def forward(z, P):
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def backward(grad, z, P):
    return tl.where(z > 0, grad, 0.0), tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
