"""Tiles of grouped_gemm: what is legal, and that every choice is, wherever it is made."""

import itertools
from dataclasses import replace

import pytest
import torch

from anabranch.epilogues import Gelu, Identity, ReluSquared, Swiglu
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig

KIB = 1024
LIMITS = (64 * KIB, 99 * KIB, 163 * KIB, 227 * KIB)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITIES = ((0, 0), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
FORWARD_KINDS = (tiles.FORWARD, tiles.GATED, tiles.INTERLEAVED)
KINDS = (*FORWARD_KINDS, tiles.WEIGHT_GRADIENT)
LOADS = (tiles.ELEMENTWISE, tiles.COPIED, tiles.TMA)
BEST = GroupedGemmConfig(128, 256, 64, 8, 3)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_something_is_legal_under_every_limit(kind, dtype, limit):
    for capability, precision in itertools.product(CAPABILITIES, ("ieee", "tf32")):
        space = tiles.search_space(dtype, limit, kind, capability=capability, precision=precision)
        assert space
        assert len(set(space)) == len(space) <= 250
        for config in space:
            assert tiles.legal(config, dtype, limit, kind, capability) is None


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_what_is_chosen_is_legal(capability, limit):
    rows = (0, 1, 16, 17, 48, 96, 97, 1e6)
    for n, dtype, precision, loads in itertools.product(rows, DTYPES, ("ieee", "tf32"), LOADS):
        how = dict(capability=capability, precision=precision, loads=loads)
        config = tiles.heuristic_weight_gradient(n, dtype, limit, **how)
        assert tiles.legal(config, dtype, limit, tiles.WEIGHT_GRADIENT, capability) is None
        for kind, pointers in itertools.product(FORWARD_KINDS, (0, 1, 2)):
            for epilogue in (Identity(), Gelu()) if kind == tiles.FORWARD else (Swiglu(),):
                config = tiles.heuristic(n, dtype, limit, kind, epilogue=epilogue, pointers=pointers, **how)
                assert tiles.legal(config, dtype, limit, kind, capability) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_hopper_gets_the_measured_tiles(dtype):
    limit = 232_448
    assert tiles.heuristic(1024, dtype, limit) == BEST
    assert tiles.heuristic(1024, dtype, limit, tiles.GATED, epilogue=Swiglu(), pointers=1) == BEST
    assert tiles.heuristic(1024, dtype, limit, epilogue=ReluSquared(), pointers=1) == BEST
    assert tiles.heuristic_weight_gradient(1024, dtype, limit) == GroupedGemmConfig(64, 128, 256, 8, 3)
    interleaved = tiles.heuristic(1024, dtype, limit, tiles.INTERLEAVED, epilogue=Swiglu(), pointers=1)
    assert interleaved == replace(BEST, flatten=True)


def test_few_rows_get_flat_tiles():
    def heights(kind, *rows):
        return [tiles.heuristic(n, torch.bfloat16, 232_448, kind).block_m for n in rows]

    assert heights(tiles.FORWARD, 0.5, 12, 13, 56, 57) == [16, 16, 64, 64, 128]
    assert heights(tiles.GATED, 0.5, 16, 17, 28, 29, 56, 57) == [16, 16, 32, 32, 64, 64, 128]


@pytest.mark.parametrize(
    ("config", "kind", "least"),
    [
        # Operands in flight, and results on their way out: what the compiler was seen to take.
        (BEST, tiles.FORWARD, 180_248),
        (replace(BEST, num_stages=4), tiles.FORWARD, 229_408),
        (GroupedGemmConfig(64, 128, 256, 8, 3), tiles.WEIGHT_GRADIENT, 213_016),
        (GroupedGemmConfig(64, 128, 256, 8, 4), tiles.WEIGHT_GRADIENT, 262_176),
        (replace(BEST, flatten=True), tiles.INTERLEAVED, 213_016),
        (GroupedGemmConfig(128, 128, 64, 8, 4), tiles.INTERLEAVED, 180_272),
        (GroupedGemmConfig(128, 128, 64, 8, 4), tiles.GATED, 147_552),
    ],
)
def test_shared_memory_is_bounded_closely(config, kind, least):
    bound = tiles.shared_memory(config, torch.bfloat16, kind)
    assert least <= bound <= least + 4096


def test_before_hopper_results_need_no_memory_of_their_own():
    config = GroupedGemmConfig(128, 128, 64, 8, 3)
    assert 65_536 <= tiles.shared_memory(config, torch.bfloat16, capability=(8, 6)) <= 65_536 + 4096
    assert tiles.legal(config, torch.bfloat16, 101_376, capability=(8, 6)) is None
    assert tiles.legal(config, torch.bfloat16, 101_376, capability=(12, 0)) is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(block_m=48), "block_m = 48 is not a power of two of at least 16"),
        (dict(block_n=8), "block_n = 8 is not a power of two of at least 16"),
        (dict(block_k=0), "block_k = 0 is not a power of two of at least 16"),
        (dict(num_warps=3), "num_warps = 3 is not a power of two up to 16"),
        (dict(num_stages=0), "num_stages = 0 is below 1"),
        (dict(group_m=0), "group_m = 0 is below 1"),
        (dict(group_m=4097), "group_m = 4097 is above 4096"),
        (dict(num_stages=5), "it needs 281248 bytes of shared memory, the device has 232448"),
        (dict(num_warps=4), "its accumulator needs 256 registers a thread of 4 warps, more than 128"),
        (
            dict(num_warps=16, block_n=512, num_stages=1),
            "its accumulator needs 128 registers a thread of 16 warps",
        ),
    ],
)
def test_what_is_illegal(change, reason):
    assert tiles.legal(replace(BEST, **change), torch.bfloat16, 232_448).startswith(reason)


def test_the_gradients_accumulator_is_block_n_by_block_k():
    config = GroupedGemmConfig(16, 256, 256, 8, 1)
    assert tiles.legal(config, torch.bfloat16, 232_448, tiles.FORWARD) is None
    reason = tiles.legal(config, torch.bfloat16, 232_448, tiles.WEIGHT_GRADIENT)
    assert reason == "its accumulator needs 256 registers a thread of 8 warps, more than 128"


@pytest.mark.parametrize("kind", KINDS)
def test_shrinking_keeps_what_fits(kind):
    for limit in LIMITS:
        small = tiles.shrink(BEST, torch.bfloat16, limit, kind)
        assert tiles.shared_memory(small, torch.bfloat16, kind) <= limit
    assert tiles.shrink(BEST, torch.bfloat16, 10**6, kind) == BEST
