"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from anabranch.cli.failure import writing


def write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path`` and renames it when it is on the disk.

    Raises:
        Failure: it could not be written; ``path`` is as it was, and the temporary file is gone.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        made = make_folder(path.parent)
        try:
            write(aside)
            with open(aside, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
            raise


def make_folder(folder: Path) -> list[Path]:
    """Makes a folder and its parents; returns those that were not there, innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def write_json(path: Path, value: object) -> None:
    """Writes ``value`` as JSON, aside first."""
    text = json.dumps(value, indent=2) + "\n"
    write_aside(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def check_room(path: Path, size: int) -> None:
    """Makes sure that ``size`` bytes can be written at ``path``, and leaves nothing behind.

    Raises:
        Failure: they cannot.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        made = make_folder(path.parent)
        try:
            with open(aside, "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
        finally:
            aside.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
