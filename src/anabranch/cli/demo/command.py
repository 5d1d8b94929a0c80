"""The demo from its options to its report."""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from anabranch.cli import machine
from anabranch.cli.demo import checkpoint
from anabranch.cli.demo.config import Config
from anabranch.cli.demo.data import Corpus, load_corpus
from anabranch.cli.demo.measure import measure
from anabranch.cli.demo.model import count_parameters
from anabranch.cli.demo.progress import TrainingProgress
from anabranch.cli.demo.report import FILES, SUMMARY, Summary, show_report, write_report
from anabranch.cli.demo.sample import sample
from anabranch.cli.demo.stop import Stop, on_signals
from anabranch.cli.demo.train import Trainer, affordable_steps, calibrate
from anabranch.cli.failure import Failure, writing
from anabranch.cli.files import check_room

SAMPLE_BYTES = 300
STATE_BYTES = 16  # of a checkpoint for each parameter at most: itself and its optimizer's state
SAVE_EVERY = 20.0  # seconds of training: what a process that is killed outright may lose


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


def run_demo(options: Options, console: Console, config: Config = Config()) -> Summary | None:  # noqa: B008 - frozen
    """Trains, or goes on training, and reports; None if all of that had been done before.

    Raises:
        Failure: something the user can put right.
        Interrupted: a signal stopped it.
    """
    begin = time.perf_counter()
    device = machine.device(options.device)
    threads_before = torch.get_num_threads()
    try:
        with on_signals() as stop:
            if options.resume:
                run = _resumed(options, device, console)
            else:
                run = _started(options, device, console, config, begin, stop)
            if run is None:
                return None
            trainer, text = run
            _train(trainer, text, options.out, console, stop)
            return _finish(trainer, options.out, console, stop, begin)
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
    _warn_of_earlier(console, options.out)
    experts = f"{config.experts} experts, top-{config.top_k}"
    _say(console, f"model: {total:,} parameters, {active:,} active, {experts}; {_place(device)}")
    if options.steps is not None:
        trainer.steps = options.steps
    else:
        step = calibrate(config, corpus, device, stop)
        if stop():
            raise stop.interrupted("interrupted before the first step; nothing was saved")
        spent = time.perf_counter() - begin
        trainer.steps = affordable_steps(config, corpus, options.seconds - spent, step)
        _say(console, f"{trainer.steps} steps, as one takes {1e3 * step:.0f} ms here")
    return trainer, options.text


def _resumed(options: Options, device: torch.device, console: Console) -> tuple[Trainer, Path | None] | None:
    """The run in the folder where it stopped, or None if nothing of it is left to do."""
    saved = checkpoint.load(options.out / checkpoint.NAME)
    for name, asked, kept in (("steps", options.steps, saved.steps), ("seed", options.seed, saved.seed)):
        if asked not in (None, kept):
            if name == "steps" and saved.step >= saved.steps:
                raise Failure(
                    f"--steps {asked}: {saved.path} is of a finished run of {kept} steps, and there is no way to train "
                    "on: its learning rate has come down with the last of them; a new run takes any --steps"
                )
            raise Failure(f"--{name} {asked}: {saved.path} is of a run with --{name} {kept}, which is fixed")
    trained = saved.step >= saved.steps
    # The report is of the checkpoint beside it: saving one removes another's.
    reported = trained and (options.out / SUMMARY).is_file()
    text = options.text or (Path(saved.text) if saved.text else None)
    _set_threads(options.threads or saved.threads)
    if reported:
        if options.text is not None:  # otherwise nobody needs the text, and it may be gone
            _same_corpus(saved, options.text)
        _say(console, f"finished: all {saved.steps} steps are done, nothing left to train")
        _say_where(console, options.out)
        return None
    corpus = _same_corpus(saved, text)
    trainer = Trainer(saved.config, corpus, saved.seed, device)
    saved.restore(trainer)
    if trained:
        _say(console, f"all {saved.steps} steps are done, only the report is left to make; {_place(device)}")
    else:
        _say(console, f"going on after step {saved.step} of {saved.steps}; {_place(device)}")
    if torch.get_num_threads() != saved.threads or device.type != saved.device:
        before = f"{saved.device} with {saved.threads} threads"
        _say(console, f"note: saved on {before}; the last bits will differ from those of an unbroken run")
    return trainer, text


