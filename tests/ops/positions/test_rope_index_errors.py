"""What rope_index refuses, word for word."""

import re

import numpy as np
import pytest
import torch

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.ops.positions.api import rope_index

PROMPT = torch.tensor([[0, 9, 1, 2, 2, 4], [1, 3, 3, 4, 9, 9]])
GOOD = dict(
    input_ids=PROMPT,
    spatial_merge_size=2,
    image_token_id=2,
    video_token_id=3,
    vision_start_token_id=1,
    tokens_per_second=2,
    image_grid_thw=[[1, 2, 4]],
    video_grid_thw=[[2, 2, 2]],
    second_per_grid_ts=[0.5],
    attention_mask=(PROMPT != 0).long(),
)
TEXT_ONLY = dict(image_grid_thw=None, video_grid_thw=None, second_per_grid_ts=None)


def ids(*rows: list[int]) -> dict:
    value = torch.tensor(rows)
    return {"input_ids": value, "attention_mask": torch.ones_like(value)}


def images(grids: object) -> dict:
    return {"image_grid_thw": grids}


def pace(seconds: object) -> dict:
    return {"second_per_grid_ts": seconds}


def refuses(error: type[Exception], change: dict, message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape('rope_index: ' + message)}$"):
        rope_index(**{**GOOD, **change})


def test_good() -> None:
    rope_index(**GOOD)


@pytest.mark.parametrize(
    ("change", "run"),
    [
        (ids([9, 2, 2, 4], [1, 3, 3, 4]), "image tokens without it at row 0, column 1"),
        (ids([2, 2, 4, 9], [1, 3, 3, 4]), "image tokens without it at row 0, column 0"),
        (ids([1, 2, 2, 1], [3, 3, 4, 9]), "video tokens without it at row 1, column 0"),
        (ids([2, 2, 4, 9], [9, 9, 9, 1]), "image tokens without it at row 0, column 0"),
        (
            {**TEXT_ONLY, **images([[1, 2, 4]]), **ids([2, 2, 9, 1])},
            "image tokens without it at row 0, column 0",
        ),
        (ids([1, 2, 2, 3, 3, 4]), "video tokens without it at row 0, column 3"),
        ({"input_ids": PROMPT.masked_fill(PROMPT == 1, 9)}, "image tokens without it at row 0, column 3"),
    ],
)
def test_run_without_its_start(change: dict, run: str) -> None:
    expected = "vision_start_token_id = 1 before each run of placeholders"
    refuses(ArgumentError, change, f"input_ids: expected {expected}, got a run of {run}")


@pytest.mark.parametrize(
    ("change", "run", "grid", "got"),
    [
        (images([[1, 4, 4]]), "4 image tokens at row 0, column 3", "1 x 2 x 2", 2),
        (images([[1, 2, 2]]), "1 image tokens at row 0, column 3", "1 x 1 x 1", 2),
        ({"video_grid_thw": [[3, 2, 2]]}, "3 video tokens at row 1, column 1", "3 x 1 x 1", 2),
    ],
)
def test_run_of_another_length(change: dict, run: str, grid: str, got: int) -> None:
    refuses(ArgumentError, change, f"input_ids: expected {run}, as merged grid {grid} says, got {got}")


@pytest.mark.parametrize(
    ("change", "kind", "runs", "grids"),
    [
        (images(None), "image", 1, 0),
        (images([[1, 2, 4], [1, 2, 2]]), "image", 1, 2),
        ({"video_grid_thw": None, **pace(None)}, "video", 1, 0),
        (ids([9, 9]), "image", 0, 1),
        ({"attention_mask": torch.zeros_like(PROMPT)}, "image", 0, 1),
        ({"input_ids": PROMPT[:0], "attention_mask": PROMPT[:0]}, "image", 0, 1),
    ],
)
def test_another_number_of_runs(change: dict, kind: str, runs: int, grids: int) -> None:
    expected = f"one grid for each of the {runs} runs of {kind} tokens in input_ids"
    refuses(ArgumentError, change, f"{kind}_grid_thw: expected {expected}, got {grids} grids")


@pytest.mark.parametrize("grid", [[1, 3, 4], [1, 2, 5], [0, 2, 4], [1, -2, 4], [2, 2], []])
def test_grid_sizes(grid: list[int]) -> None:
    expected = "[t, h, w] of at least 1, h and w multiples of spatial_merge_size = 2"
    refuses(ArgumentError, images([grid]), f"image_grid_thw: expected {expected}, got {grid}")
    if len(grid) == 3:
        refuses(
            ArgumentError, images(torch.tensor([grid])), f"image_grid_thw: expected {expected}, got {grid}"
        )


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf"), 2.0**53])
@pytest.mark.parametrize("tensor", [False, True])
def test_seconds(bad: float, tensor: bool) -> None:
    expected = "finite seconds of at least 0, with ticks that count exactly"
    value = torch.tensor([bad]) if tensor else [bad]
    refuses(ArgumentError, pace(value), f"second_per_grid_ts: expected {expected}, got [{bad}]")


