"""silu for Triton kernels; the maths is in :mod:`anabranch.epilogues.silu`."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(z):
    return 1 / (1 + tl.exp(-z))


@triton.jit
def forward(z, P):
    return z * sigmoid(z)


@triton.jit
def backward(grad, z, P):
    s = sigmoid(z)
    return grad * s * (1 + z * (1 - s)), z * s
