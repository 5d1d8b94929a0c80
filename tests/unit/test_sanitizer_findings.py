"""What `make sanitize` makes of the tools' reports: only the compiler's own hand-over is left out of the count."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "gpu" / "findings.py"
spec = importlib.util.spec_from_file_location("findings", PATH)
findings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(findings)

SOURCE = """
@jit
def some_kernel(x, FAST: gl.constexpr):
    load(x)
    if FAST:
        gl.warp_specialize([(consumer, (x,)), (producer, (x,))], [8], [40])
    else:
        gl.warp_specialize([(consumer, (x,)), (slow, (x,))], [8], [40])


@jit
def consumer(x):
    wait(x)
"""
DEF, STATEMENT, ELSEWHERE = 3, 5, 4
KERNELS = {"some_kernel": {findings.HandOver(0x34108, 12, 4), findings.HandOver(0x38100, 12, 4)}}
CLEAN = """========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "some.py").write_text(SOURCE)
    monkeypatch.setattr(findings, "SOURCES", tmp_path)
    findings.specializing.cache_clear()
    yield
    findings.specializing.cache_clear()


def hazard(
    address=0x34507, kind="RAW", first=("Write", 31, 0x36A0, DEF), then=("Read", 352, 0x150, DEF), kernel="some_kernel"
):  # fmt: skip
    lines = [
        f"========= Error: Potential {kind} hazard detected at __shared__ {address:#x} in block (104,0,0) :"
    ]
    for what, thread, offset, line in (first, then):
        lines.append(f"=========     {what} Thread ({thread},0,0) at {kernel}+{offset:#x} in some.py:{line}")
    return "\n".join([*lines, "=========     Current Value : 3", "========= ", ""])


def report(*hazards, told=None):
    told = len(hazards) if told is None else told
    end = f"========= RACECHECK SUMMARY: {told} hazards displayed ({told} errors, 0 warnings)\n"
    return "========= COMPUTE-SANITIZER\n" + "".join(hazards) + end


HANDED_OVER = {
    "to the last warp": hazard(),
    "to the first": hazard(0x34500, then=("Read", 128, 0x150, DEF)),
    "of another compiled form": hazard(0x384FF),
    "at the end": hazard(first=("Write", 127, 0x5750, STATEMENT)),
    "of the next": hazard(kind="WAR", first=("Read", 352, 0x150, DEF), then=("Write", 31, 0x5750, STATEMENT)),
}
FOREIGN = {
    "another warp's byte": hazard(0x34506),
    "before the bytes": hazard(0x344FF, then=("Read", 127, 0x150, DEF)),
    "after the bytes": hazard(0x34508, then=("Read", 384, 0x150, DEF)),
    "in the ring": hazard(0x1407),
    "by a waiting warp": hazard(first=("Write", 160, 0x36A0, DEF)),
    "read by one that starts": hazard(0x34503, then=("Read", 96, 0x150, DEF)),
    "written elsewhere": hazard(first=("Write", 31, 0x36A0, ELSEWHERE)),
    "read elsewhere": hazard(then=("Read", 352, 0x150, ELSEWHERE)),
    "two writes": hazard(kind="WAW", then=("Write", 352, 0x150, DEF)),
    "a kernel that was not run": hazard(kernel="consumer"),
}


@pytest.mark.parametrize("name", HANDED_OVER)
def test_the_hand_over_is_not_counted(name):
    assert findings.read(report(HANDED_OVER[name], HANDED_OVER[name]), KERNELS) == (2, {})


@pytest.mark.parametrize("name", FOREIGN)
def test_everything_else_is(name):
    excused, found = findings.read(report(hazard(), FOREIGN[name], hazard()), KERNELS)
    assert excused == 2
    assert list(found.values()) == [1]


def test_a_kernel_of_unknown_shared_memory_is_excused_nothing():
    assert findings.read(report(hazard()), {})[1].total() == 1


def test_a_kernel_without_partitions_is_excused_nothing(tmp_path):
    (tmp_path / "ops" / "some.py").write_text(SOURCE.replace("warp_specialize", "other"))
    assert findings.read(report(hazard()), KERNELS)[1].total() == 1


def test_hazards_of_two_lines_are_one_line():
    each = [hazard(0x400 + i, then=("Read", 32 * i, 0x150, ELSEWHERE)) for i in range(5)]
    excused, found = findings.read(report(*each) + CLEAN + report(*each), KERNELS)
    assert excused == 0
    assert found == {
        "Error: RAW in some_kernel: write some.py:3, then read some.py:4"
        " (0x400 to 0x404; 0x36a0 of warps 0 to 0, 0x150 of warps 0 to 4)": 10
    }


def test_hazards_that_are_not_printed_are_counted():
    found = findings.read(report(hazard(), told=13826), KERNELS)[1]
    assert found.total() == 13825


def test_reports_of_memcheck_are_grouped_by_place():
    def invalid(thread, line):
        return (
            "========= Invalid __global__ read of size 4 bytes\n"
            f"=========     at some_kernel+0x210 in some.py:{line}\n"
            f"=========     by thread ({thread},0,0) in block (3,0,0)\n"
            f"=========     Address 0x7f00{thread:04x} is out of bounds\n"
            "========= \n"
        )

    log = invalid(0, 4) + invalid(1, 4) + invalid(0, 9) + "========= ERROR SUMMARY: 3 errors\n"
    assert findings.read(log, KERNELS) == (
        0,
        {
            "Invalid __global__ read of size 4 bytes at some_kernel+0x210 in some.py:4": 2,
            "Invalid __global__ read of size 4 bytes at some_kernel+0x210 in some.py:9": 1,
        },
    )


def test_a_warning_is_found_and_a_clean_report_is_not():
    warning = "========= Warning: Detected overflow of tracked cuda::barrier structures.\n"
    assert findings.read(CLEAN + warning + CLEAN, KERNELS)[1].total() == 1
    assert findings.read(CLEAN + CLEAN, KERNELS) == (0, {})