VALUES = [
    (pace([0.5, 0.5]), "second_per_grid_ts: expected one value for each of the 1 videos, got 2 values"),
    (pace(torch.zeros(0)), "second_per_grid_ts: expected one value for each of the 1 videos, got 0 values"),
    (pace(torch.tensor(0.5)), "second_per_grid_ts: expected shape (videos,), got shape ()"),
    (images(torch.ones(1, 2).int()), "image_grid_thw: expected shape (N, 3), got shape (1, 2)"),
    (images(torch.tensor([1, 2, 4])), "image_grid_thw: expected shape (N, 3), got shape (3,)"),
    (
        {"attention_mask": torch.ones(2, 5, dtype=torch.int64)},
        "attention_mask: expected shape of input_ids = (2, 6), got shape (2, 5)",
    ),
    ({"attention_mask": 2 * PROMPT}, "attention_mask: expected 0 and 1 alone, got values from 0 to 18"),
    (
        {**TEXT_ONLY, "attention_mask": -PROMPT},
        "attention_mask: expected 0 and 1 alone, got values from -9 to 0",
    ),
    (
        {"attention_mask": torch.ones(2, 6, dtype=torch.bool, device="meta")},
        "attention_mask: expected input_ids's device cpu, got meta",
    ),
    ({"input_ids": PROMPT[0]}, "input_ids: expected shape (B, S), got shape (6,)"),
    ({"spatial_merge_size": 0}, "spatial_merge_size: expected at least 1, got 0"),
    (
        {"video_token_id": 2},
        "image_token_id: expected an id apart from video_token_id and vision_start_token_id, which differ "
        "too, got 2, 2, 1",
    ),
    ({"tokens_per_second": 0}, "tokens_per_second: expected above 0 and finite, got 0"),
    ({"tokens_per_second": float("nan")}, "tokens_per_second: expected above 0 and finite, got nan"),
]
LISTS = "image_grid_thw: expected a tensor (N, 3) or a list of [t, h, w], got"
NUMBERS = "second_per_grid_ts: expected a tensor (videos,) or a list of numbers, got"
TYPES = [
    ({"input_ids": [[1, 2]]}, "input_ids: expected a tensor (B, S), got list"),
    ({"input_ids": PROMPT.float()}, "input_ids: expected dtype int32 or int64, got float32"),
    (
        {"attention_mask": PROMPT.float()},
        "attention_mask: expected dtype bool or int32 or int64, got float32",
    ),
    (images(torch.ones(1, 3)), "image_grid_thw: expected dtype int32 or int64, got float32"),
    (images(np.ones((1, 3))), f"{LISTS} ndarray"),
    (images([1, 2, 4]), f"{LISTS} an entry 1"),
    (images([[1, 2.0, 4]]), f"{LISTS} an entry [1, 2.0, 4]"),
    (images([[True, 2, 4]]), f"{LISTS} an entry [True, 2, 4]"),
    (pace(0.5), f"{NUMBERS} float"),
    (pace(["1"]), f"{NUMBERS} an entry '1'"),
    ({"spatial_merge_size": 2.0}, "spatial_merge_size: expected an int, got float"),
    ({"image_token_id": None}, "image_token_id: expected an int, got NoneType"),
    ({"vision_start_token_id": True}, "vision_start_token_id: expected an int, got bool"),
    ({"tokens_per_second": "2"}, "tokens_per_second: expected an int or a float, got str"),
]


@pytest.mark.parametrize(("change", "message"), VALUES)
def test_values(change: dict, message: str) -> None:
    refuses(ArgumentError, change, message)


@pytest.mark.parametrize(("change", "message"), TYPES)
def test_types(change: dict, message: str) -> None:
    refuses(ArgumentTypeError, change, message)


@pytest.mark.parametrize("seconds", [torch.tensor([40000.0], dtype=torch.float16), torch.tensor([2**62])])
def test_ticks_that_overflow_their_dtype(seconds: torch.Tensor) -> None:
    """Twice as much is infinite in half precision, and negative in int64."""
    with pytest.raises(ArgumentError, match="ticks that count exactly"):
        rope_index(**{**GOOD, **pace(seconds)})


@pytest.mark.parametrize("argument", ["input_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"])
def test_nothing_to_read_on_the_meta_device(argument: str) -> None:
    change = {argument: torch.as_tensor(GOOD[argument]).to("meta")}
    if argument == "input_ids":
        change["attention_mask"] = None
    refuses(
        ArgumentError, change, f"{argument}: expected values to read on the host, got a tensor on device meta"
    )
