"""What compute-sanitizer's tools report, in groups of one line each, and which of it is the compiler's own.

To start the partitions of a kernel, the code that Triton makes of ``warp_specialize`` keeps a byte for every warp that
waits: the warps that start write which partition it is to run, all warps meet at a barrier, and each waiting warp
reads its own byte; it is written again only after two more such barriers (tests/aot/test_hopper_hand_over.py). So the
order is kept, and racecheck, which reports a hazard at every such byte, is wrong there.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
RESERVED = 1024
"""Bytes that the system keeps at the start of a block's shared memory, before the kernel's own."""

HAZARD = re.compile(
    r"(\w+): (?:\(.*\) )?Potential (\w+) hazard detected at __shared__ (0x[0-9a-f]+) in block"
)
ACCESS = re.compile(r"(\w+) Thread \((\d+),\d+,\d+\) at (.+?)\+(0x[0-9a-f]+)(?: in (.+):(\d+))?$")
SUMMARY = re.compile(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) \w+(?: displayed \((\d+) errors?, (\d+) warn)?")
BANNER = "COMPUTE-SANITIZER"


@dataclass(frozen=True)
class HandOver:
    """Where a kernel as compiled tells its partitions to start: ``shared`` bytes, of which a byte a waiting warp, last.

    The first ``starters`` of its ``warps`` write.
    """

    shared: int
    warps: int
    starters: int

    def byte(self, warp: int) -> int:
        """The address of a waiting warp's byte, as racecheck counts."""
        return RESERVED + self.shared - self.warps + warp


@dataclass(frozen=True)
class Access:
    """One side of a hazard."""

    kind: str
    warp: int
    kernel: str
    offset: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind.lower()} {self.file}:{self.line}"


@lru_cache
def specializing(file: str, kernel: str) -> frozenset[int]:
    """The lines that the compiler names for the hand-over: the kernel's ``def`` and its statement that specializes."""
    for path in SOURCES.rglob(Path(file).name):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == kernel:
                found = {each.lineno for each in node.body if "warp_specialize(" in ast.unparse(each)}
                return frozenset({*found, node.lineno} if found else ())
    return frozenset()


def handed_over(
    kind: str, address: int, accesses: list[Access], kernels: Mapping[str, Iterable[HandOver]]
) -> bool:
    """Whether a hazard is between a starting warp's write of a waiting warp's byte, and that warp's own read of it."""
    sides = {access.kind: access for access in accesses}
    if kind not in ("RAW", "WAR") or sides.keys() != {"Read", "Write"}:
        return False
    read, write = sides["Read"], sides["Write"]
    return all(each.line in specializing(each.file, each.kernel) for each in accesses) and any(
        write.warp < each.starters <= read.warp < each.warps and address == each.byte(read.warp)
        for each in kernels.get(write.kernel, ())
    )


def records(log: str) -> Iterator[tuple[str, list[str]]]:
    """(what is said, the indented lines below) of each thing that a tool reports."""
    said: tuple[str, list[str]] | None = None
    for line in log.splitlines():
        body = line.removeprefix("=========")
        if body == line:
            continue
        if body.startswith("    ") and said:
            said[1].append(body.strip())
            continue
        if said:
            yield said
        said = (body.strip(), []) if body.strip() else None
    if said:
        yield said


def read(log: str, kernels: Mapping[str, Iterable[HandOver]]) -> tuple[int, Counter[str]]:
    """(hazards of the hand-over, how often each other thing is reported), from what one process of a tool wrote.

    Args:
        log: its report.
        kernels: the kernels that it ran, by name.
    """
    excused, total, told = 0, 0, 0
    hazards: dict[str, list[tuple[int, Access, Access]]] = defaultdict(list)
    others: Counter[str] = Counter()
    for head, below in records(log):
        if summary := SUMMARY.match(head):
            told += max(int(summary[1]), int(summary[2] or 0) + int(summary[3] or 0))
            continue
        if head == BANNER:
            continue
        total += 1
        hazard = HAZARD.match(head)
        accesses = [
            Access(m[1], int(m[2]) // 32, m[3], m[4], m[5] or "?", int(m[6] or 0))
            for m in map(ACCESS.match, below)
            if m
        ]
        if hazard is None or len(accesses) != 2:
            where = next((line for line in below if line.startswith(("at ", "and "))), "")
            others[f"{head} {where}".strip()] += 1
        elif handed_over(hazard[2], int(hazard[3], 16), accesses, kernels):
            excused += 1
        else:
            first, then = accesses
            name = f"{hazard[1]}: {hazard[2]} in {first.kernel}: {first}, then {then}"
            hazards[name].append((int(hazard[3], 16), first, then))
    for name, each in hazards.items():
        others[name + _extent(each)] += len(each)
    if told > total:
        others["reports of the tool's summary that it did not print, or that cannot be read"] = told - total
    return excused, others


def _extent(hazards: list[tuple[int, Access, Access]]) -> str:
    """Addresses, instructions and warps."""
    addresses = [address for address, _, _ in hazards]
    firsts, thens = (
        {(side.offset, side.warp) for side in sides} for sides in list(zip(*hazards, strict=True))[1:]
    )
    sides = [
        f"{'/'.join(sorted({offset for offset, _ in side})[:3])} of warps {min(w for _, w in side)} to"
        f" {max(w for _, w in side)}"
        for side in (firsts, thens)
    ]
    return f" ({min(addresses):#x} to {max(addresses):#x}; {sides[0]}, {sides[1]})"
