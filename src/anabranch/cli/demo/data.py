"""The demo's text: bytes to train on, other bytes to be measured on."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from anabranch.cli.failure import Failure

TRAIN_CAP = 16 << 20
VALIDATION_CAP = 128 << 10
HELD_OUT = 20  # one file in this many, or this share of a single text
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "node_modules"}


@dataclass
class LeftOut:
    """How much of a folder was not taken, and why."""

    not_text: int = 0
    files: int = 0
    """That could not be read."""
    folders: int = 0
    """That could not be listed."""

    def __str__(self) -> str:
        reasons = (
            (self.not_text, "file is not text", "files are not text"),
            (self.files, "file could not be read", "files could not be read"),
            (self.folders, "folder could not be read", "folders could not be read"),
        )
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in reasons if count)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes, and where it came from."""

    name: str
    train: Tensor
    validation: Tensor
    files: int
    left_out: LeftOut

    @property
    def fingerprint(self) -> str:
        """Two corpora with the same one are the same."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            digest.update(len(part).to_bytes(8, "little") + part.numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def zlib_bits_per_byte(self) -> float:
        """What zlib at its best makes of the validation bytes."""
        data = self.validation.numpy().tobytes()
        return 8 * len(zlib.compress(data, 9)) / len(data)


def load_corpus(text: Path | None, context: int) -> Corpus:
    """Reads a file, a folder, or the Python standard library, and holds some of it out.

    Whole files are held out where there are enough of them, or else the end of the text.

    Raises:
        Failure: there is no text there, or too little for windows of ``context`` bytes.
    """
    root = text or Path(sysconfig.get_paths()["stdlib"])
    name = str(text) if text else "the Python standard library"
    parts, left_out = _read(root, "*.py" if text is None else "*")
    # Four windows to measure on, and a first byte that is only ever context.
    least_held_out = 4 * context + 1
    total = sum(map(len, parts))
    if total < HELD_OUT * least_held_out:
        raise Failure(
            f"{name} holds {total:,} bytes of text; the demo needs at least {HELD_OUT * least_held_out:,}"
        )
    train, held_out = _split(parts, least_held_out)
    return Corpus(name, _tensor(train), _tensor(held_out), len(parts), left_out)


def _read(root: Path, pattern: str) -> tuple[list[bytes], LeftOut]:
    """The non-empty texts at ``root``, and what was left out."""
    if not os.path.lexists(root):
        raise Failure(f"there is no file or folder {root}")
    try:
        if root.is_dir():
            os.listdir(root)  # a folder inside may be closed to us, this one may not
            return _read_folder(root, pattern)
        data = _read_start(root, TRAIN_CAP + VALIDATION_CAP) if root.is_file() else None
    except OSError as error:
        raise Failure(f"cannot read {root}: {error.strerror or error}") from error
    if data is None or not _is_text(data):
        raise Failure(f"{root} is not a text file")
    return [data] if data.strip() else [], LeftOut()


def _read_folder(root: Path, pattern: str) -> tuple[list[bytes], LeftOut]:
    parts: list[bytes] = []
    left_out, left = LeftOut(), TRAIN_CAP + VALIDATION_CAP
    for path in _files(root, pattern, left_out):
        try:
            # Unlike an entry's is_file() no error in a loop of links.
            data = _read_start(path, left) if path.is_file() else b""
        except OSError:
            left_out.files += 1
            continue
        if not _is_text(data):
            left_out.not_text += 1
        elif data.strip():
            parts.append(data)
            left -= len(data)
        if left <= 0:
            break
    if not parts:
        why = str(left_out)
        raise Failure(f"{root} holds no readable text file" + (f": {why}" if why else ""))
    return parts, left_out


def _read_start(path: Path, most: int) -> bytes:
    """What a file holds, up to a number of bytes; it may be larger than memory."""
    with path.open("rb") as file:
        return file.read(most)


def _files(root: Path, pattern: str, left_out: LeftOut) -> Iterator[Path]:
    """What may be files below ``root``, in an order that does not depend on the file system."""
    try:
        entries = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in os.scandir(root))
    except OSError:
        left_out.folders += 1
        return
    for name, is_folder in entries:
        path = root / name
        if is_folder:
            if name not in SKIPPED_FOLDERS and not name.startswith("."):
                yield from _files(path, pattern, left_out)
        elif path.match(pattern):
            yield path


def _is_text(data: bytes) -> bool:
    return b"\0" not in data


def _split(parts: list[bytes], least_held_out: int) -> tuple[bytes, bytes]:
    """(to train on, held out)."""
    # By digest, so that which files are held out follows neither their order nor their folder.
    by_digest = sorted(range(len(parts)), key=lambda index: hashlib.sha256(parts[index]).digest())
    chosen = by_digest[: len(parts) // HELD_OUT]
    held_out = b"\n".join(parts[index] for index in chosen)
    train = b"\n".join(parts[index] for index in sorted(set(range(len(parts))) - set(chosen)))
    if len(held_out) < least_held_out or len(train) < least_held_out:
        joined = b"\n".join(parts)[: TRAIN_CAP + VALIDATION_CAP]
        cut = len(joined) - max(least_held_out, min(len(joined) // HELD_OUT, VALIDATION_CAP))
        train, held_out = joined[:cut], joined[cut:]
    return train[:TRAIN_CAP], held_out[:VALIDATION_CAP]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(data: Tensor, step: int, seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Windows of a step and the bytes that follow each place of them: a function of seed and step alone."""
    # The CPU's generator looks at 32 bits of its seed alone.
    generator = torch.Generator().manual_seed((1_000_003 * seed + step) % 2**32)
    starts = torch.randint(len(data) - context, (size, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def validation_windows(data: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """All of ``data`` but its last bytes, in windows side by side."""
    count = (len(data) - 1) // context
    assert count > 0
    inputs = data[: count * context].view(count, context)
    targets = data[1 : count * context + 1].view(count, context)
    return inputs.long(), targets.long()


def bits(loss: float) -> float:
    """Nats as bits."""
    return loss / math.log(2)
