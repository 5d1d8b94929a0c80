"""The builders against transformers 5.x, where its code still is what was published, and where ours ends."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.positions.api import rope_index, vision_rotary, window_index
from anabranch.ops.positions.cases import CASES, IMAGE, START, VIDEO, Case, Vision

pytest.importorskip("transformers", minversion="5.0")

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

VL = {
    "qwen2_vl": qwen2.Qwen2VLModel,
    "qwen2_5_vl": qwen2_5.Qwen2_5_VLModel,
    "qwen3_vl": qwen3.Qwen3VLModel,
}


def host_vl(model: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """get_rope_index of a vision-language model, without the model."""
    vision = SimpleNamespace(
        spatial_merge_size=arguments["spatial_merge_size"], tokens_per_second=arguments["tokens_per_second"]
    )
    self = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=partial(VL[model].get_vision_position_ids, None),
    )
    ids = arguments["input_ids"]
    wanted = ["input_ids", "image_grid_thw", "video_grid_thw", "attention_mask"]
    if model == "qwen2_5_vl":
        wanted.append("second_per_grid_ts")
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return VL[model].get_rope_index(
        self, mm_token_type_ids=kinds, **{name: arguments[name] for name in wanted}
    )


def host_omni(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """get_rope_index of Qwen2.5-Omni: the first rule for what follows a video, and 1 at padded places."""
    config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=-1,
        vision_start_token_id=START,
        audio_start_token_id=-2,
        position_id_per_seconds=arguments["tokens_per_second"],
        seconds_per_chunk=2,
    )
    cls = omni.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    self = SimpleNamespace(
        config=config,
        spatial_merge_size=arguments["spatial_merge_size"],
        get_llm_pos_ids_for_vision=partial(cls.get_llm_pos_ids_for_vision, None),
    )
    return cls.get_rope_index(
        self,
        arguments["input_ids"],
        arguments["image_grid_thw"],
        arguments["video_grid_thw"],
        arguments["attention_mask"],
        second_per_grids=arguments["second_per_grid_ts"],
    )


def compare(arguments: dict[str, Any], theirs: tuple[torch.Tensor, torch.Tensor], padded: int) -> None:
    positions, deltas = rope_index(**arguments)
    keep = arguments["attention_mask"] == 1
    assert positions[:, keep].tolist() == theirs[0][:, keep].tolist()
    assert (positions[:, ~keep] == 1).all()
    assert (theirs[0][:, ~keep] == padded).all()
    # They count from the unpadded length of the row, we from its whole length.
    assert deltas.flatten().tolist() == (theirs[1].flatten() + keep.sum(1) - keep.shape[1]).tolist()


def as_vl(case: Case, model: str) -> Case:
    """Slows videos down where their ticks would outgrow the frame, the case that 5.x gets differently."""

    def fit(part: int | Vision) -> int | Vision:
        if isinstance(part, int) or part.seconds is None:
            return part
        t, h, w = part.grid
        if model == "qwen3_vl":
            return replace(part, grid=(1, h, w))
        room = max(h, w) // case.merge - 1
        if model == "qwen2_vl":
            return Vision((min(t, room + 1), h, w), seconds=1.0)
        reach = (t - 1) * part.seconds * 2
        return part if reach < room + 0.9 else replace(part, seconds=0.0)

    rows = tuple(tuple(fit(part) for part in row) for row in case.rows)
    return replace(case, rows=rows, tokens_per_second=2 if model == "qwen2_5_vl" else 1.0)


sizes = st.integers(1, 4)
visions = st.builds(
    lambda t, h, w, pace: Vision((1 if pace is None else t, 2 * h, 2 * w), pace),
    *(sizes, sizes, sizes),
    st.none() | st.sampled_from([0.3, 0.5, 1.0, 1.7]),
)
rows = st.lists(st.integers(0, 4) | visions, min_size=1, max_size=5).map(lambda parts: (1, *parts))
cases = st.builds(
    lambda rows, speed, left, extra: Case("drawn", tuple(rows), 2, speed, left, extra),
    st.lists(rows, min_size=1, max_size=3),
    st.sampled_from([1, 2, 25]),
    st.booleans(),
    st.integers(0, 2),
).filter(lambda case: any(isinstance(part, Vision) for row in case.rows for part in row))


@pytest.mark.parametrize("model", VL)
@settings(deadline=None, max_examples=60)
@given(case=cases)
def test_any_prompt_where_videos_are_short(model: str, case: Case) -> None:
    arguments = as_vl(case, model).arguments()
    compare(arguments, host_vl(model, arguments), padded=0)


@settings(deadline=None, max_examples=100)
@given(case=cases)
def test_any_prompt(case: Case) -> None:
    arguments = case.arguments()
    compare(arguments, host_omni(arguments), padded=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_prompts(case: Case) -> None:
    arguments = case.arguments()
    compare(arguments, host_omni(arguments), padded=1)
    if case.name != "qwen2_5_vl_slow_clip":
        compare(arguments, host_vl("qwen2_5_vl", arguments), padded=0)


def test_qwen3_vl_takes_a_grid_a_frame() -> None:
    """Its model repeats the grid of a video itself; here the caller does."""
    arguments = next(case for case in CASES if case.name == "qwen3_vl_clip").arguments()
    whole = arguments["video_grid_thw"][:1].clone()
    whole[0, 0] = len(arguments["video_grid_thw"])
    compare(arguments, host_vl("qwen3_vl", {**arguments, "video_grid_thw": whole}), padded=0)


grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(grids=grids, merge=st.sampled_from([1, 2, 3]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_vision_rotary(grids: list[tuple[int, int, int]], merge: int, dtype: torch.dtype) -> None:
    grid = torch.tensor([[t, h * merge, w * merge] for t, h, w in grids])
    inv_freq = (1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)).to(dtype)
    places = get_vision_position_ids(grid, merge)
    expected = torch.outer(torch.arange(20, dtype=dtype), inv_freq)[places].flatten(1)
    assert torch.equal(vision_rotary(inv_freq, grid, merge), expected)


def test_vision_rotary_in_the_model() -> None:
    """The model takes cos and sin of each half itself; the angles behind them are ours."""
    config = qwen2_5.Qwen2_5_VLVisionConfig(hidden_size=64, num_heads=4)
    module = qwen2_5.Qwen2_5_VLVisionRotaryEmbedding(config)
    grid = torch.tensor([[1, 8, 12], [2, 4, 6]])
    cos, sin = module(torch.empty(0), get_vision_position_ids(grid, 2))
    angles = vision_rotary(module.inv_freq, grid, 2)
    assert cos.shape == (144, 16)
    assert torch.equal(cos, torch.cat([angles, angles], 1).cos())
    assert torch.equal(sin, torch.cat([angles, angles], 1).sin())


@settings(deadline=None, max_examples=100)
@given(
    grids=grids, merge=st.sampled_from([1, 2, 3]), window=st.integers(1, 4), patch=st.sampled_from([1, 14])
)
def test_window_index(grids: list[tuple[int, int, int]], merge: int, window: int, patch: int) -> None:
    grid = torch.tensor([[t, h * merge, w * merge] for t, h, w in grids])
    size = window * merge * patch
    theirs = get_vision_window_index(grid, merge, size, patch)
    for mine, their in zip(window_index(grid, size, merge, patch), theirs, strict=True):
        assert mine.dtype == their.dtype
        assert torch.equal(mine, their)
