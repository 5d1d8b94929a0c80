"""The project speaks of itself alone: no paths of one machine, no numbers of a tracker that moves."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "README.md", "pyproject.toml")
FOLDERS = (".ci", "benchmarks", "docs", "examples", "requirements", "src", "tests", "tools")

FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.}])/(?:work|root|home|tmp|mnt|opt|farm)/"),
    "a number of a tracker": re.compile(r"\b(?:issue|pull request|PR|GH)s?[ -]?#?\d+\b", re.IGNORECASE),
    "a working session": re.compile(r"\b(?:this|last|next) session\b|\bsub-?agents?\b", re.IGNORECASE),
}


def files() -> Iterator[Path]:
    yield from (ROOT / name for name in FILES)
    for folder in FOLDERS:
        yield from (
            path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )


def found(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from (
            f"line {number}: {what}: {line.strip()}" for what, rule in FORBIDDEN.items() if rule.search(line)
        )


def test_text_is_about_the_project():
    problems = []
    for path in files():
        data = path.read_bytes()
        if b"\0" not in data:
            problems += [f"{path.relative_to(ROOT)}: {problem}" for problem in found(data.decode())]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    "text", ["see " + "/tmp" + "/x", "'" + "/root" + "/y'", "fixes issue " + "#12", "as in PR " + "7"]
)
def test_finds(text):
    assert len(list(found(text))) == 1


@pytest.mark.parametrize("text", ["src/work/x", "$scratch/tmp/y", "an issue with 3 experts", "expression 12"])
def test_passes(text):
    assert not list(found(text))
