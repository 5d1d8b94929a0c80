"""The operations between the router and the residual stream of MoE and multimodal transformers."""

from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.api import grouped_gemm

__version__ = "0.1.0"
__all__ = ["ExpertLayout", "grouped_gemm"]
