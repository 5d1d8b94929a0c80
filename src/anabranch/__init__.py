"""The operations between the router and the residual stream of MoE and multimodal transformers."""

from anabranch.explain import explain
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.api import grouped_gemm
from anabranch.ops.moe_mlp.api import moe_mlp

__version__ = "0.1.0"
__all__ = ["ExpertLayout", "explain", "grouped_gemm", "moe_mlp"]
