"""gelu_tanh for Triton kernels; the maths is in :mod:`anabranch.epilogues.gelu_tanh`."""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it)

from anabranch.epilogues.device.silu import sigmoid


@triton.jit
def half_of_one_plus_tanh(z):
    """``(1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))) / 2``, as a sigmoid of twice the argument."""
    return sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))


@triton.jit
def forward(z, P):
    return z * half_of_one_plus_tanh(z)


@triton.jit
def backward(grad, z, P):
    s = half_of_one_plus_tanh(z)
    inner = 1.5957691216057308 * (1 + 0.134145 * z * z)
    return grad * s * (1 + z * (1 - s) * inner), z * s
