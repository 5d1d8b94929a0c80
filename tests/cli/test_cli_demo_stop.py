"""The demo when it is asked to stop, by whatever signal, and when nobody asks."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading

import pytest

from anabranch.cli.demo import checkpoint, command, progress, train
from anabranch.cli.demo.config import SMALLEST
from anabranch.cli.demo.stop import Stop, on_signals

NUMBERS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
NAME = "checkpoint.safetensors"


@pytest.fixture(autouse=True)
def hears_of_hangups():
    """Whoever runs the tests may have a SIGHUP ignored, and processes inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def demo(run, text, tmp_path, monkeypatch):
    """`anabranch demo` with the smallest model, into a folder of its own."""
    original = command.run_demo
    monkeypatch.setattr(command, "run_demo", lambda options, console: original(options, console, SMALLEST))
    common = "demo", "--text", text, "--device", "cpu", "--threads", 1
    return lambda *arguments, out="out": run(*common, "--out", tmp_path / out, *arguments)


def names(folder):
    return {path.name for path in folder.iterdir()}


def at_step(patch, step, act):
    """Does something within that step."""
    original = command.Trainer.train_step

    def train_step(self):
        if self.step == step - 1:
            act()
        return original(self)

    patch.setattr(command.Trainer, "train_step", train_step)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def fail_with(error):
    def fail(*arguments):
        raise error

    return fail


@pytest.mark.parametrize("number", NUMBERS)
def test_process_stops(start, text, tmp_path, number):
    """The real model in a process of its own, as a user has it."""
    out = tmp_path / "out"
    process = start("demo", "--text", text, "--out", out, "--steps", 500, "--threads", 1, "--device", "cpu")
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        # From this line on signals are waited for; training begins right after it.
        assert any(line.startswith("model: ") for line in iter(process.stdout.readline, ""))
        process.send_signal(number)
        _, errors = process.communicate()
    finally:
        watchdog.cancel()
    assert process.returncode == NUMBERS[number]
    assert re.fullmatch(rf"anabranch: stopped after step \d+ of 500; go on with: .* --out {out}\n", errors)
    assert names(out) == {NAME}


@pytest.mark.parametrize("number", NUMBERS)
def test_resumed_run_is_the_unbroken_one(demo, tmp_path, monkeypatch, number):
    assert demo("--steps", 6, out="whole").exit_code == 0
    monkeypatch.setattr(command, "SAVE_EVERY", 0.0)  # saving after each step changes nothing either
    with monkeypatch.context() as patch:
        at_step(patch, 3, send(number))
        result = demo("--steps", 6)
    assert result.exit_code == NUMBERS[number]
    assert f"stopped after step 3 of 6; go on with: anabranch demo --resume --out {tmp_path}" in result.stderr
    assert demo("--resume").exit_code == 0
    assert (tmp_path / "whole" / NAME).read_bytes() == (tmp_path / "out" / NAME).read_bytes()


def test_run_that_just_ends_can_be_resumed(demo, tmp_path, monkeypatch):
    assert demo("--steps", 6, out="whole").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(command, "SAVE_EVERY", 0.0)
        at_step(patch, 4, fail_with(RuntimeError("as a kill does")))
        with pytest.raises(RuntimeError, match="as a kill does"):
            demo("--steps", 6)
    assert names(tmp_path / "out") == {NAME}
    assert checkpoint.load(tmp_path / "out" / NAME).step == 3
    assert "going on after step 3 of 6" in demo("--resume").stdout
    assert (tmp_path / "whole" / NAME).read_bytes() == (tmp_path / "out" / NAME).read_bytes()


def test_saved_in_between_touches_no_other_files(demo, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sample.txt").write_text("mine")
    monkeypatch.setattr(command, "SAVE_EVERY", 0.0)
    at_step(monkeypatch, 3, send(signal.SIGTERM))
    assert demo("--steps", 4).exit_code == 143
    assert (tmp_path / "out/sample.txt").read_text() == "mine"


def test_saving_is_no_part_of_a_step(demo, monkeypatch):
    """By a clock that ticks once a step, and a hundred times while it saves."""
    now, saved, seconds = [0.0], [], []

    def tick(count):
        now[0] += count

    class Clock:
        perf_counter = staticmethod(lambda: now[0])

    def save(path, trainer, text, threads):
        tick(100)
        saved.append(trainer.step)
        seconds[:] = trainer.seconds

    original = command.Trainer.train_step

    def train_step(self):
        tick(1)
        return original(self)

    monkeypatch.setattr(command.Trainer, "train_step", train_step)
    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(command, "_finish", lambda *rest: None)
    for module in (command, progress, train):
        monkeypatch.setattr(module, "time", Clock)
    result = demo("--steps", 45)
    assert saved == [20, 40, 45]
    assert seconds == [1.0] * 45
    assert f"  {SMALLEST.tokens_per_step} tokens/s  0:00 left" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("number", NUMBERS)
def test_stopped_while_it_reports(demo, tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        patch.setattr(command, "measure", lambda trainer: os.kill(os.getpid(), number))
        result = demo("--steps", 2)
    assert (result.exit_code, "the training is saved, the report is not" in result.stderr) == (
        NUMBERS[number],
        True,
    )
    assert names(tmp_path / "out") == {NAME}
    assert "only the report is left to make" in demo("--resume").stdout


def test_stopped_in_the_last_step(demo, tmp_path, monkeypatch):
    at_step(monkeypatch, 2, send(signal.SIGTERM))
    result = demo("--steps", 2)
    assert (result.exit_code, "the training is saved, the report is not" in result.stderr) == (143, True)
    assert names(tmp_path / "out") == {NAME}


@pytest.mark.parametrize("number", [signal.SIGHUP, None])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "gone"), SystemExit(1)], ids=["terminal", "pipe"])
def test_output_that_is_closed(demo, tmp_path, monkeypatch, number, error):
    """A terminal that is closed sends SIGHUP, and cannot be written to from then on; a pipe cannot either."""
    if number:
        at_step(monkeypatch, 1, send(number))
    monkeypatch.setattr(progress.TrainingProgress, "advance", fail_with(error))
    result = demo("--steps", 3)
    assert result.exit_code == (129 if number else 1)
    assert "stopped after step 1 of 3; go on with: " in result.stderr
    assert checkpoint.load(tmp_path / "out" / NAME).step == 1


def test_only_a_second_ctrl_c_is_impatient():
    """A closed terminal sends SIGHUP once or twice, and SIGTERM may follow, while the run is being saved."""
    stop = Stop()
    assert not stop()
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        stop.handle(number, None)
        assert stop.number == signal.SIGHUP
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGINT, None)
    assert stop.interrupted("").code == 129


def test_handlers_are_put_back_and_nohup_is_heard():
    before = [signal.getsignal(number) for number in NUMBERS]
    with on_signals() as stop:
        assert [signal.getsignal(number) for number in NUMBERS] == [stop.handle] * 3
    assert [signal.getsignal(number) for number in NUMBERS] == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with on_signals():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
