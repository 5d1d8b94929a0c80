"""What explain says of the Triton backends: load paths with the reason for each, and the padding of tiles.

Nothing is launched, so a GPU's capability is enough, and need not be real.
"""

import importlib.util

import pytest
import torch

from anabranch import ExpertLayout, dispatch, dual_gemm, explain, grouped_gemm, moe_mlp, multi_gemm
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
POINTERS = "pointers, as "
OLD = POINTERS + "the device has no tensor memory accelerator"
ODD = POINTERS + "stride 66 of dimension 0 is not a positive multiple of 16 bytes"


@pytest.fixture(params=[(9, 0)], ids=str)
def gpu(request, monkeypatch):
    """A GPU of a capability."""
    from anabranch._backends.triton import device

    monkeypatch.setattr(
        dispatch, "probe", lambda backend, device: "not here" if backend == "hopper" else None
    )
    monkeypatch.setattr(device, "capability", lambda device: request.param)
    return request.param


old = pytest.mark.parametrize("gpu", [(8, 0)], indirect=True, ids=str)


def product(**changed):
    """4 experts of 10, 0, 17 and 3 rows; two rows are nobody's."""
    layout = ExpertLayout.from_counts(torch.tensor([10, 0, 17, 3]), 32)
    given = dict(x=torch.zeros(32, 64), weight=torch.zeros(4, 64, 64), layout=layout, backend="triton")
    return {**given, **changed}


def test_a_product_of_aligned_tensors(gpu):
    found = explain(grouped_gemm, **product())
    assert found.backend == "triton"
    assert found.loads == {"x": "TMA", "weight": "TMA", "out": "TMA"}
    assert "  weight by TMA" in str(found).splitlines()


@old
def test_a_gpu_without_the_accelerator(gpu):
    assert set(explain(grouped_gemm, **product()).loads.values()) == {OLD}
    assert set(
        explain(multi_gemm, [torch.zeros(8, 64)], [torch.zeros(16, 64)], backend="triton").loads.values()
    ) == {OLD}


def test_each_operand_has_its_reason(gpu):
    layout = ExpertLayout.from_topk(torch.zeros(16, 2, dtype=torch.int64), 4)
    given = product(layout=layout, x=torch.zeros(16, 64), gather=True, scatter=True, activation="silu")
    found = explain(grouped_gemm, **{**given, "weight": torch.zeros(4, 64, 65)[..., 1:].requires_grad_()})
    assert found.loads == {
        "x": POINTERS + "its rows are gathered",
        "weight": POINTERS + "the base address is not a multiple of 16 bytes",
        "out": POINTERS + "its rows are scattered",
        "h": "TMA",
    }
    found = explain(grouped_gemm, **product(x=torch.zeros(32, 66)[:, :64], out=torch.zeros(32, 66)[:, :64]))
    assert found.loads == {"x": ODD, "weight": "TMA", "out": ODD}


def test_the_padding_of_the_tiles_that_would_run(gpu):
    tiles = GroupedGemmConfig(16, 32, 32, 4, 2)
    found = explain(grouped_gemm, **product(config=tiles))
    assert found.padding == pytest.approx(1 - 30 / 64)  # 16, 0, 32 and 16 rows for 10, 0, 17 and 3
    assert "  padding: 53.1% of the rows computed" in str(found).splitlines()
    empty = ExpertLayout.from_counts(torch.zeros(4, dtype=torch.int64), 32)
    assert explain(grouped_gemm, **product(layout=empty)).padding is None


@pytest.mark.parametrize(
    ("training", "save"), [(False, "activations"), (True, "activations"), (True, "inputs")]
)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_the_two_products_of_an_mlp(gpu, training, save, weight_on):
    ids = torch.tensor([[0, 1]] * 3 + [[0, 2]])  # 4, 3, 1 and 0 rows, in tiles of 16
    found = explain(
        moe_mlp, torch.zeros(4, 64), torch.zeros(4, 64, 64).requires_grad_(training), torch.zeros(4, 64, 32), ids,
        torch.zeros(4, 2), weight_on=weight_on, save=save, backend="triton",
    )  # fmt: skip
    gathered = POINTERS + "its rows are gathered" if weight_on == "output" else "TMA"
    h = {"h": "TMA"} if training and save == "activations" else {}
    assert found.loads == {"x": gathered, "gate_up": "TMA", **h, "a": "TMA", "down": "TMA"}
    assert found.padding == pytest.approx(1 - 8 / 48)


def test_products_of_different_widths(gpu):
    xs = [torch.zeros(5, 64), torch.zeros(0, 64), torch.zeros(33, 66)[:, :64]]
    weights = [torch.zeros(64, 32).T, torch.zeros(16, 64), torch.zeros(30, 64)]
    found = explain(multi_gemm, xs, weights, backend="triton")
    assert found.loads == {
        "xs[0]": "TMA",
        "weights[0]": "TMA",  # stored the other way round
        "out[0]": "TMA",
        "xs[2]": ODD,
        "weights[2]": "TMA",
        "out[2]": POINTERS + "stride 30 of dimension 0 is not a positive multiple of 16 bytes",
    }
    assert 0 < found.padding < 1
    found = explain(dual_gemm, xs[0], xs[0], weights[0], weights[0], backend="triton")
    assert list(found.loads)[-1] == "out[1]"


def test_nothing_is_searched_for(gpu, monkeypatch):
    from anabranch.tuning import key, lookup

    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "1")
    monkeypatch.setattr(key, "place", lambda device: key.Place("Imaginary", "sm_90", "3.6", "1"))
    monkeypatch.setattr(lookup, "search", lambda trial: pytest.fail("it searched"))
    assert explain(grouped_gemm, **product()).padding is not None
