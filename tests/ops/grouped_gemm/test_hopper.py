"""What the hopper backend of grouped_gemm serves, as far as that shows without the GPU it is for."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from anabranch import ExpertLayout, dispatch, explain, grouped_gemm
from anabranch._backends.hopper import release, serves
from anabranch._backends.triton import device
from anabranch.ops.grouped_gemm.backends import hopper
from anabranch.ops.grouped_gemm.call import bind_grouped_gemm
from anabranch.ops.grouped_gemm.config import GroupedGemmConfig, GroupedGemmConfigs

pytestmark = pytest.mark.cpu

T, H, N, E, K = 256, 64, 48, 4, 2
COPIES = "asynchronous copies, as its rows are gathered"
TILES = "it has no tiles to configure"


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(device, "capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "probe", lambda backend, _: None)
    release.refusal.cache_clear()
    yield
    release.refusal.cache_clear()


def given(dtype=torch.bfloat16, tokens=T, hidden=H, columns=N, experts=E, backend="hopper", **options):
    swap, gather = options.get("transpose_weight", False), options.get("gather", False)
    shape = (experts, hidden, columns) if swap else (experts, columns, hidden)
    return {
        "x": torch.zeros(tokens if gather else tokens * K, hidden, dtype=dtype),
        "weight": torch.zeros(shape, dtype=dtype),
        "layout": ExpertLayout.from_topk(torch.arange(tokens * K).view(tokens, K) % experts, experts),
        "backend": backend,
        **options,
    }


def bind(**options):
    return bind_grouped_gemm(**given(**options))


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


SERVED = {
    "plain": {},
    "fp16": dict(dtype=torch.float16),
    "transposed": dict(transpose_weight=True, bias=zeros(E, N)),
    "gather": dict(gather=True, activation="swiglu"),
    "any rows to gather": dict(gather=True, x=zeros(T, 2 * H)[:, 1 : 1 + H]),
    "any bias": dict(bias=zeros(1).expand(E, N), activation="gpt_oss"),
    "any out": dict(out=zeros(T * K, N + 1)[:, 1:]),
    "part of a weight": dict(weight=zeros(E, N, 3 * H)[..., H : 2 * H]),
    "scatter": dict(scatter=True, activation="swiglu"),
    "few rows, by name": dict(tokens=1),
    "enough rows": dict(backend=None, tokens=E * serves.FEWEST_ROWS // K),
}


@pytest.mark.parametrize("case", SERVED)
def test_serves(case):
    call = bind(**SERVED[case])
    assert hopper.supports(call) is None
    assert dispatch._refusal("grouped_gemm", call, "hopper") is None


def of_int64(layout):
    return dataclasses.replace(layout, row_to_slot=layout.row_to_slot.long())


REFUSED = {
    "fp32": (dict(dtype=torch.float32), "its products are of float16 and bfloat16, not float32"),
    "scale": (dict(scale=torch.zeros(T, K)), "it has no place for a scale of its rows"),
    "tiles": (dict(config=GroupedGemmConfig(64, 64, 64, 4, 3)), TILES),
    "heuristic": (dict(config="heuristic"), TILES),
    "tiles of a gradient": (
        dict(config=GroupedGemmConfigs(d_weight=GroupedGemmConfig(64, 64, 64, 4, 3))),
        TILES,
    ),
    "K_dim": (dict(hidden=60), "K_dim = 60 is not a multiple of 8, which rows of 16-byte units ask for"),
    "N": (dict(columns=36), "N = 36 is not a multiple of 8, which rows of 16-byte units ask for"),
    "gate": (
        dict(columns=40, activation="swiglu"),
        "N / 2 = 20 is not a multiple of 8, which rows of 16-byte units ask for",
    ),
    "address": (
        dict(x=zeros(T * K, H + 8)[:, 1 : H + 1]),
        "x: the base address is not a multiple of 16 bytes",
    ),
    "expanded": (
        dict(weight=zeros(1, N, H).expand(E, N, H)),
        "weight: stride 0 of dimension 0 is not a positive multiple of 16 bytes",
    ),
    "strided": (
        dict(weight=zeros(E, N, 2 * H)[..., ::2]),
        "weight: the tile's inner dimension is not contiguous",
    ),
    "maps": (dict(layout=of_int64(given()["layout"])), "the layout's maps are not of int32"),
    "empty": (dict(tokens=0), "there is nothing to multiply"),
    "few rows": (
        dict(backend=None, tokens=63),
        "126 rows of 4 experts are fewer than 32 each, for which its tiles are high",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    options, reason = REFUSED[case]
    assert hopper.supports(bind(**options)) == reason


def test_what_it_refuses_triton_serves():
    def chosen(**options):
        # Without a name a tensor on the CPU is eager's, so the order is asked for here.
        call = bind(backend=None, **options)
        return next(name for name in dispatch.ORDER if dispatch._refusal("grouped_gemm", call, name) is None)

    assert chosen() == chosen(scatter=True) == "hopper"
    for options in (dict(tokens=8), dict(hidden=60), dict(config="heuristic")):
        assert chosen(**options) == "triton"


def test_explains():
    found = explain(grouped_gemm, **given())
    assert found.backend == "hopper"
    assert found.loads == {"x": "TMA", "weight": "TMA", "out": "TMA"}
    assert found.padding == 0
    weight = zeros(E, N, H).requires_grad_()
    found = explain(grouped_gemm, **given(gather=True, activation="silu", tokens=40, weight=weight))
    assert found.loads == {"x": COPIES, "weight": "TMA", "out": "TMA", "h": "TMA"}
    assert found.padding == 1 - 20 / 64
    assert hopper.loads(bind(gather=True, hidden=72))["x"] == "TMA, from a copy in expert order"
    assert hopper.loads(bind(scatter=True))["out"] == "pointers, as its rows are scattered"
    assert hopper.loads(bind(out=zeros(T * K, N + 1)[:, 1:]))["out"] == "TMA, to be copied from there"


class Launched(list):
    """Notes what would be launched."""

    def __init__(self, monkeypatch):
        from anabranch._backends.triton.prepared import Launch

        launched = self

        def note(launch, *tensors):
            launched.append(launch._kernel.fn.__name__)

        monkeypatch.setattr(Launch, "__call__", note)


FORWARD = ["_schedule_kernel", "product_kernel", "_clear_kernel"]
# A second time by pointers, of experts that have rows without a slot.
WEIGHT = ["weight_gradient_kernel", "_mark_kernel", "weight_gradient_kernel"]
LAUNCHES = {
    "rows": ({}, FORWARD, ["_schedule_kernel", "product_kernel", "_clear_kernel", *WEIGHT]),
    "scatter": (
        dict(scatter=True),
        ["_schedule_kernel", "forward_kernel"],
        ["pre_activation_gradient_kernel", "_schedule_kernel", "product_kernel", "_clear_kernel", *WEIGHT],
    ),
    "gather": (
        dict(gather=True, hidden=256),
        FORWARD,
        ["_schedule_kernel", "product_kernel", "_combine_kernel", *WEIGHT],
    ),
    "a copy for the weight": (
        dict(gather=True, activation="silu"),
        FORWARD,
        [
            "pre_activation_gradient_kernel", "_schedule_kernel", "product_kernel", "_combine_kernel", "_gather_kernel",
            "weight_gradient_kernel",
        ],
    ),
    "a copy for both": (
        dict(gather=True, hidden=72),
        ["_gather_kernel", *FORWARD],
        ["_schedule_kernel", "product_kernel", "_combine_kernel", "_gather_kernel", *WEIGHT],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches(case, monkeypatch):
    options, forward, backward = LAUNCHES[case]
    launched = Launched(monkeypatch)
    call = bind(**options)
    h = call.x.new_empty(T * K, N) if "activation" in options else None
    out = call.x.new_empty(T * K, N)
    hopper.forward(call, out, h)
    assert sorted(launched) == sorted(forward)
    launched.clear()
    # An expanded gradient, as sum has it, cannot be loaded in tiles and is copied.
    hopper.backward(call, zeros(1, 1).expand(T * K, N), h, [True, True, False, False])
    assert launched == backward


def test_one_gradient_alone(monkeypatch):
    launched = Launched(monkeypatch)
    call = bind(bias=zeros(E, N))
    found = hopper.backward(call, zeros(T * K, N), None, [False, True, False, False])
    assert [value is None for value in found] == [True, False, True, True]
    assert launched == WEIGHT
    launched.clear()
    found = hopper.backward(call, zeros(T * K, N), None, [False, False, True, False])
    assert [value is None for value in found] == [True, True, False, True]
    assert launched == ["bias_gradient_kernel"]
