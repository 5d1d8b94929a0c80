"""The Triton backend of routing, interpreted or on a GPU: the same integers as eager, by every path through it."""

import os

import pytest
import torch

from anabranch.ops.route import reference
from anabranch.ops.route.backends import eager
from anabranch.testing import ROUTINGS, STRIDES, routing, strided

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.op("route", "triton")
compiled = pytest.mark.skipif(INTERPRETS, reason="the interpreter has taken the compiler's place")
pytestmark = [
    # the interpreter's own, at a loop whose bounds are device integers
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
FIELDS = ("counts", "offsets", "row_to_slot", "slot_to_row")
BEYOND = (-1, -(2**31), -(2**62), 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -(2**63))
# How few slots are compared with each other, in how few steps counts are added up by every block.
PATHS = {"compared": (4096, 0), "two_launches": (0, 100), "three_launches": (0, 0)}


@pytest.fixture
def kernels():
    from anabranch.ops.route.backends import triton

    return triton


@pytest.fixture(params=PATHS)
def path(request, kernels, monkeypatch):
    few_slots, few_steps = PATHS[request.param]
    monkeypatch.setattr(kernels, "FEW_SLOTS", few_slots)
    monkeypatch.setattr(kernels, "FEW_STEPS", few_steps)
    monkeypatch.setattr(kernels, "BLOCK", 64)


def same(actual, expected):
    for name, a, b in zip(FIELDS[-len(actual) :], actual, expected, strict=True):
        assert a.dtype == torch.int32, name
        assert a.is_contiguous(), name
        assert a.shape == b.shape, name
        assert a.tolist() == b.tolist(), name


def expected_topk(ids, experts):
    layout = reference.layout_from_topk(ids, experts)
    return tuple(getattr(layout, name) for name in FIELDS)


@runs
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("T", "E", "K"), [(33, 1, 1), (33, 7, 2), (50, 33, 8), (9, 300, 4), (1, 5, 1), (0, 4, 2), (64, 3, 1)]
)
def test_topk(path, kernels, T, E, K, dtype):
    ids = routing(T, E, K, dropped=0.2, dtype=dtype)
    same(kernels.topk(ids, E), expected_topk(ids, E))


@runs
@pytest.mark.parametrize("kind", ROUTINGS)
def test_topk_of_every_kind_of_routing(path, kernels, kind):
    ids = routing(60, 5, 3, kind)
    same(kernels.topk(ids, 5), expected_topk(ids, 5))


@runs
def test_topk_of_ids_that_are_no_experts(path, kernels):
    ids = torch.tensor([BEYOND, range(10), BEYOND])
    same(kernels.topk(ids, 3), expected_topk(ids, 3))
    same(kernels.topk(ids[:1], 3), expected_topk(ids[:1], 3))


@runs
@pytest.mark.parametrize("layout", STRIDES)
def test_topk_of_any_memory_layout(path, kernels, layout):
    view = strided(routing(31, 5, 4, dropped=0.2), layout)
    same(kernels.topk(view, 5), expected_topk(view, 5))


@runs
@pytest.mark.parametrize(("few_steps", "T", "E"), [(0, 90, 1500), (100, 9, 70_000)])
def test_topk_of_many_experts_in_larger_blocks(kernels, monkeypatch, few_steps, T, E):
    for name, value in (("FEW_SLOTS", 0), ("FEW_STEPS", few_steps), ("BLOCK", 32), ("STEP", (8, 4096))):
        monkeypatch.setattr(kernels, name, value)
    ids = E - 1 - routing(T, 9, 3, "duplicates", dropped=0.1) ** 3
    same(kernels.topk(ids, E), eager.topk(ids, E))


@runs
def test_topk_of_a_block_that_one_expert_fills(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "FEW_SLOTS", 0)
    ids = torch.full((128, 3), 2)
    ids[-1] = torch.tensor([1, -1, 2])
    same(kernels.topk(ids, 3), eager.topk(ids, 3))


@runs
@pytest.mark.parametrize("few_steps", [100, 0], ids=["two_launches", "three_launches"])
def test_topk_of_more_blocks_than_one_step_adds_up(kernels, monkeypatch, few_steps):
    for name, value in (("FEW_SLOTS", 0), ("FEW_STEPS", few_steps), ("BLOCK", 32), ("SCAN", 16)):
        monkeypatch.setattr(kernels, name, value)
    ids = routing(257, 3, 6, "duplicates", dropped=0.1)
    same(kernels.topk(ids, 3), eager.topk(ids, 3))


