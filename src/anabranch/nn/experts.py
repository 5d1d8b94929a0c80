"""Experts: the parameters of E expert MLPs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from anabranch.dispatch import check_name
from anabranch.epilogues import Epilogue, resolve
from anabranch.ops import checks
from anabranch.ops.moe_mlp.api import moe_mlp
from anabranch.ops.moe_mlp.call import check_options
from anabranch.ops.wording import speaks_of


class Experts(nn.Module):
    """E expert MLPs, of which each token goes through K: :func:`anabranch.moe_mlp` with its parameters.

    Letters: T tokens, H hidden size, I intermediate size, E experts, K experts per token. ``gate_up`` is
    (E, 2 * I, H), or (E, I, H) for an activation without a gate, and ``down`` is (E, H, I): each expert's
    matrices as nn.Linear stores them. With ``bias``, ``gate_up_bias`` is (E, 2 * I) and ``down_bias`` (E,
    H).

    The order of the sizes is that of the parameters, E first; :class:`MoE` takes hidden_size, intermediate_size,
    num_experts. Keywords are safer: ``Experts(num_experts=8, hidden_size=32, intermediate_size=24)``.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        activation: an epilogue by name or value (:mod:`anabranch.epilogues`).
        bias: give both matrices a bias.
        gate_layout: ``"concatenated"`` has all gate rows, then all up rows; ``"interleaved"`` alternates
            them.
        transpose_weight: store (E, H, 2 * I) and (E, I, H) instead.
        weight_on: ``"output"`` weights an expert's result, ``"input"`` what it gets.
        save: ``"activations"`` keeps the pre-activation, of T * K * 2 * I numbers, for the backward; ``"inputs"``
            keeps x and the routing alone, and the backward makes it again, for 2/9 more multiplications a step
            (1/6 without a gate).
        backend: a backend's name, which then runs or raises; None takes the first that can serve the call.
        device: where the parameters live.
        dtype: theirs.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Epilogue = "swiglu",
        bias: bool = False,
        gate_layout: Literal["concatenated", "interleaved"] = "concatenated",
        transpose_weight: bool = False,
        weight_on: Literal["output", "input"] = "output",
        save: Literal["activations", "inputs"] = "activations",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.integer("Experts", "num_experts", num_experts, minimum=1)
        checks.integer("Experts", "hidden_size", hidden_size, minimum=1)
        checks.integer("Experts", "intermediate_size", intermediate_size, minimum=1)
        checks.flag("Experts", bias=bias, transpose_weight=transpose_weight)
        check_name("Experts", backend)
        checks.float_dtype("Experts", dtype)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = resolve("Experts", activation)
        self.gate_layout = gate_layout
        self.transpose_weight = transpose_weight
        self.weight_on = weight_on
        self.save = save
        self.backend = backend
        check_options("Experts", self.activation, gate_layout, weight_on, save)

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *sizes, device=device, dtype=dtype))

        width = self.activation.columns * intermediate_size
        if transpose_weight:
            self.gate_up = parameter(hidden_size, width)
            self.down = parameter(intermediate_size, hidden_size)
        else:
            self.gate_up = parameter(width, hidden_size)
            self.down = parameter(hidden_size, intermediate_size)
        self.gate_up_bias = parameter(width) if bias else None
        self.down_bias = parameter(hidden_size) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws each expert's matrices and biases as nn.Linear does."""
        for weight, bias, fan_in in (
            (self.gate_up, self.gate_up_bias, self.hidden_size),
            (self.down, self.down_bias, self.intermediate_size),
        ):
            bound = 1 / math.sqrt(fan_in)
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)

    @speaks_of(name="Experts")
    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Sends tokens through their experts.

        Args:
            x: (T, H).
            expert_ids: (T, K) int64 or int32; ids outside ``[0, E)`` are dropped.
            expert_weights: (T, K) routing weights, any float dtype.

        Returns:
            (T, H), each token's weighted sum.
        """
        checks.tensor("Experts", "x", x, "(T, H)", checks.FLOATS)
        checks.shape(
            "Experts", "x", x, x.shape[0], self.hidden_size, means="(T, H)", fits=lambda: self._rotated(x)
        )
        checks.own_dtype("Experts", "x", x, self.gate_up, "the parameters")
        return moe_mlp(
            x,
            self.gate_up,
            self.down,
            expert_ids,
            expert_weights,
            activation=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            transpose_weight=self.transpose_weight,
            gate_layout=self.gate_layout,
            weight_on=self.weight_on,
            save=self.save,
            backend=self.backend,
        )

    def _rotated(self, x: Tensor) -> str:
        """The Experts that x would fit, had the sizes been given in MoE's order."""
        if x.shape[1] != self.num_experts:
            return ""
        e, h, i = self.intermediate_size, self.num_experts, self.hidden_size
        return f"Experts(num_experts={e}, hidden_size={h}, intermediate_size={i})"

    def extra_repr(self) -> str:
        """The arguments, without those at their defaults."""
        shown = [f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"]
        shown += [f"activation={self.activation.spec!r}"]
        shown += ["bias=True"] if self.gate_up_bias is not None else []
        shown += [f"gate_layout={self.gate_layout!r}"] if self.gate_layout != "concatenated" else []
        shown += ["transpose_weight=True"] if self.transpose_weight else []
        shown += [f"weight_on={self.weight_on!r}"] if self.weight_on != "output" else []
        shown += [f"save={self.save!r}"] if self.save != "activations" else []
        shown += [f"backend={self.backend!r}"] if self.backend is not None else []
        return ", ".join(shown)
