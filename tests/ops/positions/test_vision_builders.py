"""vision_rotary and window_index: by hand, against the loops, and what they refuse."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops.positions import reference
from anabranch.ops.positions.api import vision_rotary, window_index

GRID = "grid_thw: expected "
SIZES = GRID + "[t, h, w] of at least 1, h and w multiples of spatial_merge_size = 2, got "
LISTS = GRID + "a tensor (N, 3) or a list of [t, h, w], got "
FREQ = torch.ones(2)
WINDOW = dict(grid_thw=[[1, 4, 4]], window_size=8, spatial_merge_size=2, patch_size=2)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_angles_in_block_order_by_hand() -> None:
    # 2 x 4 patches in blocks of 2 x 2: the left block's four patches, then the right one's; two equal frames.
    frame = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    angles = vision_rotary(torch.tensor([1.0]), [[2, 2, 4]], 2)
    assert angles.tolist() == frame + frame


def test_angles_with_two_frequencies_by_hand() -> None:
    angles = vision_rotary(torch.tensor([1.0, 0.25], dtype=torch.float64), [[1, 1, 2], [1, 3, 1]], 1)
    assert angles.dtype == torch.float64
    assert angles.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0.25], [0, 0, 0, 0], [1, 0.25, 0, 0], [2, 0.5, 0, 0]]


def test_windows_cut_short_at_the_borders_by_hand() -> None:
    # 3 x 3 merged tokens in windows of 2 x 2: the full one, the right column, the bottom row, the corner.
    index, bounds = window_index([[1, 6, 6]], 56, 2, 14)
    assert index.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert bounds.tolist() == [0, 16, 24, 32, 36]
    assert (index.dtype, bounds.dtype) == (torch.int64, torch.int32)


def test_windows_of_frames_and_images_by_hand() -> None:
    # 1 x 4 in two whole windows, no empty one after them; then 2 frames of 1 x 1. 13 more pixels do nothing.
    grid = torch.tensor([[1, 1, 4], [2, 1, 1]], dtype=torch.int32)
    index, bounds = window_index(grid, 2 * 14 + 13, 1, 14)
    assert index.tolist() == [0, 1, 2, 3, 4, 5]
    assert bounds.tolist() == [0, 2, 4, 5, 6]


def test_unit_by_hand() -> None:
    assert window_index([[1, 4, 4]], 56, 2, 14)[1].tolist() == [0, 16]
    assert window_index([[1, 4, 4]], 56, 2, 14, spatial_merge_unit=1)[1].tolist() == [0, 4]


grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), max_size=4)


@settings(deadline=None, max_examples=100)
@given(grids=grids, merge=st.integers(1, 4), dtype=st.sampled_from(FLOATS))
def test_any_angles(grids: list[tuple[int, int, int]], merge: int, dtype: torch.dtype) -> None:
    grids = [(t, h * merge, w * merge) for t, h, w in grids]
    inv_freq = torch.tensor([1.0, 0.3, 0.07]).to(dtype)
    angles = vision_rotary(inv_freq, grids, merge)
    expected = reference.vision_rotary(inv_freq, grids, merge)
    assert angles.dtype == dtype
    assert torch.equal(angles, expected)
    assert torch.equal(
        vision_rotary(inv_freq, torch.tensor(grids, dtype=torch.int64).view(-1, 3), merge), angles
    )


@settings(deadline=None, max_examples=100)
@given(grids=grids, merge=st.integers(1, 3), window=st.integers(1, 6), unit=st.none() | st.integers(1, 5))
def test_any_windows(grids: list[tuple[int, int, int]], merge: int, window: int, unit: int | None) -> None:
    grids = [(t, h * merge, w * merge) for t, h, w in grids]
    index, bounds = window_index(grids, window * merge * 2, merge, 2, unit)
    expected = reference.window_index(grids, window * merge * 2, merge, 2, unit)
    assert torch.equal(index, expected[0])
    assert torch.equal(bounds, expected[1])
    assert index.sort().values.tolist() == list(range(len(index)))
    assert (bounds.diff() > 0).all()


def test_large_positions_round_to_the_dtype() -> None:
    angles = vision_rotary(torch.ones(1, dtype=torch.bfloat16), [[1, 1, 260]], 1)
    table = torch.outer(torch.arange(260, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16))
    assert torch.equal(angles[:, 1:], table)
    assert angles[257, 1] == 256


def test_gradient_of_the_frequencies() -> None:
    inv_freq = torch.tensor([1.0, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: vision_rotary(f, [[2, 2, 4]], 2), inv_freq)


@pytest.mark.parametrize("empty", [[], torch.zeros(0, 3, dtype=torch.int64)])
def test_no_grids(empty: list | torch.Tensor) -> None:
    assert vision_rotary(torch.ones(3), empty, 2).shape == (0, 6)
    index, bounds = window_index(empty, 112, 2, 14)
    assert index.shape == (0,)
    assert index.dtype == torch.int64
    assert bounds.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_on_a_gpu() -> None:
    """The same values there, without a wait for the device where the grids are lists."""
    grids = [[1, 8, 12], [2, 10, 6]]
    inv_freq = torch.rand(20)
    there = inv_freq.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        angles = vision_rotary(there, grids, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert angles.is_cuda
    assert torch.equal(angles.cpu(), vision_rotary(inv_freq, grids, 2))
    for got, expected in zip(
        window_index(torch.tensor(grids).cuda(), 112, 2, 14), window_index(grids, 112, 2, 14), strict=True
    ):
        assert got.is_cuda
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((FREQ[None], [[1, 2, 2]], 2), "inv_freq: expected shape (F,), got shape (1, 2)"),
        ((FREQ, [[1, 2, 3]], 2), SIZES + "[1, 2, 3]"),
        ((FREQ, [[1, 2, 2]], 0), "spatial_merge_size: expected at least 1, got 0"),
        ((FREQ.tolist(), [[1, 2, 2]], 2), "inv_freq: expected a tensor (F,), got list"),
        ((FREQ, None, 2), LISTS + "NoneType"),
        (
            (FREQ.long(), [[1, 2, 2]], 2),
            "inv_freq: expected dtype float16 or bfloat16 or float32 or float64, got int64",
        ),
    ],
)
def test_vision_rotary_refuses(arguments: tuple, message: str) -> None:
    error = ArgumentError if "shape" in message or "at least" in message else ArgumentTypeError
    with pytest.raises(error, match=f"^{re.escape('vision_rotary: ' + message)}$"):
        vision_rotary(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": 3}, "window_size: expected at least spatial_merge_size * patch_size = 4, got 3"),
        ({"window_size": 8.0}, "window_size: expected an int, got float"),
        ({"patch_size": 0}, "patch_size: expected at least 1, got 0"),
        ({"spatial_merge_size": -1}, "spatial_merge_size: expected at least 1, got -1"),
        ({"spatial_merge_unit": 0}, "spatial_merge_unit: expected at least 1, got 0"),
        ({"grid_thw": [[1, 4, 6], [1, 4, 7]]}, SIZES + "[1, 4, 7]"),
        ({"grid_thw": [[2**20, 64, 64]]}, GRID + "bounds that fit int32, got an end of 4294967296"),
        ({"grid_thw": torch.ones(3, 1, 3, dtype=torch.int32)}, GRID + "shape (N, 3), got shape (3, 1, 3)"),
    ],
)
def test_window_index_refuses(change: dict, message: str) -> None:
    error = ArgumentTypeError if "an int," in message else ArgumentError
    with pytest.raises(error, match=f"^{re.escape('window_index: ' + message)}$"):
        window_index(**{**WINDOW, **change})
