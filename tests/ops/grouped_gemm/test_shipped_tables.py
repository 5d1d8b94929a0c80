"""The tables of tiles that come with the package hold what their readers can read, and nothing that would not run."""

import json

import pytest
import torch

from anabranch.ops.grouped_gemm import config as tiles
from anabranch.tuning.cache import parse
from anabranch.tuning.tables import FOLDER, shipped

pytest.importorskip("triton")
TABLES = sorted(FOLDER.glob("*/*.json"))
LIMIT = 232_448  # bytes of shared memory that a program of an H100 or H200 may have


def results():
    return [(path, key, entry) for path in TABLES for key, entry in parse(path.read_text()).items()]


def test_there_are_some_for_the_gpu_that_was_measured():
    assert (FOLDER / "nvidia_h200" / "grouped_gemm.json") in TABLES
    assert results()


@pytest.mark.parametrize(
    ("path", "key", "entry"), results(), ids=lambda value: value if type(value) is str else ""
)
def test_every_configuration_could_run(path, key, entry):
    from anabranch.ops.grouped_gemm.backends.hopper import config as hopper
    from anabranch.ops.moe_mlp.backends.hopper import tuned as gate

    name, dtype, *traits = key.split()
    op, kind = name.split(".")
    assert f"{op}.json" == path.name
    assert entry["microseconds"] < entry["heuristic_microseconds"]
    if not kind.startswith("hopper"):
        dtype = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        assert tiles.legal(tiles.Config(**entry["config"]), dtype, LIMIT, kind, (9, 0)) is None
        return
    config = hopper.Config(**entry["config"])
    needed = hopper.shared_memory(config)
    if kind == hopper.GATE_GRADIENT:
        needed = gate.shared_memory(config, 2 if "gated" in traits else 1)
    assert hopper.legal(config, needed, LIMIT) is None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_says_where_it_was_measured(path):
    table = json.loads(path.read_text())
    if table["results"]:
        assert {"device", "capability", "triton", "driver", "date", "commit"} <= set(table["measured"])


def test_a_table_is_for_its_gpu_alone():
    from anabranch.tuning.key import Place

    here = Place("NVIDIA H200", "sm_90", "3.6.0", "1")
    assert shipped("grouped_gemm", here)
    assert not shipped("grouped_gemm", Place("NVIDIA H100 80GB HBM3", "sm_90", "3.6.0", "1"))
