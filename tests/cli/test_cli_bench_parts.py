"""The parts of the benchmark: problems, peers, times, limits and kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import anabranch
from anabranch.cli.bench import explain, peers, timing
from anabranch.cli.bench.check import check
from anabranch.cli.bench.explain import Kernel
from anabranch.cli.bench.limits import COPY, DENSE_FORWARD, DENSE_TRAINING, Limits, Sizes, ceilings
from anabranch.cli.bench.problem import Problem
from anabranch.cli.bench.timing import interleaved, medians
from anabranch.cli.bench.variants import Variant, ours
from anabranch.cli.peers import moe_loop
from anabranch.ops.moe_mlp.cases import Case

TINY = Case(24, 16, 8, 4, 2)
CPU = torch.device("cpu")


def problem(dtype=torch.float32, exponent=0.0, case=TINY):
    return Problem.make(case, dtype, CPU, exponent)


def test_reference_is_the_derivative_of_the_loop():
    made = problem(torch.float64)
    expected = made.view(Variant("loop", moe_loop)).results()
    for actual, right in zip(made.reference(torch.float64), expected, strict=True):
        torch.testing.assert_close(actual, right, check_dtype=False)


def test_routing_by_zipf_leaves_the_last_expert_empty():
    made = problem(exponent=1.2, case=Case(400, 8, 4, 6, 2))
    counts = made.ids.flatten().bincount(minlength=6)
    assert counts[5] == 0
    assert counts[0] > counts[3] > 0
    assert made.active == 5
    torch.testing.assert_close(made.weights.sum(-1), torch.ones(400))
    assert problem(exponent=1.2, case=Case(4, 8, 4, 2, 2)).active == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [0.0, 1.2])
def test_peers_without_a_compiler_are_right(dtype, exponent):
    found, absent = peers.load(["loop", "grouped_mm", "transformers"])
    assert not absent
    for name, result in check(problem(dtype, exponent), found).items():
        assert result.trains, f"{name}: {result.wrong or result.unable}"


def test_every_peer_has_its_name():
    for module, name in peers.PEERS.items():
        found, absent = peers.load([module])
        assert [variant.name for variant in found] + list(absent) == [name]


def test_sonicmoe_adapter(monkeypatch):
    """Its kernels replaced by plain torch that reads what they read."""

    class Up:
        @staticmethod
        def apply(
            x, w1, b1, offsets, slots, top_k, gather, scatter, back, per_token, varies, act, infer, concat
        ):
            assert (w1.stride(1), b1, per_token, varies, concat) == (1, None, None, False, False)
            h = torch.stack([x[t] @ w1[:, :, e].T for t, e in zip(gather[0], gather[1], strict=True)])
            return torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2], h

    class Down:
        @staticmethod
        def apply(
            a, h, w2, b2, scores, offsets, tokens, top_k, gather, scatter, back, per_token, varies, act
        ):
            y = torch.stack([a[r] @ w2[:, :, e].T for r, e in enumerate(gather[1])])
            return (y.view(tokens, top_k, -1) * scores[..., None]).sum(1)

    sonicmoe = importlib.import_module("anabranch.cli.bench.peers.sonicmoe")
    made = problem()
    slots = torch.arange(48) // 2, made.ids.flatten()

    class Empty:
        dtype = torch.int32

    functional = SimpleNamespace(
        TC_topk_router_metadata_triton=lambda ids, *rest: ids.dtype == torch.int32 or pytest.fail("ids"),
        _UpProjection=SimpleNamespace(apply=lambda *a: Up.apply(*a[:6], slots, *a[7:])),
        _DownProjection=SimpleNamespace(apply=lambda *a: Down.apply(*a[:8], slots, *a[9:])),
    )
    enums = SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu"))
    modules = {"sonicmoe.functional": functional, "sonicmoe.enums": enums}
    monkeypatch.setattr(sonicmoe.importlib, "import_module", modules.__getitem__)
    variant = sonicmoe.load()
    result = check(made, [variant])["SonicMoE"]
    assert result.trains, result.wrong or result.unable


def test_packed_weights_must_be_unpacked():
    sonicmoe = importlib.import_module("anabranch.cli.bench.peers.sonicmoe")
    made = problem()

    def interleaved_layer(x, gate_up, down, ids, weights):
        return ours(x, sonicmoe.separate(gate_up, down)[0], down, ids, weights)

    right = Variant("right", interleaved_layer, sonicmoe.interleave, sonicmoe.separate)
    wrong = Variant("wrong", interleaved_layer, sonicmoe.interleave)
    found = check(made, [right, wrong])
    assert found["right"].trains
    assert found["wrong"].wrong.startswith("gradient of gate_up: off by")


def test_medians_are_interleaved():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    times, failed = interleaved(runs, 3, CPU)
    assert set(medians(times)) == set("abc")
    assert not failed
    assert order[:18] == list("aabbccbbccaaccaabb")
    assert {order.count(name) for name in "abc"} == {12}


def test_a_run_that_fails_ends_alone():
    def fails():
        raise RuntimeError("no\nmore")

    times, failed = interleaved({"good": lambda: None, "bad": fails}, 3, CPU)
    assert list(times) == ["good"]
    assert failed == {"bad": "RuntimeError: no more"}


def test_slow_runs_sit_out(monkeypatch):
    costs = {"a": 1.0, "b": 1.1, "c": 0.9, "slow": 20.0}
    monkeypatch.setattr(timing._Turn, "__call__", lambda turn, run: run())
    times, _ = interleaved({name: lambda cost=cost: cost for name, cost in costs.items()}, 9, CPU)
    assert {name: len(found) for name, found in times.items()} == {"a": 9, "b": 9, "c": 9, "slow": 5}
    assert medians(times)["slow"] == 20.0


def test_time_that_is_over_leaves_three_rounds():
    times, _ = interleaved({"a": lambda: None}, 50, CPU, seconds=-1.0)
    assert len(times["a"]) == 3


def test_saved_bytes_leaves_out_the_inputs():
    def saved(run):
        return problem().view(Variant("v", lambda x, *rest: run(x))).saved_bytes()

    assert saved(lambda x: x * 2) == 0
    assert saved(lambda x: x * x) == 0
    assert saved(lambda x: x.exp()) == 24 * 16 * 4


def test_limits_are_of_products_or_of_bytes():
    sizes = Sizes(T=10, H=4, I=3, E=5, active=2, R=20, bytes=2)
    assert sizes.flops == 6 * 20 * 4 * 3
    assert sizes.forward_bytes == 2 * (2 * 36 + 80)
    assert sizes.training_bytes == sizes.forward_bytes + 2 * (7 * 36 + 120 + 4 * 60)
    times = {COPY: 2.0, DENSE_FORWARD: 1.0, DENSE_TRAINING: 100.0}
    limits = Limits.of(sizes, times, copied=50)
    assert limits.copy_bandwidth == 50
    assert limits.forward == sizes.forward_bytes / 50 > 1.0
    assert limits.training == 100.0


def test_ceilings_are_products_of_the_same_sizes():
    made = problem()
    assert Sizes.of(made) == Sizes(24, 16, 8, 4, made.active, 48, 4)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as forward:
        runs, copied = ceilings(made)
        runs[DENSE_FORWARD]()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as training:
        runs[DENSE_TRAINING]()
    assert forward.get_total_flops() == Sizes.of(made).flops
    assert training.get_total_flops() == 3 * Sizes.of(made).flops
    assert copied == 2**26


SIZES = Sizes(T=100, H=64, I=32, E=8, active=8, R=200, bytes=2)
DENSE = {"up": 4.0, "down": 2.0, "d_a": 2.0, "d_down": 2.0, "d_x": 4.0, "d_gate_up": 4.0}
"""Seconds."""


def lines(phase, *kernels):
    made = [Kernel(*kernel) for kernel in kernels]
    return explain.attribute(phase, made, SIZES, DENSE, bandwidth=1e4)


def test_forward_is_explained():
    found = lines(
        "forward", ("_count_kernel", 1.0), ("_scan_kernel", 0.5), ("_place_kernel", 0.5), ("mystery", 3.0),
        ("forward_kernel", 8.0), ("forward_kernel", 5.0), ("_combine_kernel", 9.0),
    )  # fmt: skip
    assert [line.what for line in found] == ["routing", None, "up and gate", "down", "rows combined"]
    routing, mystery, up, down, combined = found
    assert routing.seconds == 2.0
    assert len(routing.kernels) == 3
    assert mystery.limit_seconds is mystery.bound is None
    assert up.limit_seconds == max(4.0, 2 * (100 * 64 + 8 * 2 * 32 * 64 + 200 * 32) / 1e4)
    assert down.bound == "bytes"
    assert combined.limit_seconds == 2 * 300 * 64 / 1e4


def test_training_forward_also_writes_h():
    kernels = [("product_kernel", 8.0), ("product_kernel", 5.0)]
    inference, training = lines("forward", *kernels), lines("forward, training", *kernels)
    assert training[0].limit_seconds - inference[0].limit_seconds == pytest.approx(2 * 200 * 64 / 1e4)
    assert training[1].limit_seconds == inference[1].limit_seconds


def test_backward_is_explained():
    found = lines(
        "backward", ("_gather_kernel", 1.0), ("forward_kernel", 3.0), ("pre_activation_gradient_kernel", 1.0),
        ("forward_kernel", 5.0), ("weight_gradient_kernel", 9.0), ("weight_gradient_kernel", 4.0),
    )  # fmt: skip
    assert [line.what for line in found] == [
        "rows gathered", "gradient of a", "gradient of h, a again", "gradient of the rows of x",
        "gradient of gate_up", "gradient of down",
    ]  # fmt: skip


def test_what_is_not_known_is_said():
    found = lines("forward", ("product_kernel", 1.0), ("product_kernel", 1.0), ("product_kernel", 1.0))
    assert [line.what for line in found] == [None] * 3
    assert [line.what for line in lines("backward", ("weight_gradient_kernel", 1.0))] == [None]
    (listed,) = lines("forward", ("_schedule_kernel", 1.0))
    assert (listed.what, listed.limit_seconds) == ("tiles listed", None)


def test_names_of_kernels_are_those_that_there_are():
    """A kernel that was renamed would no longer be explained."""
    source = "".join(path.read_text() for path in Path(anabranch.__file__).parent.rglob("backends/**/*.py"))
    source += "".join(path.read_text() for path in Path(anabranch.__file__).parent.rglob("_backends/**/*.py"))
    for name in (
        *explain.PRODUCTS,
        *explain.ROUTING,
        *explain.OTHERS,
        *explain.NAMED,
        explain.WEIGHT_GRADIENT,
    ):
        assert f"def {name}(" in source, name


def test_kernels_of_several_steps_are_folded():
    steps = [
        Kernel("a", 1.0),
        Kernel("b", 5.0),
        Kernel("a", 3.0),
        Kernel("b", 7.0),
        Kernel("a", 2.0),
        Kernel("b", 6.0),
    ]
    assert explain.fold(steps, 3) == [Kernel("a", 2.0), Kernel("b", 6.0)]
    odd = [Kernel("a", 1.0), Kernel("b", 5.0), Kernel("a", 3.0)]
    assert explain.fold(odd, 2) == [Kernel("a (all of a step)", 2.0), Kernel("b (all of a step)", 2.5)]
