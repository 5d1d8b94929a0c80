"""Drop-in for unsloth's MoE grouped GEMM: its names, arguments and results over :func:`anabranch.grouped_gemm`.

Letters of this interface: num_tokens tokens, topk experts each, total_tokens = num_tokens * topk rows, E experts,
W (E, N, K) or (E * N, K). docs/migrating/unsloth.md says what changes for a program that comes from there.
"""

from anabranch.interop.unsloth.config import (
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    log_kernel_info,
    supports_tma,
)
from anabranch.interop.unsloth.interface import GroupedGemm, grouped_gemm
from anabranch.interop.unsloth.products import grouped_gemm_dW, grouped_gemm_dX, grouped_gemm_forward
from anabranch.interop.unsloth.rules import (
    check_valid_config_bwd_dW,
    check_valid_config_bwd_dX,
    check_valid_config_fwd,
)

__all__ = [
    "GroupedGemm",
    "KernelConfigBackward_dW",
    "KernelConfigBackward_dX",
    "KernelConfigForward",
    "check_valid_config_bwd_dW",
    "check_valid_config_bwd_dX",
    "check_valid_config_fwd",
    "grouped_gemm",
    "grouped_gemm_dW",
    "grouped_gemm_dX",
    "grouped_gemm_forward",
    "log_kernel_info",
    "supports_tma",
]
