"""The checkpoint: one safetensors file that a run can go on from as if it had never stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from anabranch.cli.demo.config import Config
from anabranch.cli.demo.train import Trainer
from anabranch.cli.failure import Failure
from anabranch.cli.files import write_aside

NAME = "checkpoint.safetensors"
KEY = "anabranch.demo"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run as it was saved."""

    path: Path
    config: Config
    text: str | None
    fingerprint: str
    seed: int
    threads: int
    device: str
    step: int
    steps: int
    tensors: dict[str, Tensor]

    def restore(self, trainer: Trainer) -> None:
        """Puts a new trainer where the saved one was.

        Raises:
            Failure: the tensors are not those of such a model.
        """
        model, state = _part(self.tensors, "model."), _part(self.tensors, "optimizer.")
        try:
            trainer.model.load_state_dict(model)
            trainer.optimizers.load(state)
            history = _part(self.tensors, "history.")
            trainer.history.train = history["train"].tolist()
            trainer.history.validation = list(
                zip(history["checks"].tolist(), history["validation"].tolist(), strict=True)
            )
        except (RuntimeError, KeyError, ValueError) as error:
            raise Failure(f"{self.path} is damaged: its tensors are not those of its model") from error
        trainer.step, trainer.steps = self.step, self.steps


def save(path: Path, trainer: Trainer, text: Path | None, threads: int) -> None:
    """Writes a checkpoint, aside first. Equal runs write equal bytes.

    Raises:
        Failure: it could not be written; an earlier checkpoint is still there.
    """
    data = to_bytes(trainer, text, threads)
    write_aside(path, lambda aside: aside.write_bytes(data))


def to_bytes(trainer: Trainer, text: Path | None, threads: int) -> bytes:
    """The checkpoint's file."""
    history = trainer.history
    tensors = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    tensors |= {f"optimizer.{name}": value for name, value in trainer.optimizers.tensors()}
    tensors["history.train"] = torch.tensor(history.train, dtype=torch.float64)
    tensors["history.checks"] = torch.tensor([step for step, _ in history.validation], dtype=torch.int64)
    tensors["history.validation"] = torch.tensor([x for _, x in history.validation], dtype=torch.float64)
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about: dict[str, Any] = {
        "format": FORMAT,
        "config": asdict(trainer.config),
        "text": None if text is None else str(text.resolve()),
        "fingerprint": trainer.corpus.fingerprint,
        "seed": trainer.seed,
        "threads": threads,
        "device": trainer.device.type,
        "step": trainer.step,
        "steps": trainer.steps,
    }
    about["digest"] = _digest(tensors.items(), about)
    # One entry, since the order of several would differ from file to file.
    return safetensors.torch.save(tensors, {KEY: json.dumps(about)})


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint and checks that it is whole.

    Raises:
        Failure: there is none, or it is damaged, or another version's.
    """
    if not path.is_file():
        raise Failure(f"there is no checkpoint {path} to resume from")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise Failure(f"{path} is not a checkpoint of the demo") from error
    except (safetensors.SafetensorError, ValueError, RuntimeError) as error:
        raise Failure(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(about, dict):
        raise Failure(f"{path} is damaged: it does not say what it holds")
    if about.get("format") != FORMAT:
        raise Failure(f"{path} was written by another version of anabranch")
    if about.pop("digest", None) != _digest(tensors.items(), about):
        raise Failure(f"{path} is damaged: its contents do not match its digest")
    try:
        config = Config(**about["config"])
        keys = ("text", "fingerprint", "seed", "threads", "device", "step", "steps")
        return Checkpoint(path, config, tensors=tensors, **{key: about[key] for key in keys})
    except (KeyError, TypeError) as error:
        raise Failure(f"{path} was written by another version of anabranch") from error


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _digest(tensors: Iterable[tuple[str, Tensor]], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
