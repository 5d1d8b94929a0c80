"""SharedExpert: a dense MLP beside the experts that are chosen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anabranch.epilogues import Epilogue, resolve
from anabranch.ops import checks


class SharedExpert(nn.Module):
    """An expert that every token goes through: ``down(act(gate_up(x)))``.

    With ``gate`` each token's result is multiplied by ``sigmoid(<gate.weight, x>)``, as Qwen2-MoE does. It
    is made of nn.Linear layers: one expert for all tokens is an ordinary product, with nothing to sort.

    Args:
        hidden_size: H.
        intermediate_size: I.
        activation: an epilogue by name or value (:mod:`anabranch.epilogues`); a gated one takes its gate
            from the first I columns of ``gate_up`` and up from the last.
        gate: weight each token's result.
        device: where the parameters live.
        dtype: theirs.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Epilogue = "swiglu",
        gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.integer("SharedExpert", "hidden_size", hidden_size, minimum=1)
        checks.integer("SharedExpert", "intermediate_size", intermediate_size, minimum=1)
        checks.flag("SharedExpert", gate=gate)
        checks.float_dtype("SharedExpert", dtype)
        self.hidden_size = hidden_size
        self.activation = resolve("SharedExpert", activation)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.gate_up = linear(hidden_size, self.activation.columns * intermediate_size)
        self.down = linear(intermediate_size, hidden_size)
        self.gate = linear(hidden_size, 1) if gate else None

    def reset_parameters(self) -> None:
        """Draws all weights as nn.Linear does."""
        for layer in (self.gate_up, self.down, self.gate):
            if layer is not None:
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) to (..., H)."""
        checks.last_size("SharedExpert", "x", x, "H", self.hidden_size)
        checks.own_dtype("SharedExpert", "x", x, self.gate_up.weight, "the parameters")
        checks.same_device("SharedExpert", self.gate_up.weight, "gate_up.weight", x=x)
        # In the dtype of h: autograd would keep an fp32 copy of it for the backward.
        h = self.gate_up(x).chunk(self.activation.columns, dim=-1)
        y: Tensor = self.down(self.activation.forward(*h))
        return y if self.gate is None else y * self.gate(x).sigmoid()

    def extra_repr(self) -> str:
        """The activation; the layers show the rest."""
        return f"activation={self.activation.spec!r}"
