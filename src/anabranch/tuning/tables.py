"""The results that come with the package: tables/<device>/<op>.json."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from anabranch.tuning.cache import Results, parse
from anabranch.tuning.key import Place, slug

FOLDER = Path(__file__).with_name("tables")


def shipped(op: str, place: Place) -> Results:
    """An op's table for this very GPU, over that for its compute capability (a folder as ``sm_90``)."""
    return _table(op, place.device, place.capability)


@cache
def _table(op: str, device: str, capability: str) -> Results:
    found: dict[str, object] = {}
    for name in (capability, slug(device)):
        path = FOLDER / name / f"{op}.json"
        if path.exists():
            found |= parse(path.read_text(encoding="utf-8"))
    return found  # type: ignore[return-value]
