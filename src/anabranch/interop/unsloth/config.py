"""Kernel configurations: tiles, which become ours, and wishes for the tensor memory accelerator (TMA)."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.interop.unsloth import rules
from anabranch.ops import checks
from anabranch.ops.grouped_gemm.config import FORWARD, HOPPER, WEIGHT_GRADIENT, legal
from anabranch.tuning import GroupedGemmConfig

TMA_FIELDS = ("use_tma_load_x", "use_tma_load_w", "use_tma_load_dy", "use_tma_store")
NO_LIMIT = 2**62
"""More shared memory than any GPU has."""

_log = logging.getLogger(__name__)


@dataclass
class KernelConfig:
    """What the three have in common. A call's own permute_* and fuse_* arguments rule, not the fields here."""

    BLOCK_SIZE_M: int = 32
    BLOCK_SIZE_N: int = 32
    BLOCK_SIZE_K: int = 32
    num_warps: int = 4
    num_stages: int = 2
    flatten: bool = True
    permute_x: bool = False
    permute_y: bool = False
    fuse_mul_post: bool = False
    use_tma_store: bool = False

    KIND: ClassVar[str] = FORWARD
    ROLES: ClassVar[tuple[str, str, str]] = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
    """Which of the sizes are block_m, block_n and block_k of a GroupedGemmConfig."""

    def check(self, permute_x: bool, permute_y: bool, fuse_mul_post: bool, is_first_gemm: bool) -> None:
        """Raises a ValueError where what is wished for does not go with the call."""
        raise NotImplementedError

    def tiles(self) -> GroupedGemmConfig:
        """The same in our terms."""
        m, n, k = (getattr(self, name) for name in self.ROLES)
        return GroupedGemmConfig(m, n, k, self.num_warps, self.num_stages, flatten=bool(self.flatten))


@dataclass
class KernelConfigForward(KernelConfig):
    """For ``y = X W^T``."""

    use_tma_load_w: bool = False
    use_tma_load_x: bool = False

    def check(self, permute_x: bool, permute_y: bool, fuse_mul_post: bool, is_first_gemm: bool) -> None:
        tma = (self.use_tma_load_x, self.use_tma_load_w, self.use_tma_store)
        rules.check_valid_config_fwd(permute_x, permute_y, *tma, fuse_mul_post, is_first_gemm)


@dataclass
class KernelConfigBackward_dW(KernelConfig):  # noqa: N801 - the interface's name
    """For ``dW = dY^T X``."""

    use_tma_load_dy: bool = False
    use_tma_load_x: bool = False

    KIND = WEIGHT_GRADIENT

    def check(self, permute_x: bool, permute_y: bool, fuse_mul_post: bool, is_first_gemm: bool) -> None:
        tma = (self.use_tma_load_dy, self.use_tma_load_x, self.use_tma_store)
        rules.check_valid_config_bwd_dW(permute_x, permute_y, *tma, fuse_mul_post, is_first_gemm)


@dataclass
class KernelConfigBackward_dX(KernelConfig):  # noqa: N801 - the interface's name
    """For ``dX = dY W``, whose columns are K and whose reduction is N."""

    use_tma_load_dy: bool = False
    use_tma_load_w: bool = False

    ROLES = ("BLOCK_SIZE_M", "BLOCK_SIZE_K", "BLOCK_SIZE_N")

    def check(self, permute_x: bool, permute_y: bool, fuse_mul_post: bool, is_first_gemm: bool) -> None:
        tma = (self.use_tma_load_dy, self.use_tma_load_w, self.use_tma_store)
        rules.check_valid_config_bwd_dX(permute_x, permute_y, *tma, fuse_mul_post, is_first_gemm)


C = TypeVar("C", bound=KernelConfig)


def given(op: str, argument: str, config: Any, cls: type[C]) -> C:
    """The configuration, of the right kind; in the place of None, one that wishes for nothing."""
    if config is None:
        return cls()
    if not isinstance(config, cls):
        expected = f"a {cls.__name__} or None"
        raise ArgumentTypeError(op, argument, expected=expected, got=type(config).__name__)
    return config


def tiles(op: str, argument: str, config: KernelConfig, x: Tensor) -> GroupedGemmConfig | None:
    """What a product of ``x`` runs with: the configuration's tiles, or None where there are none to choose.

    Those that no GPU could run are refused here, and those too large for this one by the backend.
    """
    for name in (*config.ROLES, "num_warps", "num_stages"):
        checks.integer(op, name, getattr(config, name), minimum=1)
    chosen = config.tiles()
    reason = legal(chosen, x.dtype, NO_LIMIT, config.KIND)
    if reason is not None:
        for ours, theirs in zip(("block_m", "block_n", "block_k"), config.ROLES, strict=True):
            reason = reason.replace(ours, theirs)
        raise ArgumentError(op, argument, expected="tiles that a GPU can run", got=reason)
    _warn_without_tma(op, config, x.device)
    return chosen if x.device.type == "cuda" else None


def _warn_without_tma(op: str, config: KernelConfig, device: torch.device) -> None:
    wishes = [name for name in TMA_FIELDS if getattr(config, name, False)]
    if wishes and not torch.compiler.is_compiling() and not _has_tma(device):
        message = f"{op}: {device} has no TMA for {', '.join(wishes)}; plain loads and stores do the same"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def supports_tma() -> bool:
    """Whether the current GPU has a tensor memory accelerator; False without a GPU."""
    return _has_tma(torch.device("cuda"))


def _has_tma(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device) >= HOPPER


def log_kernel_info(compiled_kernel: Any, best_config: Any = None) -> None:
    """Logs at DEBUG what a compiled Triton kernel says of itself, and the configuration it was tuned to."""
    names = ("n_regs", "n_spills", "metadata")
    known = ", ".join(f"{n}={getattr(compiled_kernel, n)}" for n in names if hasattr(compiled_kernel, n))
    _log.debug("%s: %s", getattr(compiled_kernel, "name", compiled_kernel), known)
    if best_config is not None:
        _log.debug("tuned to %s", best_config)
