"""silu for Triton kernels; the maths is in :mod:`anabranch.epilogues.silu`."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(z):
    # 1 / (1 + exp(-z)): a division takes many instructions, a reciprocal square root one, and so does a power of 2.
    root = tl.rsqrt(1 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def forward(z, P):
    return z * sigmoid(z)


@triton.jit
def backward(grad, z, P):
    s = sigmoid(z)
    return grad * s * (1 + z * (1 - s)), z * s
