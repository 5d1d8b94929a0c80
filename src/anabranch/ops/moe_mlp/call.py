"""Validation of moe_mlp: arguments in, a frozen call out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.dispatch import check_name
from anabranch.epilogues import Epilogue, resolve
from anabranch.errors import ArgumentError
from anabranch.layout import ExpertLayout
from anabranch.ops import checks
from anabranch.ops.frozen import frozen
from anabranch.ops.precision import autocasts, cast_like_matmul

OP = "moe_mlp"


@dataclass(frozen=True, eq=False)
class MoeMlpCall:
    """A moe_mlp whose arguments fit together. The fields are the arguments, named as there.

    ``layout`` is the routing of ``expert_ids``: a forward makes it, see :meth:`routed`, and a backward has it alone.
    """

    x: Tensor
    gate_up: Tensor
    down: Tensor
    expert_weights: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    epilogue: Epilogue
    transpose_weight: bool
    gate_layout: str
    weight_on: str
    backend: str | None
    save: str = "activations"
    expert_ids: Tensor | None = None
    layout: ExpertLayout | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def keeps_h(self) -> bool:
        """Whether the forward keeps the pre-activation for a backward."""
        inputs = self.x, self.gate_up, self.down, self.expert_weights, self.gate_up_bias, self.down_bias
        return self.save == "activations" and checks.needs_grad(*inputs)

    @property
    def gate_up_nk(self) -> Tensor:
        """gate_up as (E, 2 * I, H), a view."""
        return self.gate_up.mT if self.transpose_weight else self.gate_up

    @property
    def down_nk(self) -> Tensor:
        """down as (E, H, I), a view."""
        return self.down.mT if self.transpose_weight else self.down

    def routed(self, fields: Sequence[Tensor]) -> MoeMlpCall:
        """The call with the fields of its layout."""
        return frozen(MoeMlpCall, **{**vars(self), "layout": ExpertLayout(*fields)})

    def columns(self, h: Tensor) -> tuple[Tensor, ...]:
        """The epilogue's operands in a pre-activation (rows, 2 * I), as views."""
        count = self.epilogue.columns
        if count == 1:
            return (h,)
        if self.gate_layout == "interleaved":
            return tuple(h[:, i::count] for i in range(count))
        return h.chunk(count, dim=-1)


def bind_moe_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    activation: str | Epilogue = "swiglu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transpose_weight: bool = False,
    gate_layout: str = "concatenated",
    weight_on: str = "output",
    save: str = "activations",
    backend: str | None = None,
) -> MoeMlpCall:
    """Checks the arguments of moe_mlp, casts as autocast asks, and freezes the call."""
    check_name(OP, backend)
    checks.flag(OP, transpose_weight=transpose_weight)
    epilogue = resolve(OP, activation)
    check_options(OP, epilogue, gate_layout, weight_on, save)
    facts = checks.facts(x, gate_up, down, expert_ids, expert_weights, gate_up_bias, down_bias)
    passed = None
    if facts is not None and x is not None:
        passed = checks.known(OP, facts, autocasts(x.device), epilogue.name, transpose_weight)
    if not passed:
        _check_types(x, gate_up, down, expert_ids, expert_weights, epilogue, transpose_weight)
    x, gate_up, down, gate_up_bias, down_bias = cast_like_matmul(x, gate_up, down, gate_up_bias, down_bias)
    call = frozen(
        MoeMlpCall,
        x=x,
        gate_up=gate_up,
        down=down,
        expert_weights=expert_weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        epilogue=epilogue,
        transpose_weight=transpose_weight,
        gate_layout=gate_layout,
        weight_on=weight_on,
        backend=backend,
        save=save,
        expert_ids=expert_ids,
    )
    if not passed:
        _check_fit(call)
        if passed is not None:
            passed.append(True)
    return call


