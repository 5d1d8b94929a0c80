"""Text from the model."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.cli.demo.train import Trainer

TEMPERATURE = 0.7


@torch.no_grad()
def sample(trainer: Trainer, length: int) -> tuple[str, str]:
    """(a prompt from the validation text, what the model writes after it): a function of model and seed."""
    context = trainer.config.context
    data = trainer.corpus.validation
    prompt = data[: min(context // 4, len(data))].long()
    generator = torch.Generator().manual_seed(trainer.seed)
    written = prompt
    for _ in range(length):
        logits, _ = trainer.model(written[-context:].to(trainer.device)[None])
        odds = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(-1)
        written = torch.cat([written, torch.multinomial(odds, 1, generator=generator)])
    return _text(prompt), _text(written[len(prompt) :])


def _text(data: Tensor) -> str:
    text = bytes(data.tolist()).decode("utf-8", errors="replace")
    # Control characters would act on the terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
