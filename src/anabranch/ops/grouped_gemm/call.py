"""Validation of grouped_gemm: arguments in, a frozen call out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.epilogues import Epilogue, Identity, resolve
from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.layout import ExpertLayout
from anabranch.ops import checks
from anabranch.ops.frozen import frozen
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig, GroupedGemmConfigs
from anabranch.ops.precision import autocasts, cast_like_matmul
from anabranch.tuning import HEURISTIC

OP = "grouped_gemm"
_IDENTITY = Identity()
NO_TILES = "it has no tiles to configure"
"""Why a backend refuses a configuration."""
AnyConfig: TypeAlias = GroupedGemmConfig | str | None
"""A configuration, HEURISTIC, or None for the best known."""


@dataclass(frozen=True, eq=False)
class GroupedGemmCall:
    """A grouped_gemm whose arguments fit together. The fields are the arguments, named as there."""

    x: Tensor
    weight: Tensor
    layout: ExpertLayout
    gather: bool
    scatter: bool
    bias: Tensor | None
    scale: Tensor | None
    epilogue: Epilogue
    transpose_weight: bool
    out: Tensor | None = None
    backend: str | None = None
    config: AnyConfig = None
    d_x_config: AnyConfig = None
    d_weight_config: AnyConfig = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def weight_nk(self) -> Tensor:
        """The weight as (E, N, K_dim), a view."""
        return self.weight.mT if self.transpose_weight else self.weight

    @property
    def out_rows(self) -> int:
        """Rows of the output: T * K with scatter, else R."""
        return self.layout.slot_to_row.numel() if self.scatter else self.layout.num_rows

    @property
    def out_columns(self) -> int:
        """Columns of the output: N, or N / 2 behind a gate."""
        return self.weight_nk.shape[1] // self.epilogue.columns


def bind_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    layout: ExpertLayout,
    *,
    gather: bool = False,
    scatter: bool = False,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    activation: str | Epilogue | None = None,
    transpose_weight: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    config: GroupedGemmConfigs | AnyConfig = None,
) -> GroupedGemmCall:
    """Checks the arguments of grouped_gemm, casts as autocast asks, and freezes the call."""
    if backend is not None:
        check_name(OP, backend)
    if not type(gather) is type(scatter) is type(transpose_weight) is bool:
        checks.flag(OP, gather=gather, scatter=scatter, transpose_weight=transpose_weight)
    configs = (None, None, None) if config is None else _check_configs(config, backend)
    epilogue = _IDENTITY if activation is None else resolve(OP, activation)
    cast: Any = None
    passed = None
    if type(layout) is ExpertLayout and isinstance(x, Tensor):
        maps = layout.counts, layout.offsets, layout.row_to_slot, layout.slot_to_row
        facts = checks.facts(x, weight, *maps, bias, scale, out)
        if facts is not None:
            cast = autocasts(x.device) and torch.get_autocast_dtype(x.device.type)  # which out has to have
            passed = checks.known(OP, facts, cast, epilogue.columns, gather, scatter, transpose_weight)
    if not passed:
        checks.tensor(OP, "x", x, "(T, K_dim)" if gather else "(R, K_dim)", checks.FLOATS)
        stored = "(E, K_dim, N)" if transpose_weight else "(E, N, K_dim)"
        checks.tensor(OP, "weight", weight, stored, checks.FLOATS)
    if cast is not False:
        x, weight, bias = cast_like_matmul(x, weight, bias)
    config, d_x_config, d_weight_config = configs
    call = frozen(
        GroupedGemmCall,
        x=x,
        weight=weight,
        layout=layout,
        gather=gather,
        scatter=scatter,
        bias=bias,
        scale=scale,
        epilogue=epilogue,
        transpose_weight=transpose_weight,
        out=out,
        backend=backend,
        config=config,
        d_x_config=d_x_config,
        d_weight_config=d_weight_config,
    )
    if not passed:
        _check_fit(call)
        if passed is not None:
            passed.append(True)
    if out is not None:
        checks.no_gradient_through(OP, "out", x=x, weight=weight, bias=bias, scale=scale, out=out)
    return call


def _check_fit(call: GroupedGemmCall) -> None:
    """Whether the tensors go together, and with the options."""
    x, weight, layout, epilogue = call.x, call.weight, call.layout, call.epilogue
    experts, n, k_dim = call.weight_nk.shape
    checks.layout(OP, layout, num_experts=experts)
    checks.same_dtype(OP, "weight", weight, x)
    if call.gather:
        means = "(layout's T, weight's K_dim)"
        checks.shape(OP, "x", x, layout.num_tokens, k_dim, means=means, fits=lambda: _fits(call))
    else:
        means = "(layout's R, weight's K_dim)"
        checks.shape(OP, "x", x, layout.num_rows, k_dim, means=means, fits=lambda: _fits(call))
    if n % epilogue.columns:
        raise ArgumentError(OP, "weight", expected=f"an even N for the gated {epilogue.name}", got=f"N = {n}")
    if call.bias is not None:
        checks.dense(OP, "bias", call.bias, "(E, N)", checks.FLOATS)
        checks.same_dtype(OP, "bias", call.bias, x)
        checks.shape(OP, "bias", call.bias, experts, n, means="(E, N) of weight")
    if call.scale is not None:
        checks.dense(OP, "scale", call.scale, "(T, K)", checks.FLOATS)
        checks.shape(OP, "scale", call.scale, layout.num_tokens, layout.top_k, means="layout's (T, K)")
    if call.out is not None:
        checks.tensor(OP, "out", call.out, "(R, N)", checks.FLOATS)
        checks.same_dtype(OP, "out", call.out, x)
        checks.shape(OP, "out", call.out, call.out_rows, call.out_columns, means="of the result")
    checks.same_device(OP, x, weight=weight, layout=layout, bias=call.bias, scale=call.scale, out=call.out)


def _fits(call: GroupedGemmCall) -> str:
    """The options with which x would fit, if there are such."""
    for gather in (call.gather, not call.gather):
        rows = call.layout.num_tokens if gather else call.layout.num_rows
        _, k_dim, n = call.weight_nk.shape
        for swapped in (False, True):
            given = (rows, k_dim) if swapped else (rows, n)
            if tuple(call.x.shape) == given and not (swapped and n % call.epilogue.columns):
                options = [f"gather={gather}"] if gather != call.gather else []
                options += [f"transpose_weight={not call.transpose_weight}"] if swapped else []
                return " and ".join(options)
    return ""


def bind_gradient(call: GroupedGemmCall, grad: Tensor) -> Tensor:
    """Checks the gradient of a call's output."""
    checks.tensor(OP, "grad", grad, "(R, N)", checks.FLOATS)
    checks.same_dtype(OP, "grad", grad, call.x)
    checks.shape(OP, "grad", grad, call.out_rows, call.out_columns, means="of the result")
    checks.same_device(OP, call.x, grad=grad)
    return grad


