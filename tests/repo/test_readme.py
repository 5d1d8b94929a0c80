"""The README tells the truth: its file map, its commands, its tables."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def readme() -> str:
    return (ROOT / "README.md").read_text()


def file_map() -> list[str]:
    """The paths of the fenced block under "## File map": the first word of each line."""
    match = re.search(r"^## File map\n(.*?)(?=^## |\Z)", readme(), re.MULTILINE | re.DOTALL)
    assert match, 'README.md has no "## File map"'
    fence = FENCE.search(match.group(1))
    assert fence, '"## File map" is followed by no fenced block'
    return [line.split()[0] for line in fence.group(2).splitlines() if line.strip()]


def parts_of_the_project() -> list[Path]:
    """What the file map must not leave out."""
    package = ROOT / "src" / "anabranch"
    folders = [ROOT / name for name in ("tests", "docs", "benchmarks", "examples")]
    modules = [path for path in package.iterdir() if path.suffix == ".py" or _is_package(path)]
    ops = [path for path in (package / "ops").iterdir() if _is_package(path)]
    return [path for path in (*folders, *modules, *ops) if path.exists()]


def _is_package(path: Path) -> bool:
    return path.is_dir() and any(path.rglob("*.py"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_file_map_lists_what_exists():
    missing = [path for path in file_map() if not (ROOT / path).exists()]
    assert not missing, f"the file map lists {missing}"


def test_file_map_lists_everything():
    listed = {(ROOT / path).resolve() for path in file_map()}
    missing = [str(path.relative_to(ROOT)) for path in parts_of_the_project() if path not in listed]
    assert not missing, f"the file map leaves out {missing}"


def test_file_map_lists_nothing_twice():
    paths = [path.rstrip("/") for path in file_map()]
    assert len(paths) == len(set(paths))


def test_commands_are_make_targets():
    code = [body for _, body in FENCE.findall(readme())] + re.findall(r"`([^`\n]+)`", FENCE.sub("", readme()))
    named = {
        target
        for text in code
        for target in re.findall(r"^\s*(?:\$ )?make ([a-z][a-z-]*)", text, re.MULTILINE)
    }
    assert {"demo", "test"} <= named
    assert named <= make_targets(), f"no such target: {named - make_targets()}"


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")), ids=lambda p: p.name
)
def test_tables_are_whole(path):
    """Each row of a table has as many cells as its head, and a rule follows the head."""
    text = FENCE.sub("", path.read_text())
    for table in re.findall(r"(?:^\|.*\|[ ]*\n?){2,}", text, re.MULTILINE):
        head, rule, *rows = table.strip().splitlines()
        assert re.fullmatch(r"\|(\s*:?-{3,}:?\s*\|)+", rule.strip()), f"no rule under {head!r}"
        assert rows, f"no rows under {head!r}"
        for row in (rule, *rows):
            assert _cells(row) == _cells(head), f"{row!r} under {head!r}"


def _cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row)))
