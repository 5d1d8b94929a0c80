"""The report's timings: a training step, its experts alone, and the same step with the experts as a loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.cli.demo.loop import as_loop
from anabranch.cli.demo.model import experts_of
from anabranch.cli.demo.train import Trainer, synchronise
from anabranch.cli.failure import Failure

ROUNDS = 5


@dataclass(frozen=True)
class Timings:
    """Medians, in seconds: a whole step, its experts' forward and backward, the step with a loop."""

    step: float
    experts: float
    loop_step: float

    @property
    def experts_share(self) -> float:
        """Share of the step in the experts."""
        return self.experts / self.step

    @property
    def loop_ratio(self) -> float:
        """How many times as long a step takes with a plain loop."""
        return self.loop_step / self.step


def measure(trainer: Trainer, rounds: int = ROUNDS) -> Timings:
    """Times the three in turn on a copy of the model, after checking that the loop gives the same gradients.

    Raises:
        Failure: it does not.
    """
    scratch = Trainer(trainer.config, trainer.corpus, trainer.seed, trainer.device)
    scratch.model.load_state_dict(trainer.model.state_dict())
    scratch.steps = 10**9  # at the very start of so long a warmup the steps change nothing
    _check_same(scratch)
    experts = _experts_alone(scratch)
    times: dict[str, list[float]] = {"step": [], "experts": [], "loop": []}
    for index in range(rounds + 1):
        # Interleaved, so that what else the machine does falls on all alike; the same batch for all.
        scratch.step = index
        times["step"].append(_clock(scratch, scratch.train_step))
        times["experts"].append(_clock(scratch, experts))
        scratch.step = index
        with as_loop(scratch.model):
            times["loop"].append(_clock(scratch, scratch.train_step))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return Timings(medians["step"], medians["experts"], medians["loop"])


def _clock(trainer: Trainer, run: Callable[[], object]) -> float:
    synchronise(trainer.device)
    start = time.perf_counter()
    run()
    synchronise(trainer.device)
    return time.perf_counter() - start


def _experts_alone(trainer: Trainer) -> Callable[[], None]:
    """Forward and backward of every layer's experts, on what they get in a step."""
    captured: list[tuple[torch.nn.Module, tuple[Tensor, ...], Tensor]] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        leaves = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
        captured.append((module, leaves, torch.randn_like(output)))

    hooks = [experts.register_forward_hook(keep) for experts in experts_of(trainer.model)]
    with torch.no_grad():
        trainer.model(trainer.batch(0)[0])
    for hook in hooks:
        hook.remove()

    def run() -> None:
        for module, inputs, gradient in captured:
            wanted = [x for x in inputs if x.requires_grad]
            torch.autograd.grad(module(*inputs), [*wanted, *module.parameters()], gradient)

    return run


def _check_same(trainer: Trainer) -> None:
    def results() -> tuple[Tensor, Tensor]:
        trainer.model.zero_grad()
        loss = trainer.loss(*trainer.batch(0))[0]
        loss.backward()
        gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
        return loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    loss, gradient = results()
    with as_loop(trainer.model):
        loop_loss, loop_gradient = results()
    # Rounding alone tells them apart. It may send a token near a tie elsewhere in a later layer, which moves
    # a few gradients more than rounding itself does.
    close = torch.allclose(loss, loop_loss, rtol=1e-4, atol=0)
    off = (gradient - loop_gradient).norm() / loop_gradient.norm()
    if not (close and off < 1e-2):
        raise Failure(
            f"the experts as a loop give another result: loss {loop_loss:.6f} instead of {loss:.6f}, "
            f"gradients {off:.1e} apart"
        )
