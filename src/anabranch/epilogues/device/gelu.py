"""gelu for Triton kernels; the maths is in :mod:`anabranch.epilogues.gelu`."""

import triton
import triton.language as tl


@triton.jit
def forward(z, P):
    return 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))


@triton.jit
def backward(grad, z, P):
    cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    return grad * (cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)), z * cdf
