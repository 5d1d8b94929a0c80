"""Files stay short enough to read in one sitting: most under AIM lines, none over CAP."""

from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
AIM, CAP = 200, 400

LENGTHS = {
    path.relative_to(SRC).as_posix(): len(path.read_text().splitlines()) for path in sorted(SRC.rglob("*.py"))
}


@pytest.mark.parametrize("path", LENGTHS)
def test_no_file_is_too_long(path):
    assert LENGTHS[path] <= CAP, f"{path} has {LENGTHS[path]} lines: split it"


def test_most_files_are_short():
    long = {path: length for path, length in LENGTHS.items() if length > AIM}
    assert 5 * len(long) <= len(LENGTHS), f"more than a fifth of the files pass {AIM} lines: {long}"
