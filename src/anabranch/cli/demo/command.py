"""The demo from its options to its report."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from anabranch.cli import machine
from anabranch.cli.demo import checkpoint
from anabranch.cli.demo.config import Config
from anabranch.cli.demo.data import Corpus, load_corpus
from anabranch.cli.demo.measure import measure
from anabranch.cli.demo.model import count_parameters
from anabranch.cli.demo.progress import TrainingProgress
from anabranch.cli.demo.report import Summary, show_report, write_report
from anabranch.cli.demo.sample import sample
from anabranch.cli.demo.train import Trainer, affordable_steps, calibrate
from anabranch.cli.failure import Failure
from anabranch.cli.files import check_room

SAMPLE_BYTES = 300
STATE_BYTES = 16  # of a checkpoint for each parameter at most: itself and its optimizer's state


class Interrupted(Exception):  # noqa: N818 - no error
    """The user stopped the demo. Its text says what was saved."""


@dataclass(frozen=True)
class Options:
    """What the user asked for; None where they left it to us."""

    text: Path | None = None
    out: Path = Path("runs/demo")
    resume: bool = False
    steps: int | None = None
    seconds: float = 120.0
    device: str | None = None
    threads: int | None = None
    seed: int | None = None


class Stop:
    """Set by the first Ctrl-C; the second one interrupts at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def on_interrupt() -> Iterator[Stop]:
    """Inside, Ctrl-C asks to stop instead of raising."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def run_demo(options: Options, console: Console, config: Config = Config()) -> Summary:  # noqa: B008 - frozen
    """Trains, or goes on training, and reports.

    Raises:
        Failure: something the user can put right.
        Interrupted: the user stopped it.
    """
    begin = time.perf_counter()
    device = machine.device(options.device)
    threads_before = torch.get_num_threads()
    try:
        with on_interrupt() as stop:
            if options.resume:
                trainer, text = _resumed(options, device, console)
            else:
                trainer, text = _started(options, device, console, config, begin, stop)
            rate = _train(trainer, text, options.out, console, stop)
        return _finish(trainer, options.out, console, rate, begin)
    finally:
        torch.set_num_threads(threads_before)


def _started(
    options: Options, device: torch.device, console: Console, config: Config, begin: float, stop: Stop
) -> tuple[Trainer, Path | None]:
    _set_threads(options.threads or machine.usable_cores())
    corpus = load_corpus(options.text, config.context)
    _say_corpus(console, corpus)
    trainer = Trainer(config, corpus, options.seed or 0, device)
    total, active = count_parameters(trainer.model, config)
    # Rather now than after the training.
    check_room(options.out / checkpoint.NAME, STATE_BYTES * total)
    experts = f"{config.experts} experts, top-{config.top_k}"
    _say(console, f"model: {total:,} parameters, {active:,} active, {experts}; {_place(device)}")
    if options.steps is not None:
        trainer.steps = options.steps
    else:
        step = calibrate(config, corpus, device, stop)
        if stop():
            raise Interrupted("interrupted before the first step; nothing was saved")
        spent = time.perf_counter() - begin
        trainer.steps = affordable_steps(config, corpus, options.seconds - spent, step)
        _say(console, f"{trainer.steps} steps, as one takes {1e3 * step:.0f} ms here")
    return trainer, options.text


def _resumed(options: Options, device: torch.device, console: Console) -> tuple[Trainer, Path | None]:
    saved = checkpoint.load(options.out / checkpoint.NAME)
    for name, asked, kept in (("steps", options.steps, saved.steps), ("seed", options.seed, saved.seed)):
        if asked not in (None, kept):
            raise Failure(f"--{name} {asked}: {saved.path} is of a run with --{name} {kept}, which is fixed")
    text = options.text or (Path(saved.text) if saved.text else None)
    _set_threads(options.threads or saved.threads)
    corpus = load_corpus(text, saved.config.context)
    if corpus.fingerprint != saved.fingerprint:
        raise Failure(f"{saved.path} was trained on other text than {corpus.name} holds now")
    trainer = Trainer(saved.config, corpus, saved.seed, device)
    saved.restore(trainer)
    _say(console, f"going on after step {saved.step} of {saved.steps}; {_place(device)}")
    if torch.get_num_threads() != saved.threads or device.type != saved.device:
        before = f"{saved.device} with {saved.threads} threads"
        _say(console, f"note: saved on {before}; the last bits will differ from those of an unbroken run")
    return trainer, text


def _train(trainer: Trainer, text: Path | None, out: Path, console: Console, stop: Stop) -> float | None:
    """Trains to the end and saves; returns tokens per second, or None if there was nothing left to do."""
    path, threads, start = out / checkpoint.NAME, torch.get_num_threads(), trainer.step
    tokens = trainer.config.tokens_per_step
    with TrainingProgress(console, start, trainer.steps, tokens) as progress:
        finished = trainer.run(progress.advance, stop)
        rate = progress.tokens_per_second
    if trainer.step > start:
        checkpoint.save(path, trainer, text, threads)
    if not finished:
        raise Interrupted(f"stopped after step {trainer.step} of {trainer.steps}; go on with: {_again(out)}")
    return rate if trainer.step > start else None


def _finish(trainer: Trainer, out: Path, console: Console, rate: float | None, begin: float) -> Summary:
    try:
        with console.status("validating, writing a sample, timing the experts"):
            found, load = trainer.evaluate()
            timings = measure(trainer)
            text = sample(trainer, SAMPLE_BYTES)
        total, active = count_parameters(trainer.model, trainer.config)
        summary = Summary(
            val_bits_per_byte=found,
            zlib_bits_per_byte=trainer.corpus.zlib_bits_per_byte,
            tokens_per_second=rate or trainer.config.tokens_per_step / timings.step,
            loop_ratio=timings.loop_ratio,
            experts_share=timings.experts_share,
            step_seconds=timings.step,
            loop_step_seconds=timings.loop_step,
            parameters_total=total,
            parameters_active=active,
            steps=trainer.steps,
            seconds=time.perf_counter() - begin,
            text=trainer.corpus.name,
            seed=trainer.seed,
            threads=torch.get_num_threads(),
            device=trainer.device.type,
            device_name=machine.device_name(trainer.device),
            torch=torch.__version__,
            commit=machine.commit(),
            date=machine.today(),
        )
        write_report(out, summary, trainer.history, load, text, trainer.config)
    except KeyboardInterrupt:
        raise Interrupted(f"the training is saved, the report is not; for it: {_again(out)}") from None
    show_report(console, summary, text)
    _say(console, f"{out}: {checkpoint.NAME}, summary.json, sample.txt, loss.png, experts.png")
    return summary


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def _again(out: Path) -> str:
    program = Path(sys.argv[0])
    known = shutil.which(program.name)
    if program.name != "anabranch":
        command = "anabranch"
    elif known is not None and os.path.samefile(known, program):
        command = program.name
    else:
        command = os.path.relpath(program)
    return f"{shlex.quote(command)} demo --resume --out {shlex.quote(str(out))}"


def _place(device: torch.device) -> str:
    name = machine.device_name(device)
    return f"{name}, {torch.get_num_threads()} threads" if device.type == "cpu" else name


def _say_corpus(console: Console, corpus: Corpus) -> None:
    left_out = f", {corpus.skipped} left out as unreadable or not text" if corpus.skipped else ""
    size, held_out = len(corpus.train) / 1e6, len(corpus.validation) / 1e6
    files = f"{corpus.files} file{'s' if corpus.files > 1 else ''}{left_out}"
    _say(console, f"text: {corpus.name}, {files}; {size:.1f} MB to train on, {held_out:.2f} MB held out")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