@runs
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("counts", "num_rows"),
    [
        ([2, 0, 3], 5),
        ([2, 0, 3], 9),
        ([5, 100, 3], 9),
        ([2**31 - 1, 2**31 - 1, 2**31 - 1], 7),
        ([3, -2, 4], 9),
        ([0, 0], 0),
        ([4, 4], 0),
        ([], 3),
        ([1] * 300, 2000),
    ],
)
def test_counts(kernels, counts, num_rows, dtype):
    counts = torch.tensor(counts, dtype=dtype)
    same(kernels.counts(counts, num_rows), eager.counts(counts, num_rows))
    view = strided(counts, "every_second")
    same(kernels.counts(view, num_rows), eager.counts(counts, num_rows))


@runs
def test_counts_beyond_32_bits(kernels):
    counts = torch.tensor([2**62, -(2**63), 2**63 - 1, 2**32 + 1])
    same(kernels.counts(counts, 9), eager.counts(counts, 9))


@pytest.fixture(params=["one_launch", "two_launches"])
def inverting(request, kernels, monkeypatch):
    if request.param == "two_launches":
        monkeypatch.setattr(kernels, "ONE_PROGRAM", 0)


@runs
@pytest.mark.parametrize("kind", ROUTINGS)
def test_sorted_rows(inverting, kernels, kind):
    made = eager.topk(routing(30, 5, 3, kind, dropped=0.1), 5)
    same(kernels.sorted_rows(made[0], made[2], 3), made)
    wide = strided(made[2].long(), "every_second")
    same(kernels.sorted_rows(made[0].long(), wide, 3), made)


@runs
@pytest.mark.parametrize("claimed", [[4, 3], [0, 1], [100, 100], [-1, 2], [0, 0]])
def test_sorted_rows_of_anything(inverting, kernels, claimed):
    rows = torch.tensor([3, 0, 3, 2**32, -5, 8, 2, 2, 0, 2**63 - 1])
    counts = torch.tensor(claimed)
    same(kernels.sorted_rows(counts, rows, 2), eager.sorted_rows(counts, rows, 2))
    same(kernels.sorted_rows(counts, rows[:0], 2), eager.sorted_rows(counts, rows[:0], 2))


@runs
def test_sorted_rows_of_more_than_one_program(kernels):
    rows, counts = torch.randint(-2, 2500, (2500,)), torch.tensor([1200, 0, 1250])
    same(kernels.sorted_rows(counts, rows, 5), eager.sorted_rows(counts, rows, 5))


@runs
@pytest.mark.parametrize("num_rows", [0, 1, 4, 3000])
def test_maps_keep_the_last_of_a_place(kernels, num_rows):
    rows = torch.randint(-1, 5, (1300, 2))
    rows[7] = torch.tensor([2**32, -(2**40)])
    same(kernels.maps(rows, num_rows), eager.maps(rows, num_rows))
    same(kernels.maps(strided(rows, "transposed"), num_rows), eager.maps(rows, num_rows))
    same(kernels.maps(rows[:0], num_rows), eager.maps(rows[:0], num_rows))


@runs
def test_too_many_rows_are_refused(kernels):
    from anabranch.ops.route.call import RouteCall

    huge = torch.zeros(1, dtype=torch.int32).expand(2**31 - 1)
    assert "at most" in kernels.supports(RouteCall(huge))
    assert kernels.supports(RouteCall(huge[: 2**30])) is None


@compiled
@pytest.mark.no_poison
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_without_spills(kernels, arch):
    from anabranch.testing.aot import compiling

    with compiling(arch) as found:
        for tokens in (8, 64, 2048, 200_000):
            kernels.topk(torch.empty(tokens, 8, dtype=torch.int64), 128)
        for experts in (2000, 70_000):
            kernels.topk(torch.empty(64, 256, dtype=torch.int32), experts)
        kernels.counts(torch.empty(64, dtype=torch.int64), 4096)
        for rows in (512, 4096):
            kernels.sorted_rows(torch.empty(64, dtype=torch.int32), torch.empty(rows, dtype=torch.int32), 8)
        kernels.maps(torch.empty(64, 8, dtype=torch.int32), 512)
    # Two that compare; two launches, and three of which the first is the same; two of larger blocks, one more of
    # wider ids; then rows in order, a sort by one program and by two launches, and maps, the last of them the same.
    assert len(found) == 2 + 2 + 2 + 2 + 1 + 1 + 1 + 2 + 1
    for kernel in found:
        assert not kernel.spilled_bytes, kernel


@compiled
@pytest.mark.no_poison
def test_another_number_of_tokens_or_experts_compiles_nothing(kernels):
    from anabranch.testing.aot import compiling

    def topk(*sizes):
        for tokens, experts in sizes:
            kernels.topk(torch.empty(tokens, 8, dtype=torch.int64), experts)

    with compiling(90) as found:
        topk((16_384, 128), (1000, 8), (100, 8))
        compiled = len(found)
        topk((18_003, 60), (2001, 1), (301, 3))
        assert len(found) == compiled
