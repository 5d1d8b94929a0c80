"""Epilogues for Triton kernels: a file each, named as the epilogue, with ``forward`` and ``backward``.

``forward(z, P)`` or, gated, ``forward(gate, up, P)`` gives the output. ``backward(grad, z, P)`` gives ``d_z, output``,
and ``backward(grad, gate, up, P)`` gives ``d_gate, d_up, output``: the output is needed again, and shares the work.
Operands are fp32 tiles; P is the tuple of the epilogue's parameters in the order of its fields, which are compile-time
constants: ``limit: tl.constexpr = P[0]``. A file imports ``triton.language as tl`` even where it does not use it, as
the interpreter looks for it. ``tests/unit/test_epilogues_device.py`` runs each of them.
"""
