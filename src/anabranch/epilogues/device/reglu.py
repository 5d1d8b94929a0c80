"""reglu for Triton kernels; the maths is in :mod:`anabranch.epilogues.reglu`."""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it)

from anabranch.epilogues.device import relu


@triton.jit
def forward(gate, up, P):
    return relu.forward(gate, P) * up


@triton.jit
def backward(grad, gate, up, P):
    d_gate, a = relu.backward(grad * up, gate, P)
    return d_gate, grad * a, a * up