def _same_corpus(saved: checkpoint.Checkpoint, text: Path | None) -> Corpus:
    corpus = load_corpus(text, saved.config.context)
    if corpus.fingerprint != saved.fingerprint:
        raise Failure(f"{saved.path} was trained on other text than {corpus.name} holds now")
    return corpus


def _train(trainer: Trainer, text: Path | None, out: Path, console: Console, stop: Stop) -> None:
    """Trains to the end, if that is not done, and saves on the way and at the end."""
    if trainer.step >= trainer.steps:
        return
    path, threads, tokens = out / checkpoint.NAME, torch.get_num_threads(), trainer.config.tokens_per_step
    # The report of an earlier run; where there was none, other files of those names are the user's.
    stale = FILES if path.is_file() else (SUMMARY,)
    saved = time.perf_counter()

    def save() -> None:
        nonlocal saved
        checkpoint.save(path, trainer, text, threads)
        for name in stale:
            with writing(out / name):
                (out / name).unlink(missing_ok=True)
        saved = time.perf_counter()

    def after_step() -> None:
        if time.perf_counter() - saved >= SAVE_EVERY and trainer.step < trainer.steps:
            save()
        progress.advance()

    def stopped() -> str:
        return f"stopped after step {trainer.step} of {trainer.steps}; go on with: {_again(out)}"

    shown = console, trainer.history.train, trainer.seconds, trainer.steps, tokens
    try:
        with TrainingProgress(*shown) as progress:
            finished = trainer.run(after_step, stop)
    except (OSError, SystemExit):  # nobody reads the output any more: a closed terminal or pipe
        save()
        raise (
            stop.interrupted(stopped()) if stop() else Failure(f"the output was closed; {stopped()}")
        ) from None
    save()
    if not finished:
        raise stop.interrupted(stopped())


def _finish(trainer: Trainer, out: Path, console: Console, stop: Stop, begin: float) -> Summary:
    try:
        stop.at_once = True
        if stop():
            raise KeyboardInterrupt
        with console.status("validating, writing a sample, timing the experts"):
            found, load = trainer.evaluate()
            timings = measure(trainer)
            text = sample(trainer, SAMPLE_BYTES)
        total, active = count_parameters(trainer.model, trainer.config)
        # Only the report may have been left to make.
        step = statistics.median(trainer.seconds or [timings.step])
        summary = Summary(
            val_bits_per_byte=found,
            zlib_bits_per_byte=trainer.corpus.zlib_bits_per_byte,
            tokens_per_second=trainer.config.tokens_per_step / step,
            loop_ratio=timings.loop_ratio,
            experts_share=timings.experts_share,
            step_seconds=step,
            loop_step_seconds=timings.loop_step,
            compared_step_seconds=timings.step,
            saved_bytes=timings.saved_bytes,
            loop_saved_bytes=timings.loop_saved_bytes,
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
    except (KeyboardInterrupt, OSError) as error:
        if isinstance(error, OSError) and not stop():
            raise
        # A terminal that was closed cannot be written to either.
        raise stop.interrupted(f"the training is saved, the report is not; for it: {_again(out)}") from None
    show_report(console, summary, text)
    _say_where(console, out)
    return summary


def _warn_of_earlier(console: Console, out: Path) -> None:
    path = out / checkpoint.NAME
    if path.is_file():
        saved = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
        # A report is of the checkpoint beside it: nothing of that run is left to go on with.
        finished = (out / SUMMARY).is_file()
        run, instead = ("finished run", "") if finished else ("run", "--resume would go on with it, ")
        what = f"this replaces the {run} of {saved:%Y-%m-%d %H:%M} UTC in {out}, checkpoint included"
        _say(console, f"note: {what}; {instead}another --out keeps it")


def _say_where(console: Console, out: Path) -> None:
    _say(console, f"{out}: {', '.join((checkpoint.NAME, *FILES))}")


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
    def size(count: int) -> str:
        return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"

    files = f"{corpus.files} file{'s' if corpus.files > 1 else ''}"
    sizes = f"{size(len(corpus.train))} to train on, {size(len(corpus.validation))} held out"
    _say(console, f"text: {corpus.name}, {files}; {sizes}")
    if why := str(corpus.left_out):
        _say(console, f"left out: {why}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
