"""Training: a run that is a function of the text, the configuration, the seed and the number of steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.cli.demo.config import Config
from anabranch.cli.demo.data import Corpus, batch, bits, validation_windows
from anabranch.cli.demo.model import Transformer, imbalance, shares
from anabranch.cli.demo.optimizer import Optimizers
from anabranch.cli.failure import Failure

CHECKS = 10  # how many times a run looks at validation bytes on its way
CHECK_WINDOWS = 16


@dataclass
class History:
    """What the curves are drawn from: one training figure a step, few validation ones as (step, figure)."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


class Trainer:
    """A model, its optimizers, and how far they are."""

    def __init__(self, config: Config, corpus: Corpus, seed: int, device: torch.device) -> None:
        self.config, self.corpus, self.seed, self.device = config, corpus, seed, device
        # The parameters are drawn on the CPU, so that a seed means the same everywhere.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Transformer(config).to(device)
        self.optimizers = Optimizers(self.model, config)
        self.step, self.steps = 0, 0
        self.history = History()
        self.seconds: list[float] = []  # of each step made here: a checkpoint knows nothing of them

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step, on the device."""
        inputs, targets = batch(self.corpus.train, step, self.seed, self.config.batch, self.config.context)
        return inputs.to(self.device), targets.to(self.device)

    def loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(what is minimised, the cross-entropy in it)."""
        logits, routings = self.model(inputs)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return entropy + self.config.balance * imbalance(routings), entropy

    def train_step(self) -> float:
        """One step; returns its bits per byte."""
        loss, entropy = self.loss(*self.batch(self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(self.step, self.steps)
        self.step += 1
        found = bits(entropy.item())
        if not math.isfinite(found):
            raise Failure(f"the loss of step {self.step} is not finite; try another --seed")
        return found

    def run(self, report: Callable[[], None], stop: Callable[[], bool]) -> bool:
        """Trains to the end, or until ``stop`` says so after a step; returns whether it got to the end.

        ``report`` is called after each step, when all that a checkpoint holds is of that step.
        """
        every = max(1, self.steps // CHECKS)
        while self.step < self.steps:
            begin = time.perf_counter()
            self.history.train.append(self.train_step())
            self.seconds.append(time.perf_counter() - begin)
            # The last step too, so that every point of the curve is of the same bytes.
            if self.step % every == 0 or self.step == self.steps:
                self.history.validation.append((self.step, self.evaluate(CHECK_WINDOWS)[0]))
            report()
            if stop() and self.step < self.steps:
                return False
        return True

    @torch.no_grad()
    def evaluate(self, most: int | None = None) -> tuple[float, Tensor]:
        """(bits per byte, (layers, experts) load) on all validation windows, or ``most`` spread over them."""
        inputs, targets = validation_windows(self.corpus.validation, self.config.context)
        if most is not None and most < len(inputs):
            some = torch.arange(most) * len(inputs) // most
            inputs, targets = inputs[some], targets[some]
        total, load = 0.0, torch.zeros(self.config.depth, self.config.experts)
        size = 2 * self.config.batch
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            logits, routings = self.model(x.to(self.device))
            total += F.cross_entropy(logits.flatten(0, 1), y.to(self.device).flatten()).item() * len(x)
            load += shares(routings).cpu() * len(x)
        return bits(total / len(inputs)), load / len(inputs)


def synchronise(device: torch.device) -> None:
    """Waits for the device, so that a clock says something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calibrate(config: Config, corpus: Corpus, device: torch.device, stop: Callable[[], bool]) -> float:
    """Seconds of a step, measured on a model that is then thrown away."""
    trainer = Trainer(config, corpus, 0, device)
    trainer.steps = config.max_steps
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 8 or (len(times) < 40 and time.perf_counter() - begin < 5):
        start = time.perf_counter()
        trainer.train_step()
        synchronise(device)
        times.append(time.perf_counter() - start)
        if stop():
            break
    # The first steps fill caches.
    return statistics.median(times[3:] or times)


def affordable_steps(config: Config, corpus: Corpus, seconds: float, step: float) -> int:
    """How many steps fit into ``seconds``, with the validation and the report at the end."""
    validated = len(corpus.validation) + (CHECKS + 1) * CHECK_WINDOWS * config.context
    # A forward is a third of a step; the report takes some thirty steps' time to compare and to write text.
    left = seconds - step * (validated / config.tokens_per_step / 3 + 32)
    return max(20, int(min(config.max_steps, left / step)))