def _check_configs(config: Any, backend: str | None) -> tuple[AnyConfig, AnyConfig, AnyConfig]:
    """The configurations of the forward, x's gradient and weight's; a backend says itself whether it has tiles."""
    if isinstance(config, GroupedGemmConfigs):
        products = ("forward", "d_x", "d_weight")
        configs = {f"config.{name}": getattr(config, name) for name in products}
    else:
        # One that is alone is the forward's; the gradients then keep the heuristic's tiles.
        configs = {"config": config, "d_x": HEURISTIC, "d_weight": HEURISTIC}
    for argument, value in configs.items():
        _check_config(argument, value, backend)
    forward, d_x, d_weight = configs.values()
    return forward, d_x, d_weight


def _check_config(argument: str, config: object, backend: str | None) -> None:
    """Demands tiles, or a word for the heuristic's."""
    expected = f"a GroupedGemmConfig, {HEURISTIC!r} or None"
    if isinstance(config, str) and config != HEURISTIC:
        raise ArgumentError(OP, argument, expected=expected, got=repr(config))
    if config is not None and not isinstance(config, (GroupedGemmConfig, str)):
        raise ArgumentTypeError(OP, argument, expected=expected, got=type(config).__name__)
    if config is not None and backend == "reference":
        raise UnsupportedError(OP, argument, expected="None for the reference", got=NO_TILES)
