"""The demo from end to end, on the smallest model."""

from __future__ import annotations

import errno
import json
import os
import re
import signal

import pytest
import torch
from rich.console import Console

from anabranch.cli.demo import checkpoint, command, loop
from anabranch.cli.demo.config import SMALLEST
from anabranch.cli.failure import Failure
from anabranch.cli.peers import moe_loop

FILES = {"checkpoint.safetensors", "summary.json", "sample.txt", "loss.png", "experts.png"}


@pytest.fixture(autouse=True)
def smallest(monkeypatch):
    """The command trains the smallest model."""
    original = command.run_demo
    monkeypatch.setattr(command, "run_demo", lambda options, console: original(options, console, SMALLEST))


@pytest.fixture
def demo(run, text, tmp_path):
    """`anabranch demo` on the text, into a folder of its own."""

    def demo(*arguments, out="out"):
        return run(
            "demo", "--text", text, "--device", "cpu", "--threads", 1, "--out", tmp_path / out, *arguments
        )

    return demo


def names(folder):
    return {path.name for path in folder.iterdir()} if folder.exists() else None


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


def one_line(result, code=1):
    """The one line on stderr of a command that failed."""
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("anabranch: ")
    return lines[0]


def interrupt_after(monkeypatch, step):
    """Sends this process Ctrl-C while it makes that step."""
    original = command.Trainer.train_step

    def train_step(self):
        if self.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(command.Trainer, "train_step", train_step)


def test_report(demo, tmp_path):
    result = demo("--steps", 4)
    assert result.exit_code == 0, result.output
    assert names(tmp_path / "out") == FILES
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["device"] == "cpu"
    assert summary["threads"] == 1
    assert summary["torch"] == torch.__version__
    assert {"commit", "seconds", "tokens_per_second", "loop_ratio", "experts_share"} <= set(summary)
    assert 5 < summary["val_bits_per_byte"] < 8
    assert 0 < summary["zlib_bits_per_byte"] < 8
    assert summary["loop_ratio"] == summary["loop_step_seconds"] / summary["compared_step_seconds"] > 0
    tokens = summary["tokens_per_second"] * summary["step_seconds"]
    assert tokens == pytest.approx(SMALLEST.tokens_per_step)
    assert 0 < summary["saved_bytes"] < summary["loop_saved_bytes"]
    assert 0 < summary["parameters_active"] < summary["parameters_total"]
    for name in ("loss.png", "experts.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    for shown in ("validation", "zlib on the same bytes", "plain loop over experts", "4/4", "tokens/s"):
        assert shown in result.stdout


def test_steps_fit_the_time(demo, tmp_path):
    result = demo("--seconds", 1)
    assert result.exit_code == 0, result.output
    assert int(re.search(r"(\d+) steps, as one takes", result.stdout).group(1)) >= 20


def test_all_the_time_there_is(demo, monkeypatch):
    monkeypatch.setattr(command.Trainer, "run", lambda *rest: False)
    result = demo("--seconds", "inf")
    assert f"{SMALLEST.max_steps} steps, as one takes" in result.stdout


def test_more_threads_than_any_processor_has(demo):
    assert demo("--threads", 10**12).exit_code == 2


def test_resume_is_bit_for_bit(demo, tmp_path, monkeypatch):
    assert demo("--steps", 6, out="whole").exit_code == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        line = one_line(demo("--steps", 6), code=130)
    assert "stopped after step 3 of 6" in line
    assert f"demo --resume --out {tmp_path / 'out'}" in line
    assert names(tmp_path / "out") == {"checkpoint.safetensors"}
    result = demo("--resume")
    assert result.exit_code == 0, result.output
    assert "going on after step 3 of 6" in result.stdout
    assert "note:" not in result.stdout
    whole, parts = (tmp_path / name / "checkpoint.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == parts.read_bytes()
    assert checkpoint.load(whole).step == 6


def test_resume_of_a_finished_run_changes_nothing(demo, run, text, tmp_path):
    assert demo("--steps", 2).exit_code == 0
    before = contents(tmp_path / "out")
    result = demo("--resume")
    assert result.exit_code == 0
    said = ["finished: all 2 steps are done, nothing left to train"]
    said.append(
        f"{tmp_path / 'out'}: checkpoint.safetensors, summary.json, sample.txt, loss.png, experts.png"
    )
    assert result.stdout.splitlines() == said
    line = one_line(demo("--resume", "--steps", 3))
    assert line.startswith("anabranch: --steps 3: ")
    assert "is of a finished run of 2 steps, and there is no way to train on" in line
    text.unlink()  # nothing is left to read it for
    result = run("demo", "--resume", "--out", tmp_path / "out", "--device", "cpu")
    assert (result.exit_code, result.stdout.splitlines()) == (0, said)
    assert contents(tmp_path / "out") == before


def test_a_new_run_says_that_it_replaces_one(demo, tmp_path, monkeypatch):
    assert "note:" not in demo("--steps", 2).stdout
    os.utime(tmp_path / "out/checkpoint.safetensors", (0, 0))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        result = demo("--steps", 2, "--seed", 1)
    assert one_line(result, code=130)
    where = f"1970-01-01 00:00 UTC in {tmp_path / 'out'}, checkpoint included; "
    note = f"note: this replaces the finished run of {where}another --out keeps it"
    assert result.stdout.index(note) < result.stdout.index("step 1/2")
    # What an earlier run reported is gone with it, or this one's resumption would take it for its own.
    assert names(tmp_path / "out") == {"checkpoint.safetensors"}
    with monkeypatch.context() as patch:
        os.utime(tmp_path / "out/checkpoint.safetensors", (0, 0))
        interrupt_after(patch, 1)
        result = demo("--steps", 2)
    note = f"note: this replaces the run of {where}--resume would go on with it, another --out keeps it"
    assert note in result.stdout
    result = demo("--resume")
    assert (result.exit_code, "note:" in result.stdout) == (0, False)
    assert names(tmp_path / "out") == FILES


def test_seeds_differ(demo, tmp_path):
    for seed in (0, 1):
        assert demo("--steps", 1, "--seed", seed, out=str(seed)).exit_code == 0
    zero, one = (checkpoint.load(tmp_path / f"{seed}/checkpoint.safetensors").tensors for seed in (0, 1))
    assert not torch.equal(zero["model.head.weight"], one["model.head.weight"])


def test_resume_with_other_threads_says_so(demo, run, tmp_path, monkeypatch):
    assert demo("--steps", 1).exit_code == 0
    (tmp_path / "out/summary.json").unlink()  # or nothing would be left to do
    # Several threads on cores that are in use are slow, and what is said comes before they start.
    monkeypatch.setattr(command, "_finish", lambda *rest: None)
    result = run("demo", "--resume", "--out", tmp_path / "out", "--device", "cpu", "--threads", 2)
    assert result.exit_code == 0, result.output
    assert "note: saved on cpu with 1 threads; the last bits will differ" in result.stdout


def test_resume_needs_the_same_run(demo, text, tmp_path):
    assert "there is no checkpoint" in one_line(demo("--resume"))
    assert demo("--steps", 2).exit_code == 0
    assert "--steps 3: " in one_line(demo("--resume", "--steps", 3))
    assert "--seed 1: " in one_line(demo("--resume", "--seed", 1))
    text.write_text(text.read_text()[::-1])
    assert "was trained on other text" in one_line(demo("--resume"))


def flip_last_byte(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda data: data[:4], "is damaged"),
        (lambda data: b"", "is damaged"),
        (lambda data: b"\xff" * len(data), "is damaged"),
        (flip_last_byte, "do not match its digest"),
        (lambda data: data.replace(b'\\"format\\": 1', b'\\"format\\": 7'), "another version"),
        (lambda data: data.replace(b"anabranch.demo", b"anabranch.dema"), "not a checkpoint of the demo"),
        (lambda data: data.replace(b'\\"step\\": 1', b'\\"step\\": 0'), "do not match its digest"),
        (lambda data: data.replace(b'\\"heads\\": 2', b'\\"heads\\": 0'), "do not match its digest"),
        (lambda data: re.sub(rb'"\{.*\}"', lambda m: b'"[]"'.ljust(len(m[0])), data), "is damaged"),
    ],
    ids=["half", "header", "empty", "noise", "one bit", "format", "key", "step", "heads", "list"],
)
def test_corrupt_checkpoint(demo, tmp_path, damage, message):
    assert demo("--steps", 1).exit_code == 0
    path = tmp_path / "out/checkpoint.safetensors"
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert message in one_line(demo("--resume"))
    assert path.read_bytes() == damaged


