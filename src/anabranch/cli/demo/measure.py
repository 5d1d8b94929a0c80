"""The report's timings: a training step, its experts alone, and the same step with the experts as a loop.

And what the experts keep for the backward, as they are and as a loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anabranch.cli.demo.loop import LoopExperts, as_loop
from anabranch.cli.demo.model import experts_of
from anabranch.cli.demo.train import Trainer, synchronise
from anabranch.cli.failure import Failure
from anabranch.nn import Experts

ROUNDS = 5
Captured = tuple[Experts, tuple[Tensor, ...], Tensor]


@dataclass(frozen=True)
class Timings:
    """Medians, in seconds: a whole step, its experts' forward and backward, the step with a loop.

    And the bytes that the experts of all layers keep for the backward beyond their inputs, and that loops keep.
    """

    step: float
    experts: float
    loop_step: float
    saved_bytes: int
    loop_saved_bytes: int

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
    captured = _capture(scratch)
    experts = _experts_alone(captured)
    saved = sum(saved_bytes(module, inputs) for module, inputs, _ in captured)
    loop_saved = sum(saved_bytes(LoopExperts(module), inputs) for module, inputs, _ in captured)
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
    return Timings(medians["step"], medians["experts"], medians["loop"], saved, loop_saved)


def saved_bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What autograd saves in a forward of the module, beyond its inputs and parameters."""
    given = {value.untyped_storage().data_ptr() for value in (*inputs, *module.parameters())}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        # Alive until the count is taken, or a freed storage's address could come twice.
        out = module(*inputs)
    assert out.requires_grad
    return sum(kept.values())


def _clock(trainer: Trainer, run: Callable[[], object]) -> float:
    synchronise(trainer.device)
    start = time.perf_counter()
    run()
    synchronise(trainer.device)
    return time.perf_counter() - start


def _capture(trainer: Trainer) -> list[Captured]:
    """Every layer's experts, with what they get in a step and a gradient of their output."""
    captured: list[Captured] = []

    def keep(module: Experts, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        leaves = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
        captured.append((module, leaves, torch.randn_like(output)))

    hooks = [experts.register_forward_hook(keep) for experts in experts_of(trainer.model)]
    with torch.no_grad():
        trainer.model(trainer.batch(0)[0])
    for hook in hooks:
        hook.remove()
    return captured


def _experts_alone(captured: list[Captured]) -> Callable[[], None]:
    """Forward and backward of them all."""

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
