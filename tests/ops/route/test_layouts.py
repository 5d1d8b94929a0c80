"""The constructors of ExpertLayout against a loop over Python ints, and the properties every layout has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch import ExpertLayout
from anabranch.ops.route import reference
from anabranch.testing import ROUTINGS, STRIDES, assert_same, routing, strided

pytestmark = pytest.mark.op("route")
FIELDS = ("counts", "offsets", "row_to_slot", "slot_to_row")
BEYOND = (-1, -(2**31), -(2**62), 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -(2**63))


def equal(actual: ExpertLayout, expected: ExpertLayout) -> None:
    for name in FIELDS:
        value = getattr(actual, name)
        assert value.dtype == torch.int32, name
        assert value.is_contiguous(), name
        assert value.tolist() == getattr(expected, name).tolist(), name


def consistent(layout: ExpertLayout, num_rows: int) -> None:
    """What holds of any layout with counts."""
    counts, offsets = layout.counts.tolist(), layout.offsets.tolist()
    assert min(counts, default=0) >= 0
    assert offsets == [sum(counts[:e]) for e in range(len(counts) + 1)]
    assert offsets[-1] <= num_rows
    inverse(layout, num_rows)
    assert set(layout.row_to_slot[offsets[-1] :].tolist()) <= {-1}


def inverse(layout: ExpertLayout, num_rows: int) -> None:
    rows, slots = layout.row_to_slot.tolist(), layout.slot_to_row.reshape(-1).tolist()
    assert len(rows) == num_rows
    assert all(slots[slot] == row for row, slot in enumerate(rows) if slot >= 0)
    assert all(rows[row] == slot for slot, row in enumerate(slots) if row >= 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("T", "E", "K"), [(33, 1, 1), (33, 7, 2), (50, 3, 8), (9, 256, 4), (300, 7, 4), (1, 5, 1), (0, 4, 2)]
)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_from_topk(kind, T, E, K, dtype):
    ids = routing(T, E, K, kind, dropped=0.2, dtype=dtype)
    layout = ExpertLayout.from_topk(ids, E)
    equal(layout, reference.layout_from_topk(ids, E))
    consistent(layout, T * K)


@given(
    st.integers(1, 9).flatmap(
        lambda E: st.tuples(
            st.just(E),
            st.integers(1, 4).flatmap(
                lambda K: st.lists(
                    st.lists(st.sampled_from((*range(E), E, E + 5, *BEYOND)), min_size=K, max_size=K)
                ).map(lambda rows: torch.tensor(rows, dtype=torch.int64).reshape(-1, K))
            ),
        )
    )
)
def test_from_topk_of_anything(drawn):
    E, ids = drawn
    layout = ExpertLayout.from_topk(ids, E)
    equal(layout, reference.layout_from_topk(ids, E))
    consistent(layout, ids.numel())
    slots = layout.row_to_slot[: layout.offsets[-1]].long()
    experts = ids.reshape(-1)[slots]
    # Sorted by expert, then by slot: the order of one number made of both.
    assert (experts * ids.numel() + slots).diff().gt(0).all()
    assert int(layout.counts.sum()) == int(((ids >= 0) & (ids < E)).sum())


def test_ids_that_are_never_experts():
    ids = torch.tensor([BEYOND])
    layout = ExpertLayout.from_topk(ids, 3)
    assert layout.counts.tolist() == [0, 0, 0]
    assert layout.slot_to_row.tolist() == [[-1] * len(BEYOND)]


def test_ids_that_wrap_around_in_32_bits():
    layout = ExpertLayout.from_topk(torch.tensor([[2**32, 2**32 + 1, -(2**32), 1]]), 2)
    assert layout.counts.tolist() == [0, 1]
    assert layout.row_to_slot.tolist() == [3, -1, -1, -1]


@pytest.mark.parametrize("E", [127, 128, 255, 256, 32766, 32767, 32768, 70_000])
def test_expert_numbers_as_wide_as_they_come(E):
    ids = torch.tensor([[E - 1, 0, E, -1], [E - 2, E - 1, 2 * E, E - 2**16]])
    layout = ExpertLayout.from_topk(ids, E)
    equal(layout, reference.layout_from_topk(ids, E))
    assert int(layout.offsets[-1]) == int(((ids >= 0) & (ids < E)).sum())


def test_dropped_choices():
    ids = torch.tensor([[0, -1], [-1, -1], [2, 1], [-1, 2], [1, 0], [3, -1]])
    layout = ExpertLayout.from_topk(ids, 4)
    assert layout.counts.tolist() == [2, 2, 2, 1]
    assert layout.row_to_slot.tolist() == [0, 9, 5, 8, 4, 7, 10, -1, -1, -1, -1, -1]
    assert layout.slot_to_row.tolist() == [[0, -1], [-1, -1], [4, 2], [-1, 5], [3, 1], [6, -1]]


@pytest.mark.parametrize("T", [3, 300])
def test_an_expert_named_twice_has_a_row_for_each(T):
    ids = torch.tensor([[5, 8, 8, 3], [8, 8, 8, 8], [0, 1, 2, 3]]).repeat(T // 3, 1)
    layout = ExpertLayout.from_topk(ids, 16)
    equal(layout, reference.layout_from_topk(ids, 16))
    assert int(layout.counts[8]) == 6 * (T // 3)


@pytest.mark.parametrize("T", [20_000, 65_537])
def test_many_rows_stay_in_order(T):
    ids = torch.randint(0, 3, (T, 1))
    layout = ExpertLayout.from_topk(ids, 3)
    assert_same(layout.row_to_slot.float(), torch.sort(ids[:, 0], stable=True).indices.float())


@pytest.mark.parametrize("layout", STRIDES)
def test_from_topk_of_any_memory_layout(layout):
    ids = routing(21, 5, 4, dropped=0.2)
    view = strided(ids, layout)
    equal(ExpertLayout.from_topk(view, 5), reference.layout_from_topk(view.contiguous(), 5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("counts", "num_rows", "sizes"),
    [
        ([2, 0, 3], 5, [2, 0, 3]),
        ([2, 0, 3], 9, [2, 0, 3]),
        ([8, 0, 12, 4], 40, [8, 0, 12, 4]),
        ([5, 100, 3], 9, [5, 4, 0]),
        ([2**31 - 1, 2**31 - 1, 2**31 - 1], 7, [7, 0, 0]),
        ([3, -2, 4], 9, [3, 0, 4]),
        ([-5], 3, [0]),
        ([0, 0], 0, [0, 0]),
        ([4, 4], 0, [0, 0]),
        ([], 3, []),
    ],
)
def test_from_counts(counts, num_rows, sizes, dtype):
    layout = ExpertLayout.from_counts(torch.tensor(counts, dtype=dtype), num_rows)
    assert layout.counts.tolist() == sizes
    assert layout.row_to_slot.tolist() == list(range(sum(sizes))) + [-1] * (num_rows - sum(sizes))
    assert layout.slot_to_row.tolist() == [[row] for row in layout.row_to_slot.tolist()]
    consistent(layout, num_rows)


def test_counts_whose_sum_overflows():
    layout = ExpertLayout.from_counts(torch.tensor([2**62, 2**62, 2**62, 2**62]), 7)
    assert layout.counts.tolist() == [7, 0, 0, 0]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), st.integers(0, 40))
def test_from_counts_of_anything(counts, num_rows):
    consistent(ExpertLayout.from_counts(torch.tensor(counts, dtype=torch.int64), num_rows), num_rows)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_from_sorted_is_from_topk_again(kind):
    made = ExpertLayout.from_topk(routing(30, 5, 3, kind, dropped=0.1), 5)
    equal(ExpertLayout.from_sorted(made.counts, made.row_to_slot, 3), made)
    equal(ExpertLayout.from_sorted(made.counts.long(), made.row_to_slot.long(), 3), made)


def test_from_sorted_drops_slots_out_of_range():
    layout = ExpertLayout.from_sorted(torch.tensor([5, 1]), torch.tensor([6, 0, 2**32 + 3, -2, 5, 1]), 3)
    assert layout.row_to_slot.tolist() == [-1, 0, -1, -1, 5, 1]
    assert layout.slot_to_row.tolist() == [[1, 5, -1], [-1, -1, 4]]
    assert layout.offsets.tolist() == [0, 5, 6]


def test_from_sorted_keeps_the_order_it_is_given():
    layout = ExpertLayout.from_sorted(torch.tensor([2, 1]), torch.tensor([3, 0, 2, 1]), 2)
    assert layout.row_to_slot.tolist() == [3, 0, 2, -1]
    assert layout.slot_to_row.tolist() == [[1, -1], [2, 0]]


@given(
    st.lists(st.integers(-3, 9), max_size=4),
    st.lists(st.integers(-4, 14) | st.sampled_from(BEYOND), max_size=6).map(lambda slots: 2 * slots),
)
def test_from_sorted_of_anything(counts, slots):
    row_to_slot = torch.tensor(slots, dtype=torch.int64)
    layout = ExpertLayout.from_sorted(torch.tensor(counts, dtype=torch.int64), row_to_slot, 2)
    kept = [slot for slot in layout.row_to_slot.tolist() if slot >= 0]
    assert layout.slot_to_row.shape == (len(slots) // 2, 2)
    assert set(kept) <= {slot for slot in slots if 0 <= slot < len(slots)}
    assert len(set(kept)) == len(kept)
    consistent(layout, len(slots))


@given(st.lists(st.integers(-3, 9) | st.sampled_from(BEYOND), max_size=8), st.integers(0, 9))
def test_from_slot_to_row(rows, num_rows):
    slot_to_row = torch.tensor(rows, dtype=torch.int64).reshape(-1, 1)
    layout = ExpertLayout.from_slot_to_row(slot_to_row, num_rows)
    assert layout.counts is None
    assert layout.offsets is None
    # Of equal rows the last slot has it, so that the maps are inverse.
    last = {row: slot for slot, row in enumerate(rows) if 0 <= row < num_rows}
    expected = [row if last.get(row) == slot else -1 for slot, row in enumerate(rows)]
    assert layout.slot_to_row.reshape(-1).tolist() == expected
    inverse(layout, num_rows)


def test_offsets_are_the_sum_every_time():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        counts = torch.randint(0, 501, (256,), generator=generator)
        layout = ExpertLayout.from_counts(counts, 256 * 500)
        assert torch.equal(layout.offsets[1:].long(), counts.cumsum(0))
        ids = torch.randint(-1, 256, (64, 8), generator=generator)
        expected = torch.bincount(ids[ids >= 0], minlength=256).cumsum(0)
        assert torch.equal(ExpertLayout.from_topk(ids, 256).offsets[1:].long(), expected)
