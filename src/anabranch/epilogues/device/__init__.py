"""Epilogues for Triton kernels: a file each, named as the epilogue, with ``forward`` and ``backward``.

``forward(z, P)`` or, gated, ``forward(gate, up, P)`` gives the output; ``backward(grad, ...)`` gives a tuple: the
gradient of each operand, then the output again. Operands are fp32 tiles; P is the tuple of the epilogue's parameters,
which are compile-time constants.
"""
