"""What may follow the accumulator: one small file each, maths and gradient.

``activation=`` takes a name, a name with parameters, or an instance: ``"gpt_oss(limit=5.0)"`` is
``GptOss(limit=5.0)``. Phi is the Gaussian's distribution function::

    identity        z
    relu            max(z, 0)
    relu_squared    max(z, 0)**2
    silu            z * sigmoid(z)
    gelu            z * Phi(z) = z * (1 + erf(z / sqrt(2))) / 2
    gelu_tanh       z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))) / 2

and behind a gate, where the output is half as wide as the product and its operands are (gate, up)::

    swiglu          silu(gate) * up
    geglu           gelu(gate) * up
    geglu_tanh      gelu_tanh(gate) * up
    reglu           relu(gate) * up
    clamped_swiglu  silu(g) * u
    gpt_oss         (u + 1) * g * sigmoid(alpha * g)

    g = min(gate, limit) and u = min(max(up, -limit), limit); alpha=1.702, limit=7.0

:func:`register` adds one of yours, and has an example.

>>> from anabranch.epilogues import resolve
>>> resolve("docs", "gpt_oss(limit=5.0)")
GptOss(alpha=1.702, limit=5.0)
"""

from anabranch.epilogues.base import Epilogue, Gated, from_spec, register, resolve
from anabranch.epilogues.clamped_swiglu import ClampedSwiglu
from anabranch.epilogues.geglu import Geglu
from anabranch.epilogues.geglu_tanh import GegluTanh
from anabranch.epilogues.gelu import Gelu
from anabranch.epilogues.gelu_tanh import GeluTanh
from anabranch.epilogues.gpt_oss import GptOss
from anabranch.epilogues.identity import Identity
from anabranch.epilogues.reglu import Reglu
from anabranch.epilogues.relu import Relu
from anabranch.epilogues.relu_squared import ReluSquared
from anabranch.epilogues.silu import Silu
from anabranch.epilogues.swiglu import Swiglu

__all__ = [
    "ClampedSwiglu",
    "Epilogue",
    "Gated",
    "Geglu",
    "GegluTanh",
    "Gelu",
    "GeluTanh",
    "GptOss",
    "Identity",
    "Reglu",
    "Relu",
    "ReluSquared",
    "Silu",
    "Swiglu",
    "from_spec",
    "register",
    "resolve",
]
