"""rope_index against the loop over tokens: real prompts, any prompt, empty ones, dtypes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.positions import reference
from anabranch.ops.positions.api import rope_index, window_index
from anabranch.ops.positions.cases import CASES, Case, Vision

IDS = dict(image_token_id=2, video_token_id=3, vision_start_token_id=1)


def equal(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype == torch.int64
        assert mine.shape == theirs.shape
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_prompts(case: Case) -> None:
    arguments = case.arguments()
    equal(rope_index(**arguments), reference.rope_index(**arguments))


sizes = st.integers(1, 3)
seconds = st.none() | st.sampled_from([0.0, 0.04, 0.5, 1.0, 1.3, 2.0])
visions = st.tuples(sizes, sizes, sizes, seconds)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    merge = draw(st.sampled_from([1, 2, 3]))

    def vision(t: int, h: int, w: int, pace: float | None) -> Vision:
        return Vision((t, h * merge, w * merge), pace)

    part = st.integers(0, 4) | visions.map(lambda v: vision(*v))
    rows = tuple(tuple(row) for row in draw(st.lists(st.lists(part, max_size=5), min_size=1, max_size=3)))
    speed = draw(st.sampled_from([1.0, 2, 25, 0.7]))
    return Case("drawn", rows, merge, speed, draw(st.booleans()), draw(st.integers(0, 2)))


@settings(deadline=None, max_examples=100)
@given(case=cases(), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_any_prompt(case: Case, dtype: torch.dtype) -> None:
    arguments = case.arguments(dtype)
    got = rope_index(**arguments)
    equal(got, reference.rope_index(**arguments))
    # The same as host lists and a bool mask.
    lists = {
        name: None if arguments[name] is None else arguments[name].tolist()
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    }
    equal(rope_index(**{**arguments, **lists, "attention_mask": arguments["attention_mask"] == 1}), got)


@settings(deadline=None, max_examples=100)
@given(case=cases(), more=st.integers(1, 5))
def test_padding_moves_nothing(case: Case, more: int) -> None:
    """Unpadded positions do not depend on the padding, and index + delta continues each row."""
    short = case.arguments()
    long = replace(case, extra_padding=case.extra_padding + more, pad_left=not case.pad_left).arguments()
    got, padded = rope_index(**short), rope_index(**long)
    keep, padded_keep = short["attention_mask"] == 1, long["attention_mask"] == 1
    assert got[0][:, keep].tolist() == padded[0][:, padded_keep].tolist()
    assert (padded[0][:, ~padded_keep] == 1).all()
    if short["image_grid_thw"] is None and short["video_grid_thw"] is None:
        return
    for row, (kept, delta) in enumerate(zip(keep, got[1], strict=True)):
        following = int(got[0][:, row, kept].max()) + 1 if kept.any() else 0
        assert int(delta) + keep.shape[1] == following
        assert int(padded[1][row]) + padded_keep.shape[1] == following


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_ticks_in_the_dtype_of_the_seconds(dtype: torch.dtype) -> None:
    """0.3 s in 11, 8, 24 and 53 bits gives ticks that differ."""
    ids = torch.tensor([[1, *[3] * 200, 4]])
    arguments = dict(spatial_merge_size=1, video_grid_thw=[[200, 1, 1]], tokens_per_second=10, **IDS)
    pace = torch.tensor([3 if dtype == torch.int64 else 0.3], dtype=dtype)
    got = rope_index(ids, second_per_grid_ts=pace, **arguments)
    equal(got, reference.rope_index(ids, second_per_grid_ts=pace, **arguments))
    frames = torch.arange(200)
    assert (got[0][0, 0, 1:201] - 1).tolist() == (frames * pace[0] * 10).long().tolist()


def test_whole_seconds_in_a_list_count_exactly() -> None:
    ids = torch.tensor([[1, 3, 3, 4]])
    arguments = dict(spatial_merge_size=1, video_grid_thw=[[2, 1, 1]], **IDS)
    for pace, tick in ((2**25 + 1, 2**25 + 1), (2.0**25 + 1, 2**25)):  # the second rounds to float32
        got = rope_index(ids, second_per_grid_ts=[pace], **arguments, tokens_per_second=1)
        assert got[0][0].tolist() == [[0, 1, 1 + tick, 2 + tick]]


def test_inputs_survive_and_outputs_are_their_own() -> None:
    arguments = CASES[3].arguments()
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    positions, deltas = rope_index(**arguments)
    positions += 1
    deltas += 1
    assert all(torch.equal(arguments[name], value) for name, value in before.items())
    ids, mask = before["input_ids"], before["attention_mask"]
    for text_only in (rope_index(ids, spatial_merge_size=2, attention_mask=m, **IDS) for m in (None, mask)):
        assert text_only[0].is_contiguous()  # so that writing to one axis leaves the others


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0)])
@pytest.mark.parametrize("grids", [None, []])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_empty(shape: tuple[int, int], grids: list | None, masked: bool, dtype: torch.dtype) -> None:
    ids = torch.zeros(shape, dtype=dtype)
    arguments = dict(spatial_merge_size=2, image_grid_thw=grids, **IDS)
    mask = torch.ones(shape, dtype=torch.int64) if masked else None
    equal(
        rope_index(ids, attention_mask=mask, **arguments),
        (torch.zeros(3, *shape, dtype=torch.int64), torch.zeros(shape[0], 1, dtype=torch.int64)),
    )


def test_empty_grids_are_not_missing_grids() -> None:
    ids = torch.tensor([[0, 9, 9]])
    arguments = dict(spatial_merge_size=2, attention_mask=ids != 0, **IDS)
    equal(
        rope_index(ids, image_grid_thw=torch.zeros(0, 3, dtype=torch.int32), video_grid_thw=[], **arguments),
        (torch.tensor([[[1, 0, 1]]] * 3), torch.tensor([[-1]])),
    )


def test_a_default_device_changes_nothing() -> None:
    arguments = CASES[3].arguments()
    lists = {"second_per_grid_ts": [1.0, 1.0], "video_grid_thw": arguments["video_grid_thw"].tolist()}
    expected = rope_index(**arguments)
    with torch.device("meta"):
        got = rope_index(**{**arguments, **lists})
        plain = rope_index(**{**arguments, "second_per_grid_ts": None})
        index, bounds = window_index([[1, 4, 4]], 56, 2, 14)
    equal(got, expected)
    equal(plain, expected)
    assert (index.tolist(), bounds.tolist()) == ([0, 1, 2, 3], [0, 16])
