"""What may follow the accumulator: one small file each, maths and gradient.

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
