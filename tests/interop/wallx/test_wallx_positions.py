"""The position builders, by hand and against transformers where it is there and still computes what was published."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import anabranch
from anabranch.interop.wallx import ops
from anabranch.ops.positions.cases import CASES, IMAGE, START, VIDEO

IDS = (IMAGE, VIDEO, START)
PAD, TEXT, END = 0, 9, 4
GRIDS = torch.tensor([[1, 4, 8], [2, 8, 4], [3, 12, 12]])


def rope_index(ids, *, speed=1.0, images=None, videos=None, seconds=None, mask=None):
    return ops.get_rope_index(ids, 2, *IDS, speed, images, videos, seconds, mask)


def test_images_and_a_video_by_hand(device):
    """Two rows, padded left and right: images of 1 x 2 and of 2 x 1 tokens, and a video of two frames."""
    rows = [
        [PAD, PAD, TEXT, START, IMAGE, IMAGE, END, START, IMAGE, IMAGE, TEXT],
        [TEXT, START, VIDEO, VIDEO, VIDEO, VIDEO, END, PAD, PAD, PAD, PAD],
    ]
    ids = torch.tensor(rows, device=device)
    positions, deltas = rope_index(
        ids,
        speed=2,
        images=torch.tensor([[1, 2, 4], [1, 4, 2]], device=device),
        videos=torch.tensor([[2, 2, 4]], device=device),
        seconds=torch.tensor([1.5], device=device),
        mask=(ids != PAD).long(),
    )
    assert positions.shape == (3, 2, 11)
    # The first image is at 2, one high and two wide: what follows starts at 4. The second, two high, is at 6.
    assert positions[:, 0].tolist() == [
        [1, 1, 0, 1, 2, 2, 4, 5, 6, 6, 8],
        [1, 1, 0, 1, 2, 2, 4, 5, 6, 7, 8],
        [1, 1, 0, 1, 2, 3, 4, 5, 6, 6, 8],
    ]
    # The second frame comes 1.5 s later, at 2 positions a second.
    assert positions[:, 1].tolist() == [
        [0, 1, 2, 2, 5, 5, 6, 1, 1, 1, 1],
        [0, 1, 2, 2, 2, 2, 6, 1, 1, 1, 1],
        [0, 1, 2, 3, 2, 3, 6, 1, 1, 1, 1],
    ]
    assert deltas.tolist() == [[9 - 11], [7 - 11]]
    assert positions.device.type == deltas.device.type == device


def test_text_alone(device):
    ids = torch.tensor([[PAD, TEXT, TEXT], [TEXT, TEXT, TEXT]], device=device)
    positions, deltas = rope_index(ids, mask=(ids != PAD).long())
    assert positions.tolist() == [[[1, 0, 1], [0, 1, 2]]] * 3
    assert deltas.tolist() == [[-1], [0]]
    assert rope_index(ids)[0].tolist() == [[[0, 1, 2], [0, 1, 2]]] * 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arguments_go_where_they_belong(case):
    """By position as the interface has them, by name as the public function does."""
    arguments = case.arguments()
    for mine, public in zip(
        ops.get_rope_index(*arguments.values()), anabranch.rope_index(**arguments), strict=True
    ):
        assert torch.equal(mine, public)


def test_rot_pos_emb_by_hand(device):
    """Blocks of 2 x 2 patches, in each frame anew."""
    inv_freq = torch.tensor([1.0, 0.5], device=device)
    angles = ops.rot_pos_emb(inv_freq, torch.tensor([[2, 2, 4]], device=device), 2)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert angles.tolist() == [[r, r / 2, c, c / 2] for r, c in places] * 2


def test_window_index_by_hand(device):
    """3 x 3 merged tokens in windows of 2 x 2, which are cut at the borders; a window's end counts merged tokens."""
    grid = torch.tensor([[1, 6, 6]], device=device)
    index, bounds = ops.get_window_index(grid, 56, 2, 14)
    assert index.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert bounds.tolist() == [0, 4, 6, 8, 9]
    assert ops.get_window_index(grid, 56, 2, 14, 4)[1].tolist() == [0, 16, 24, 32, 36]


def test_lists_of_grids():
    assert torch.equal(
        ops.get_window_index(GRIDS.tolist(), 112, 2, 14)[0], ops.get_window_index(GRIDS, 112, 2, 14)[0]
    )


@pytest.mark.parametrize("merge", [1, 2])
def test_vision_builders_equal_transformers(device, merge):
    vision = pytest.importorskip("transformers.vision_utils")
    grids = GRIDS.to(device)
    theirs = vision.get_vision_window_index(grids, merge, 28 * merge, 14)
    for mine, their in zip(ops.get_window_index(grids, 28 * merge, merge, 14, merge**2), theirs, strict=True):
        assert mine.dtype == their.dtype
        assert torch.equal(mine, their.to(device))
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 8, 2, device=device) / 8)
    places = vision.get_vision_position_ids(grids, merge).to(device)
    expected = torch.outer(torch.arange(12, device=device, dtype=torch.float32), inv_freq)[places].flatten(1)
    assert torch.equal(ops.rot_pos_emb(inv_freq, grids, merge), expected)


@pytest.mark.parametrize("case", [c for c in CASES if "slow" not in c.name], ids=lambda case: case.name)
def test_rope_index_equals_transformers(case):
    """But for padded places, and for the ticks of a slow video in what follows it, which 5.x leaves out."""
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel as Model

    arguments = case.arguments()
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    sizes = SimpleNamespace(spatial_merge_size=case.merge, tokens_per_second=case.tokens_per_second)
    stand_in = SimpleNamespace(
        config=SimpleNamespace(vision_config=sizes),
        get_vision_position_ids=partial(Model.get_vision_position_ids, None),
    )
    names = ("input_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "attention_mask")
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    theirs, deltas = Model.get_rope_index(
        stand_in, mm_token_type_ids=kinds, **{name: arguments[name] for name in names}
    )
    mine, my_deltas = ops.get_rope_index(*arguments.values())
    kept = mask == 1
    assert torch.equal(mine[:, kept], theirs[:, kept])
    assert (mine[:, ~kept] == 1).all()
    # They count from the unpadded length of a row.
    assert torch.equal(my_deltas.flatten(), deltas.flatten() + kept.sum(1) - kept.shape[1])