def full_disk(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["replace", "fsync", "posix_fallocate"])
def test_full_disk_leaves_nothing(demo, tmp_path, monkeypatch, function):
    monkeypatch.setattr(os, function, full_disk)
    assert "the disk is full" in one_line(demo("--steps", 2))
    assert names(tmp_path / "out") is None


def test_full_disk_keeps_what_was_there(demo, tmp_path, monkeypatch):
    assert demo("--steps", 1).exit_code == 0
    before = contents(tmp_path / "out")
    monkeypatch.setattr(os, "replace", full_disk)
    assert "the disk is full" in one_line(demo("--steps", 2))
    assert contents(tmp_path / "out") == before


def test_out_cannot_be_a_file(demo, text):
    assert "cannot write" in one_line(demo("--steps", 1, out=text.name))
    assert text.is_file()


def test_unknown_device(run):
    assert "there is no device named 'abacus'" in one_line(run("demo", "--device", "abacus"))
    if not torch.cuda.is_available():
        assert "cuda is not here" in one_line(run("demo", "--device", "cuda"))


def test_loss_that_is_not_finite(demo, tmp_path, monkeypatch):
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr(command.Trainer, "loss", lambda self, *batch: (self.model.head.weight.sum(), nan))
    assert "the loss of step 1 is not finite" in one_line(demo("--steps", 2))
    assert names(tmp_path / "out") is None


def test_interrupt_before_training(demo, tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 1)
    assert "nothing was saved" in one_line(demo(), code=130)
    assert names(tmp_path / "out") is None


def test_an_interrupted_run_touches_no_other_files(demo, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sample.txt").write_text("mine")
    interrupt_after(monkeypatch, 1)
    assert "stopped after step 1 of 2" in one_line(demo("--steps", 2), code=130)
    assert (tmp_path / "out/sample.txt").read_text() == "mine"


def test_interrupted_report_can_be_resumed(demo, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "measure", interrupted)
        assert "the training is saved" in one_line(demo("--steps", 2), code=130)
    assert names(tmp_path / "out") == {"checkpoint.safetensors"}
    before = (tmp_path / "out/checkpoint.safetensors").read_bytes()
    result = demo("--resume")
    assert result.exit_code == 0
    assert "all 2 steps are done, only the report is left to make" in result.stdout
    assert names(tmp_path / "out") == FILES
    assert (tmp_path / "out/checkpoint.safetensors").read_bytes() == before


def test_threads_are_put_back(demo):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert demo("--steps", 1).exit_code == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_result_must_be_the_loops(text, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "moe_loop", lambda *arguments: 2 * moe_loop(*arguments))
    options = command.Options(text=text, out=tmp_path / "out", steps=1, device="cpu", threads=1)
    with pytest.raises(Failure, match="the experts as a loop give another result"):
        command.run_demo(options, Console(quiet=True))
    assert "summary.json" not in names(tmp_path / "out")
