"""MoE: a whole mixture-of-experts layer."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from anabranch.epilogues import Epilogue
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.nn.experts import Experts
from anabranch.nn.router import Router, Routing
from anabranch.nn.shared_expert import SharedExpert
from anabranch.ops import checks


class MoE(nn.Module):
    """Routes each token through K of E experts, and through a shared one if there is any, and sums.

    The router and the experts have options of their own. A plain softmax router and plain experts are made
    here; to set an option, make the part and hand it over::

        MoE(2048, 768, 128, 8, router=Router(2048, 128, 8, renormalize=True))

    Note the orders: MoE takes H, I, E, K, but Router H, E, K and Experts E, H, I. Keywords are safer. A part that is
    handed over keeps its own options, dtype and device; an option that would be for it alone raises.

    Nothing is kept between calls: for the balancing losses and :meth:`Router.update_selection_bias` ask the
    forward for its routing.

    Args:
        hidden_size: H.
        intermediate_size: I of the routed experts.
        num_experts: E.
        top_k: K.
        router: a :class:`Router` of these sizes; None makes ``Router(hidden_size, num_experts, top_k)``.
        experts: :class:`Experts` of these sizes, ``Experts(num_experts, hidden_size, intermediate_size)``; None
            makes them with ``activation``, ``save`` and ``backend``.
        shared_intermediate_size: I of the :class:`SharedExpert`; None for no shared expert.
        shared_gate: weight the shared expert's result by a sigmoid of each token.
        activation: of the experts made here, routed and shared.
        save: what the routed experts made here keep for the backward, ``"activations"`` or ``"inputs"``; see
            :class:`Experts`.
        backend: of the routed experts made here.
        device: where the parameters made here live; None is the default one, and for a shared expert that of
            ``experts``.
        dtype: theirs, a shared expert's always that of the experts; beside ``experts`` it must be theirs. A router
            that is handed over may have another: its logits are fp32 in any case, and an fp32 router beside bf16
            experts is usual.

    Raises:
        ArgumentError, ArgumentTypeError: a part of another kind or other sizes; ``save`` or ``backend`` beside
            ``experts``; ``activation`` beside ``experts`` without a shared expert; ``device`` or ``dtype`` where
            nothing is made; ``shared_gate`` without a shared expert.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: Router | None = None,
        experts: Experts | None = None,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        activation: str | Epilogue = "swiglu",
        save: Literal["activations", "inputs"] = "activations",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flag("MoE", shared_gate=shared_gate)
        if shared_gate and shared_intermediate_size is None:
            raise ArgumentError(
                "MoE", "shared_gate", expected="a shared_intermediate_size beside it", got="none"
            )
        self.hidden_size = hidden_size
        made_shared = shared_intermediate_size is not None
        if experts is not None:
            nothing = "nothing beside experts=, which have their own"
            _unused("save", save, "activations", nothing)
            _unused("backend", backend, None, nothing)
            if not made_shared:
                _unused("activation", activation, "swiglu", nothing)
        if experts is not None and router is not None and not made_shared:
            nothing = "nothing beside router= and experts=, which have their own"
            _unused("device", device, None, nothing)
            _unused("dtype", dtype, None, nothing)
        if router is None:
            router = Router(hidden_size, num_experts, top_k, device=device, dtype=dtype)
        else:
            sizes = dict(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
            _check_part("router", router, Router, sizes)
        if experts is None:
            experts = Experts(
                num_experts,
                hidden_size,
                intermediate_size,
                activation=activation,
                save=save,
                backend=backend,
                device=device,
                dtype=dtype,
            )
        else:
            sizes = dict(
                hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts
            )
            _check_part("experts", experts, Experts, sizes)
            if dtype is not None:
                checks.float_dtype("MoE", dtype)
                if dtype != experts.gate_up.dtype:
                    expected = f"None or the dtype of experts=, {checks.name(experts.gate_up.dtype)}"
                    raise ArgumentError("MoE", "dtype", expected=expected, got=checks.name(dtype))
        shared = None
        if shared_intermediate_size is not None:
            shared = SharedExpert(
                hidden_size,
                shared_intermediate_size,
                activation=activation,
                gate=shared_gate,
                device=experts.gate_up.device if device is None else device,
                dtype=experts.gate_up.dtype,
            )
        self.router, self.experts, self.shared = router, experts, shared

    def reset_parameters(self) -> None:
        """Draws the parameters of all parts anew."""
        for part in (self.router, self.experts, self.shared):
            if part is not None:
                part.reset_parameters()

    @overload
    def forward(self, x: Tensor, *, return_routing: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, return_routing: Literal[True]) -> tuple[Tensor, Routing]: ...

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """x (..., H) to a tensor of its shape, and with ``return_routing`` the :class:`Routing` as well."""
        checks.last_size("MoE", "x", x, "H", self.hidden_size)
        checks.own_dtype("MoE", "x", x, self.experts.gate_up, "the experts")
        tokens = x.reshape(-1, self.hidden_size)
        routing = self.router(tokens)
        y = self.experts(tokens, routing.ids, routing.weights)
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = y.view(x.shape)
        return (y, routing) if return_routing else y


def _unused(argument: str, value: object, default: object, expected: str) -> None:
    """Refuses an option that no part made here would have."""
    if value != default:
        raise ArgumentError("MoE", argument, expected=expected, got=repr(value))


def _check_part(argument: str, part: object, kind: type[nn.Module], sizes: dict[str, int]) -> None:
    if not isinstance(part, kind):
        raise ArgumentTypeError(
            "MoE", argument, expected=f"None or a {kind.__name__}", got=type(part).__name__
        )
    own = {name: getattr(part, name) for name in sizes}
    for name, size in sizes.items():
        if own[name] != size:
            got = f"{name} = {own[name]}"
            in_its_order = [own.get(name) for name in ("num_experts", "hidden_size", "intermediate_size")]
            if in_its_order == list(sizes.values()):
                got += "; Experts takes num_experts, hidden_size, intermediate_size in this order"
            raise ArgumentError("MoE", argument, expected=f"one with {name} = {size}", got=got)