def _check_types(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    epilogue: Epilogue,
    transpose_weight: bool,
) -> None:
    width = "I" if epilogue.columns == 1 else f"{epilogue.columns} * I"
    checks.tensor(OP, "x", x, "(T, H)", checks.FLOATS)
    checks.tensor(
        OP, "gate_up", gate_up, f"(E, H, {width})" if transpose_weight else f"(E, {width}, H)", checks.FLOATS
    )
    checks.tensor(OP, "down", down, "(E, I, H)" if transpose_weight else "(E, H, I)", checks.FLOATS)
    checks.tensor(OP, "expert_ids", expert_ids, "(T, K)", checks.INTEGERS)
    checks.dense(OP, "expert_weights", expert_weights, "(T, K)", checks.FLOATS)


def _check_fit(call: MoeMlpCall) -> None:
    _check_shapes(call)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        value = getattr(call, name)
        if value is not None:
            checks.same_dtype(OP, name, value, call.x)
    checks.same_device(
        OP, call.x, gate_up=call.gate_up, down=call.down, expert_ids=call.expert_ids,
        expert_weights=call.expert_weights, gate_up_bias=call.gate_up_bias, down_bias=call.down_bias,
    )  # fmt: skip


def check_options(op: str, epilogue: Epilogue, gate_layout: str, weight_on: str, save: str) -> None:
    """Demands options that fit each other, for the function and for modules that keep them."""
    checks.choice(op, "gate_layout", gate_layout, ("concatenated", "interleaved"))
    checks.choice(op, "weight_on", weight_on, ("output", "input"))
    checks.choice(op, "save", save, ("activations", "inputs"))
    if gate_layout == "interleaved" and epilogue.columns == 1:
        expected = f"'concatenated' for {epilogue.name}, which has no gate"
        raise ArgumentError(op, "gate_layout", expected=expected, got=repr(gate_layout))


def _check_shapes(call: MoeMlpCall) -> None:
    tokens, hidden = call.x.shape
    experts, width, _ = call.gate_up_nk.shape
    columns = call.epilogue.columns
    if experts == 0:
        raise ArgumentError(OP, "gate_up", expected="at least one expert", got="E = 0")
    swap = call.transpose_weight
    means = "(gate_up's E, gate_up's width, x's H)" if not swap else "(gate_up's E, x's H, gate_up's width)"
    sizes = (hidden, width) if swap else (width, hidden)
    checks.shape(OP, "gate_up", call.gate_up, experts, *sizes, means=means, fits=lambda: _fits(call))
    if width % columns:
        expected = f"an even output width for the gated {call.epilogue.name}"
        raise ArgumentError(OP, "gate_up", expected=expected, got=f"{width}")
    inner = width // columns
    means = "(gate_up's E, x's H, gate_up's I)" if not swap else "(gate_up's E, gate_up's I, x's H)"
    sizes = (inner, hidden) if swap else (hidden, inner)
    checks.shape(OP, "down", call.down, experts, *sizes, means=means, fits=lambda: _fits(call))
    assert call.expert_ids is not None
    top_k = call.expert_ids.shape[1]
    checks.shape(OP, "expert_ids", call.expert_ids, tokens, top_k, means="(x's T, K)")
    checks.shape(OP, "expert_weights", call.expert_weights, tokens, top_k, means="expert_ids' (T, K)")
    if call.gate_up_bias is not None:
        letters = "(E, I)" if columns == 1 else f"(E, {columns} * I)"
        checks.dense(OP, "gate_up_bias", call.gate_up_bias, letters, checks.FLOATS)
        checks.shape(OP, "gate_up_bias", call.gate_up_bias, experts, width, means="gate_up's (E, width)")
    if call.down_bias is not None:
        checks.dense(OP, "down_bias", call.down_bias, "(E, H)", checks.FLOATS)
        checks.shape(OP, "down_bias", call.down_bias, experts, hidden, means="(gate_up's E, x's H)")


def _fits(call: MoeMlpCall) -> str:
    """What gate_up and down would fit together, if other than what was asked for."""
    hidden = call.x.shape[1]
    experts, width, inner = call.gate_up_nk.shape
    down = tuple(call.down_nk.shape)
    columns = call.epilogue.columns
    if width == hidden and inner % columns == 0 and down == (experts, inner // columns, hidden):
        return f"transpose_weight={not call.transpose_weight}"
    if columns == 1 and width % 2 == 0 and inner == hidden and down == (experts, hidden, width // 2):
        return f"a gated activation ({call.epilogue.name} has no gate)"
    return ""
