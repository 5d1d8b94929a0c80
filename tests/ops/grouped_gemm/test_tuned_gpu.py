"""A real search, on a real GPU: stored, taken up, right, and out of the way of graphs."""

import json

import pytest
import torch

import anabranch
from anabranch.testing import assert_within_budget, in_any_order, randn, routing
from anabranch.tuning import GroupedGemmConfig, lookup
from anabranch.tuning.cache import Cache, folder
from anabranch.tuning.key import place
from anabranch.tuning.timing import medians

pytestmark = pytest.mark.gpu
T, E, K, H, WIDTH = 512, 4, 2, 128, 256


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Searches among four candidates, with a cache of its own."""
    from anabranch.ops.grouped_gemm import config

    found = config.search_space
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "1")
    monkeypatch.setattr(lookup, "_cache", Cache())
    monkeypatch.setattr(config, "search_space", lambda *args, **options: found(*args, **options)[::25])
    return lambda: json.loads((folder() / place(torch.device("cuda", 0)).file).read_text())["results"]


def arguments(dtype=torch.bfloat16, size=1.0):
    ids = routing(T, E, K, "zipf", dropped=0.1)
    return {
        "x": randn(T, H, dtype=dtype, scale=size, device="cuda:0"),
        "weight": randn(E, WIDTH, H, dtype=dtype, scale=H**-0.5, device="cuda:0"),
        "layout": anabranch.ExpertLayout.from_topk(ids.cuda(), E),
        "gather": True,
        "activation": "swiglu",
        "backend": "triton",
    }


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_step_is_tuned_and_right(tuned, dtype, size):
    given = arguments(dtype, size)
    leaves = {name: given[name].detach().requires_grad_() for name in ("x", "weight")}
    out = anabranch.grouped_gemm(**{**given, **leaves})
    # Large numbers times small ones: fp16 gradients that overflow cannot be checked, so nothing would be stored.
    out.backward(torch.full_like(out, 1 / size))
    results = tuned()
    assert [text.split()[0] for text in results] == [
        "grouped_gemm.forward",
        "grouped_gemm.forward_gated",
        "grouped_gemm.weight_gradient",
    ]
    assert all(entry["microseconds"] <= entry["heuristic_microseconds"] for entry in results.values())
    wide = {**given, "x": given["x"].double(), "weight": given["weight"].double(), "backend": "reference"}
    baseline = anabranch.grouped_gemm(**{**given, "backend": "eager"})
    truth = anabranch.grouped_gemm(**wide)
    assert_within_budget(out.detach(), truth, in_any_order(baseline, truth, H))


def test_a_graph_is_captured_without_a_search(tuned):
    given = arguments()
    anabranch.grouped_gemm(**given, config="heuristic")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = anabranch.grouped_gemm(**given)
    assert not (folder() / place(torch.device("cuda", 0)).file).exists()
    graph.replay()
    torch.testing.assert_close(captured, anabranch.grouped_gemm(**given, config="heuristic"), rtol=0, atol=0)


def test_tiles_by_argument(tuned):
    given = arguments()
    wide = {**given, "x": given["x"].double(), "weight": given["weight"].double(), "backend": "reference"}
    truth, baseline = anabranch.grouped_gemm(**wide), anabranch.grouped_gemm(**{**given, "backend": "eager"})
    actual = anabranch.grouped_gemm(**given, config=GroupedGemmConfig(64, 128, 64, 4, 3))
    assert_within_budget(actual, truth, baseline)
    with pytest.raises(anabranch.UnsupportedError, match="shared memory"):
        anabranch.grouped_gemm(**given, config=GroupedGemmConfig(256, 256, 256, 8, 4))


def test_time_is_the_devices(tuned):
    """Ten times the work takes about ten times as long, however long launching takes."""
    x = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def product(times):
        for _ in range(times):
            x @ x

    found = medians({1: lambda: product(1), 10: lambda: product(10)}, 7, torch.device("cuda", 0))
    assert 6 < found[10] / found[1] < 14
