"""The demo's text: what is read, what is held out, and what is refused."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
import torch

from anabranch.cli.demo import data
from anabranch.cli.demo.data import batch, load_corpus, validation_windows
from anabranch.cli.failure import Failure


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def as_bytes(tensor):
    return bytes(tensor.tolist())


def test_standard_library():
    corpus = load_corpus(None, 256)
    assert corpus.name == "the Python standard library"
    assert corpus.files > 300
    assert len(corpus.train) > 5_000_000
    assert len(corpus.validation) == data.VALIDATION_CAP
    assert corpus.fingerprint == load_corpus(None, 256).fingerprint


def test_whole_files_are_held_out(tmp_path):
    write(tmp_path, **{f"{index:02}.txt": bytes([65 + index]) * 300 for index in range(40)})
    corpus = load_corpus(tmp_path, 32)
    assert corpus.files == 40
    train, held_out = set(as_bytes(corpus.train)), set(as_bytes(corpus.validation))
    assert len(held_out - {10}) == 2
    assert train & held_out <= {10}


def test_end_of_a_single_file_is_held_out(tmp_path):
    text = bytes(range(1, 251)) * 40
    write(tmp_path, a=text)
    corpus = load_corpus(tmp_path / "a", 32)
    assert as_bytes(corpus.train) + as_bytes(corpus.validation) == text
    assert len(corpus.validation) == len(text) // 20


def test_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    write(tmp_path, **{f"{name}__{name}.txt": name.encode() * 400 for name in "abcdefgh"})
    forwards = load_corpus(tmp_path, 32)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reversed(list(scandir(path))))
    assert load_corpus(tmp_path, 32).fingerprint == forwards.fingerprint


def test_what_is_not_text_is_left_out(tmp_path, monkeypatch):
    write(
        tmp_path, a=b"a" * 3000, b=b"\0" + b"b" * 3000, c=b"", d=b"d" * 3000, __hidden=b"", e__f=b"f" * 3000
    )
    write(tmp_path, **{".git__x": b"x" * 3000, "__pycache__".replace("__", "_") + "__y": b"y" * 30})
    (tmp_path / "d").chmod(0)
    plain = type(tmp_path).open

    def refuse(path, mode):  # whoever runs the tests may be allowed to read anything
        if path.name == "d":
            raise PermissionError(13, "Permission denied")
        return plain(path, mode)

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    corpus = load_corpus(tmp_path, 32)
    seen = set(as_bytes(corpus.train) + as_bytes(corpus.validation))
    assert seen == set(b"afy\n")
    assert corpus.left_out == data.LeftOut(not_text=1, files=1)
    assert str(corpus.left_out) == "1 file is not text, 1 file could not be read"
    with pytest.raises(Failure, match=r"cannot read .*d: Permission denied"):
        load_corpus(tmp_path / "d", 32)


def closed(monkeypatch, *names):
    """Files and folders of these names cannot be read, whoever runs the tests."""
    reading, scandir, listdir, access = Path.open, os.scandir, os.listdir, os.access

    def refuse(path):
        if Path(path).name in names:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **more: refuse(path) or reading(path, *rest, **more)
    )
    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) or scandir(path))
    monkeypatch.setattr(os, "listdir", lambda path: refuse(path) or listdir(path))
    monkeypatch.setattr(
        os, "access", lambda path, *mode: Path(path).name not in names and access(path, *mode)
    )


def test_what_cannot_be_read_is_counted(run, tmp_path, monkeypatch):
    write(tmp_path, **dict.fromkeys(("a", "b", "c__d", "c__e", "f__g"), b"words " * 4000))
    closed(monkeypatch, "b", "e", "f")
    left_out = load_corpus(tmp_path, 32).left_out
    assert left_out == data.LeftOut(files=2, folders=1)
    assert str(left_out) == "2 files could not be read, 1 folder could not be read"
    closed(monkeypatch, "a", "d")
    with pytest.raises(Failure, match=r"holds no readable text file: 4 files could not be read, 1 folder"):
        load_corpus(tmp_path, 32)


@pytest.mark.parametrize("name", ["file", "folder"])
def test_text_that_cannot_be_read_fails_in_one_line(run, tmp_path, monkeypatch, name):
    write(tmp_path, file=b"words " * 4000, folder__file=b"words " * 4000)
    closed(monkeypatch, name)
    result = run("demo", "--text", tmp_path / name, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == f"anabranch: cannot read {tmp_path / name}: Permission denied\n"


def test_caps(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TRAIN_CAP", 5000)
    monkeypatch.setattr(data, "VALIDATION_CAP", 400)
    write(tmp_path, a=b"a" * 100_000, b=b"b" * 100_000)
    corpus = load_corpus(tmp_path, 32)
    assert len(corpus.train) <= 5000
    assert len(corpus.validation) == 5400 // 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"holds 0 bytes of text; the demo needs at least 20,500"),
        (b" \n", r"holds 0 bytes of text"),
        (b"x" * 20_499, r"holds 20,499 bytes of text; the demo needs at least 20,500"),
        (b"x" * 30_000 + b"\0", r"is not a text file"),
    ],
)
def test_refused(run, tmp_path, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(Failure, match=message):
        load_corpus(tmp_path / "text", 256)
    result = run("demo", "--text", tmp_path / "text", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_nothing_there(tmp_path):
    with pytest.raises(Failure, match="there is no file or folder"):
        load_corpus(tmp_path / "missing", 32)
    with pytest.raises(Failure, match="holds no readable text file"):
        load_corpus(tmp_path, 32)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Failure, match="is not a text file"):
        load_corpus(tmp_path / "pipe", 32)


def test_links_in_a_circle_are_left_out(tmp_path):
    write(tmp_path, a=b"words " * 4000)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "again").symlink_to(".")
    assert load_corpus(tmp_path, 32).files == 1


def test_only_the_start_of_a_large_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TRAIN_CAP", 20_000)
    monkeypatch.setattr(data, "VALIDATION_CAP", 1_000)
    write(tmp_path, large=b"words " * 4000)
    os.truncate(tmp_path / "large", 1 << 42)  # more than fits into memory, and than lies on the disk
    for place in (tmp_path, tmp_path / "large"):
        corpus = load_corpus(place, 32)
        assert as_bytes(corpus.train) + as_bytes(corpus.validation) == (b"words " * 4000)[:21_000]


def test_batches_follow_from_seed_and_step():
    text = torch.arange(251, dtype=torch.uint8).repeat(4)
    inputs, targets = batch(text, 3, 0, 4, 16)
    assert inputs.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(batch(text, 3, 0, 4, 16)[0], inputs)
    assert not torch.equal(batch(text, 4, 0, 4, 16)[0], inputs)
    assert not torch.equal(batch(text, 3, 1, 4, 16)[0], inputs)
    # The shortest text there can be has one window.
    assert torch.equal(batch(text[:17], 0, 0, 1, 16)[1][0], text[1:17].long())


def test_windows_cover_the_validation_bytes():
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = validation_windows(text, 16)
    assert inputs.flatten().tolist() == list(range(96))
    assert targets.flatten().tolist() == list(range(1, 97))


def test_zlib(tmp_path):
    write(tmp_path, a=bytes(range(1, 251)) * 40)
    corpus = load_corpus(tmp_path / "a", 32)
    held_out = as_bytes(corpus.validation)
    assert corpus.zlib_bits_per_byte == 8 * len(zlib.compress(held_out, 9)) / len(held_out)
