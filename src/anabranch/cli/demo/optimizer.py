"""Muon for the matrices inside the blocks, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from anabranch.cli.demo.config import Config

# Newton-Schulz of Muon (Jordan et al. 2024): a few rounds take singular values near one, and near is enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 4
MOMENTUM = 0.95


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest (..., rows, columns) with singular values of one."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; for each expert on its own, as its weights are matrices of their own."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
                update = orthogonal(parameter.grad.lerp(momentum, MOMENTUM))
                rate = group["lr"] * max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


class Optimizers:
    """Both of them, as one."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        named = dict(model.named_parameters())
        inside = [name for name, value in named.items() if name.startswith("blocks.") and value.ndim >= 2]
        self.config = config
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        self.muon = Muon([named[name] for name in inside], config.muon_rate, config.weight_decay)
        rest = [parameter for name, parameter in named.items() if name not in inside]
        self.adam = torch.optim.AdamW(rest, config.adam_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
        self.peaks = ((self.muon, config.muon_rate), (self.adam, config.adam_rate))

    def step(self, step: int, steps: int) -> None:
        """Updates the model at the learning rate of ``step``, and drops the gradients."""
        factor = schedule(step, steps, self.config)
        for optimizer, peak in self.peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state by name, as a checkpoint holds it."""
        for optimizer, _ in self.peaks:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    yield f"{self.names[parameter]}.{key}", value

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over a state that :meth:`tensors` gave; an empty one is that of a new model."""
        for optimizer, keys in ((self.muon, ("momentum",)), (self.adam, ("exp_avg", "exp_avg_sq", "step"))):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[parameter]
                    state = {key: tensors[f"{name}.{key}"] for key in keys if f"{name}.{key}" in tensors}
                    if state:
                        optimizer.state[parameter] = {
                            key: value.to(parameter.device, copy=True) for key, value in state.items()
                        }


def schedule(step: int, steps: int, config: Config) -> float:
    """Share of the peak learning rate: a short linear start, then half a cosine."""
    start = min(1.0, (step + 1) / (config.warmup * steps + 1))
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return start * (config.final_rate + (1 - config.final_rate) * cosine)
