"""The operations between the router and the residual stream of MoE and multimodal transformers."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.explain import explain
from anabranch.layout import ExpertLayout
from anabranch.ops.grouped_gemm.api import grouped_gemm
from anabranch.ops.moe_mlp.api import moe_mlp
from anabranch.ops.multi_gemm.api import dual_gemm, multi_gemm
from anabranch.ops.permute.api import permute, unpermute
from anabranch.ops.positions.api import rope_index, vision_rotary, window_index
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.topk_router.api import topk_router

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ExpertLayout",
    "UnsupportedError",
    "dual_gemm",
    "explain",
    "grouped_gemm",
    "moe_mlp",
    "mrope",
    "multi_gemm",
    "permute",
    "rope",
    "rope_index",
    "topk_router",
    "unpermute",
    "vision_rotary",
    "window_index",
]


def __getattr__(name: str) -> _ModuleType:
    """``anabranch.nn`` and ``anabranch.interop``, which are imported when they are first asked for."""
    if name in ("interop", "nn"):
        return _import_module(f"anabranch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
