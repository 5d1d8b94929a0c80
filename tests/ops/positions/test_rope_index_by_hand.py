"""rope_index: positions worked by hand."""

import torch

from anabranch.ops.positions.api import rope_index

IDS = dict(image_token_id=2, video_token_id=3, vision_start_token_id=1)


def test_image_between_text_by_hand() -> None:
    # text text START then 2 x 3 merged tokens, END text; the image starts at 3, the text after it at 3 + 3.
    ids = torch.tensor([[9, 9, 1, 2, 2, 2, 2, 2, 2, 4, 9]])
    positions, deltas = rope_index(ids, spatial_merge_size=2, image_grid_thw=[[1, 4, 6]], **IDS)
    assert positions.tolist() == [
        [[0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]],
        [[0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]],
        [[0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]],
    ]
    assert deltas.tolist() == [[-3]]


def test_video_whose_ticks_outgrow_its_frame_by_hand() -> None:
    # 3 frames of 1 x 2, 2 s apart, 25 tokens a second: ticks 0, 50, 100. What follows starts at 1 + 100 + 1.
    ids = torch.tensor([[1, 3, 3, 3, 3, 3, 3, 4]])
    positions, deltas = rope_index(
        ids,
        spatial_merge_size=1,
        video_grid_thw=[[3, 1, 2]],
        second_per_grid_ts=[2.0],
        tokens_per_second=25,
        **IDS,
    )
    assert positions.tolist() == [
        [[0, 1, 1, 51, 51, 101, 101, 102]],
        [[0, 1, 1, 1, 1, 1, 1, 102]],
        [[0, 1, 2, 1, 2, 1, 2, 102]],
    ]
    assert deltas.tolist() == [[95]]


def test_fractional_ticks_are_cut_after_the_product_by_hand() -> None:
    # 0.75 s at 2 tokens a second: 0, 1.5, 3, 4.5 become 0, 1, 3, 4. Cut seconds would give zeros.
    ids = torch.tensor([[1, 3, 3, 3, 3, 4]])
    positions, _ = rope_index(
        ids,
        spatial_merge_size=2,
        video_grid_thw=[[4, 2, 2]],
        second_per_grid_ts=[0.75],
        tokens_per_second=2,
        **IDS,
    )
    assert positions[0].tolist() == [[0, 1, 2, 4, 5, 6]]
    assert positions[1].tolist() == positions[2].tolist() == [[0, 1, 1, 1, 1, 6]]


def test_padding_on_both_sides_by_hand() -> None:
    # Left, right, and all padding; the second image belongs to the second row.
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 4], [9, 1, 2, 4, 9, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    positions, deltas = rope_index(
        ids, spatial_merge_size=1, image_grid_thw=[[1, 2, 1], [1, 1, 1]], attention_mask=ids != 0, **IDS
    )
    assert positions.tolist() == [
        [[1, 1, 1, 0, 1, 1, 3], [0, 1, 2, 3, 4, 1, 1], [1] * 7],
        [[1, 1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 1, 1], [1] * 7],
        [[1, 1, 1, 0, 1, 1, 3], [0, 1, 2, 3, 4, 1, 1], [1] * 7],
    ]
    assert deltas.tolist() == [[-3], [-2], [-7]]


def test_text_alone_by_hand() -> None:
    ids = torch.tensor([[0, 0, 9, 9, 9], [9, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    positions, deltas = rope_index(ids, spatial_merge_size=2, attention_mask=(ids != 0).int(), **IDS)
    assert positions.tolist() == [[[1, 1, 0, 1, 2], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]] * 3
    assert deltas.tolist() == [[-2], [-3], [-3]]
    positions, deltas = rope_index(ids, spatial_merge_size=2, **IDS)
    assert positions.tolist() == [[[0, 1, 2, 3, 4]] * 3] * 3
    assert deltas.tolist() == [[0]] * 3


def test_images_and_videos_take_their_grids_in_order_by_hand() -> None:
    ids = torch.tensor([[1, 3, 3, 4, 1, 2, 4, 1, 3, 4], [1, 2, 2, 4, 1, 3, 3, 3, 4, 9]])
    positions, deltas = rope_index(
        ids,
        spatial_merge_size=1,
        image_grid_thw=[[1, 1, 1], [1, 2, 1]],
        video_grid_thw=[[2, 1, 1], [1, 1, 1], [1, 1, 3]],
        second_per_grid_ts=[3.0, 9.0, 9.0],
        **IDS,
    )
    assert positions.tolist() == [
        [[0, 1, 4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 1, 3, 4, 5, 5, 5, 8, 9]],
        [[0, 1, 1, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 5, 5, 8, 9]],
        [[0, 1, 1, 5, 6, 7, 8, 9, 10, 11], [0, 1, 1, 3, 4, 5, 6, 7, 8, 9]],
    ]
    assert deltas.tolist() == [[2], [0]]


def test_a_start_token_alone_is_text() -> None:
    ids = torch.tensor([[1, 9, 1, 2, 4, 1]])
    positions, _ = rope_index(ids, spatial_merge_size=1, image_grid_thw=[[1, 1, 1]], **IDS)
    assert positions.tolist() == [[[0, 1, 2, 3, 4, 5]]] * 3


def test_padding_within_a_run_is_skipped() -> None:
    ids = torch.tensor([[1, 0, 2, 0, 2, 4]])
    positions, deltas = rope_index(
        ids, spatial_merge_size=1, image_grid_thw=[[1, 1, 2]], attention_mask=ids != 0, **IDS
    )
    assert positions[2].tolist() == [[0, 1, 1, 1, 2, 3]]
    assert deltas.tolist() == [[-2]]
