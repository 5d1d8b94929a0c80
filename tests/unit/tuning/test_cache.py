"""The file on disk: whole or absent, whoever writes; ignored if corrupt; read again when it has changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.tuning.cache import Cache, file_of, folder

HERE = Path(__file__).parent
SRC = HERE.parents[2] / "src"


@pytest.fixture
def path(gpu, place):
    return folder() / place.file


def entry(size):
    return {"config": {"size": size}}


def test_where_it_is(monkeypatch, place):
    monkeypatch.delenv("ANABRANCH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "x")
    assert folder() == Path("x/anabranch")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder() == Path.home() / ".cache/anabranch"
    assert place.file == Path("tuning/nvidia_imaginary_1-sm_90/3.6.0-580.1.json")


def test_it_is_asked_for_again_where_variables_say_otherwise(monkeypatch, place):
    monkeypatch.delenv("ANABRANCH_CACHE_DIR", raising=False)
    for name, value in (
        ("HOME", "/a"),
        ("XDG_CACHE_HOME", "/b"),
        ("ANABRANCH_CACHE_DIR", "/c"),
        ("HOME", "/d"),
    ):
        monkeypatch.setenv(name, value)
        assert file_of(place) == folder() / place.file
    monkeypatch.delenv("ANABRANCH_CACHE_DIR")
    assert file_of(place) == Path("/b/anabranch") / place.file


def test_results_are_merged(path, place):
    first, second = Cache(poll=0), Cache(poll=0)
    first.add(place, {"a": entry(1), "b": entry(1)})
    second.add(place, {"b": entry(2), "c": entry(2)})
    assert first.results(place) == {"a": entry(1), "b": entry(2), "c": entry(2)}
    assert {p.name for p in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}


def test_a_file_is_read_once_until_it_changes(path, place, monkeypatch):
    cache, reads, read = Cache(poll=0), [], Path.read_text
    cache.add(place, {"a": entry(1)})
    monkeypatch.setattr(
        Path, "read_text", lambda self, **options: reads.append(self) or read(self, **options)
    )
    assert cache.results(place) == cache.results(place) == {"a": entry(1)}
    assert len(reads) == 1
    Cache().add(place, {"a": entry(2)})
    assert cache.results(place) == {"a": entry(2)}
    path.unlink()
    assert cache.results(place) == {}


CORRUPT = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "binary": lambda text: "\0\1\2",
    "another document": lambda text: "[1, 2]",
    "nested": lambda text: "[" * 200_000,
    "no configurations": lambda text: json.dumps({"format": 1, "results": {"a": 3}}),
}


@pytest.mark.parametrize("damage", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_ignored_and_written_anew(path, place, damage):
    cache = Cache(poll=0)
    cache.add(place, {"a": entry(1)})
    path.write_text(damage(path.read_text()))
    with pytest.warns(RuntimeWarning, match="ignores the tuning results in") as warned:
        assert [cache.results(place) for _ in range(3)] == [{}] * 3
    assert len(warned) == 1
    cache.add(place, {"b": entry(2)})
    assert cache.results(place) == {"b": entry(2)}


def test_a_file_of_another_format_is_ignored_in_silence(path, place):
    cache = Cache(poll=0)
    cache.add(place, {"a": entry(1)})
    path.write_text(json.dumps({"format": 0, "results": {"a": entry(1)}}))
    assert cache.results(place) == {}


def test_a_failed_write_leaves_the_file_as_it_was(path, place, monkeypatch):
    cache = Cache(poll=0)
    cache.add(place, {"a": entry(1)})
    before = path.read_bytes()

    def full(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        cache.add(place, {"b": entry(2)})
    assert path.read_bytes() == before
    assert {p.suffix for p in path.parent.iterdir()} == {".json", ".lock"}


SCRIPT = """
import os, sys
sys.path[:0] = sys.argv[1:3]
import conftest
from anabranch.tuning import choose, key, search
from anabranch.tuning.cache import Cache
"""


def start(code, *arguments):
    command = [sys.executable, "-c", SCRIPT + code, str(SRC), str(HERE), *map(str, arguments)]
    environment = {**os.environ, "ANABRANCH_AUTOTUNE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(*processes):
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_processes_that_write_at_once_lose_nothing(path, place):
    code = """
me = sys.argv[3]
for i in range(60):
    Cache().add(conftest.PLACE, {f"{me}{i}": {"config": {"size": i}}})
"""
    finish(start(code, "a"), start(code, "b"))
    assert len(Cache().results(place)) == 120


def test_a_second_process_searches_nothing(path):
    code = """
key.place, search.medians = lambda device: conftest.PLACE, conftest.timer
product = conftest.Product.make()
print(choose(product, conftest.Tiles(1)).size, product.searched)
"""
    assert finish(start(code)) == ["4 1\n"]
    assert finish(start(code)) == ["4 0\n"]
    path.write_text(path.read_text()[:50])
    assert finish(start(code)) == ["4 1\n"]
    assert finish(start(code)) == ["4 0\n"]
