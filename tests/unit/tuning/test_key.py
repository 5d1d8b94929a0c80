"""Keys: no token count in them, and configurations as text and back."""

import math

import pytest

from anabranch.tuning import GroupedGemmConfig, Key, bucket
from anabranch.tuning.key import driver_version, slug
from anabranch.tuning.spec import from_json, from_text, to_text


@pytest.mark.parametrize(
    ("rows", "experts", "expected"),
    [
        (0, 8, 16),
        (1, 8, 16),
        (128, 8, 16),
        (129, 8, 32),
        (2048, 8, 256),
        (2049, 8, 512),
        (10**9, 8, 4096),
        (5, 0, 16),
    ],
)
def test_bucket(rows, experts, expected):
    assert bucket(rows, experts) == expected


def test_buckets_are_few():
    assert len({bucket(tokens * 8, 8) for tokens in range(1, 8193)}) == 9


def test_key_as_text():
    key = Key("grouped_gemm", "forward", "bfloat16", 1536, 2048, 128, 1024, ("gather", "keep_h"))
    assert str(key) == "grouped_gemm.forward bfloat16 N=1536 K=2048 E=128 rows<=1024 gather keep_h"


@pytest.mark.parametrize("flatten", [True, False])
def test_configuration_as_text(flatten):
    config = GroupedGemmConfig(128, 256, 64, 8, 3, 4, flatten)
    text = "block_m=128,block_n=256,block_k=64,num_warps=8,num_stages=3,group_m=4,flatten=" + str(
        int(flatten)
    )
    assert to_text(config) == text
    assert from_text(GroupedGemmConfig, text) == config
    assert from_json(GroupedGemmConfig, vars(config)) == config
    assert from_text(GroupedGemmConfig, text).flatten is flatten


@pytest.mark.parametrize(
    "value", [{}, {"block_m": 16}, {"colour": 3}, {"block_m": None}, {"block_m": math.inf}, 7]
)
def test_not_a_configuration(value):
    with pytest.raises(ValueError, match="not a GroupedGemmConfig"):
        from_json(GroupedGemmConfig, value)


def test_names_of_files():
    assert slug("NVIDIA H200 80GB/HBM3") == "nvidia_h200_80gb_hbm3"
    assert slug("../..") == "unknown"


def test_driver(tmp_path):
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12.2.0\n"
    )
    assert driver_version(str(path)) == "550.54.15"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert driver_version(str(path)) == "580.65.06"
