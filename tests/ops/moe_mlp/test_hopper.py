"""What the hopper backend serves, as far as that shows without the GPU it is for."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from anabranch import ExpertLayout, dispatch
from anabranch._backends.hopper import release
from anabranch._backends.triton import device
from anabranch.errors import UnsupportedError
from anabranch.ops.moe_mlp.backends import hopper
from anabranch.ops.moe_mlp.call import bind_moe_mlp

pytestmark = pytest.mark.cpu

T, H, I, E, K = 256, 64, 32, 4, 2  # noqa: E741


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(device, "capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "probe", lambda backend, _: None)
    release.refusal.cache_clear()
    yield
    release.refusal.cache_clear()


def bind(
    dtype=torch.bfloat16,
    tokens=T,
    hidden=H,
    inner=I,
    experts=E,
    gate_up=None,
    down=None,
    backend="hopper",
    **options,
):
    width = inner * (1 if options.get("activation") in ("silu", "gelu") else 2)
    swap = options.get("transpose_weight", False)
    up_shape = (experts, hidden, width) if swap else (experts, width, hidden)
    down_shape = (experts, inner, hidden) if swap else (experts, hidden, inner)
    call = bind_moe_mlp(
        torch.zeros(tokens, hidden, dtype=dtype),
        torch.zeros(up_shape, dtype=dtype) if gate_up is None else gate_up,
        torch.zeros(down_shape, dtype=dtype) if down is None else down,
        torch.arange(tokens * K).view(tokens, K) % experts,
        torch.zeros(tokens, K),
        backend=backend,
        **options,
    )
    return dataclasses.replace(call, layout=ExpertLayout.from_topk(call.expert_ids, experts))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(dtype=torch.float16),
        dict(transpose_weight=True),
        dict(activation="gelu"),
        dict(activation="gpt_oss", gate_layout="interleaved", weight_on="input"),
        dict(gate_up=torch.zeros(E, 2 * I, 3 * H, dtype=torch.bfloat16)[..., H : 2 * H]),
        dict(tokens=1),
        dict(backend=None, tokens=64),
    ],
    ids=str,
)
def test_serves(options):
    call = bind(**options)
    assert hopper.supports(call) is None
    assert dispatch._refusal("moe_mlp", call, "hopper") is None


def _shifted(*shape):
    return torch.zeros(*shape[:-1], shape[-1] + 8, dtype=torch.bfloat16)[..., 1 : shape[-1] + 1]


REFUSED = {
    "fp32": (dict(dtype=torch.float32), "its products are of float16 and bfloat16, not float32"),
    "fp64": (dict(dtype=torch.float64), "its products are of float16 and bfloat16, not float64"),
    "H": (dict(hidden=60), "H = 60 is not a multiple of 8, which rows of 16-byte units ask for"),
    "I": (dict(inner=36), "I = 36 is not a multiple of 8, which rows of 16-byte units ask for"),
    "address": (
        dict(gate_up=_shifted(E, 2 * I, H)),
        "gate_up: the base address is not a multiple of 16 bytes",
    ),
    "expanded": (
        dict(down=torch.zeros(1, H, I, dtype=torch.bfloat16).expand(E, H, I)),
        "down: stride 0 of dimension 0 is not a positive multiple of 16 bytes",
    ),
    "strided": (
        dict(down=torch.zeros(E, H, 2 * I, dtype=torch.bfloat16)[..., ::2]),
        "down: the tile's inner dimension is not contiguous",
    ),
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


def test_explains():
    call = dataclasses.replace(bind(), layout=None)  # as explain has it
    assert hopper.supports(call) is None
    assert hopper.loads(call)["x"] == "asynchronous copies, as its rows are gathered"
    assert hopper.loads(bind(weight_on="input"))["x"] == "TMA, from a copy in expert order"
    up = torch.zeros(E, 2 * I, H, dtype=torch.bfloat16, requires_grad=True)
    assert hopper.loads(bind(gate_up=up))["h"] == "TMA"
    assert "h" not in hopper.loads(bind(gate_up=up, save="inputs"))
    assert hopper.padding(call) == 0
    assert hopper.padding(bind(tokens=40)) == 1 - 20 / 64


@pytest.mark.parametrize("options", [{}, dict(inner=320), dict(weight_on="input")], ids=str)
def test_weights_that_no_kernel_writes_get_gradient_zero(options, monkeypatch):
    """As those of dropped slots: of one tile of columns, of several, and where x is weighted."""
    from anabranch._backends.triton import fill
    from anabranch._backends.triton.prepared import Launch

    passes = {
        fill._zero_kernel: lambda out: out.zero_(),
        fill._add_up_kernel: lambda parts, out: torch.sum(parts, 0, out=out),
    }
    nothing = lambda *tensors: None  # noqa: E731
    monkeypatch.setattr(
        Launch, "__call__", lambda launch, *tensors: passes.get(launch._kernel, nothing)(*tensors)
    )
    call = bind(**options)
    h = call.x.new_empty(T * K, call.gate_up_nk.shape[1])
    d_weights = hopper.backward(call, call.x, h, [False, False, False, True, False, False])[3]
    assert d_weights.shape == (T, K)
    assert not d_weights.any()


@pytest.mark.parametrize("transpose_weight", [False, True])
@pytest.mark.parametrize(
    ("options", "needs", "copies"),
    [
        (dict(hidden=256), [True] * 4, 0),
        (dict(hidden=256, down_bias=True), [True, True, True, False], 0),
        (dict(hidden=256, down_bias=True), [True] * 4, 1),  # the bias has a share in the weights' gradient
        (dict(hidden=320), [True, False, True, True], 1),  # past a row's end no copy may go
    ],
    ids=str,
)
def test_the_gradient_is_read_where_it_lies(options, needs, copies, transpose_weight, monkeypatch):
    from anabranch._backends.triton.prepared import Launch

    launched = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: launched.append(launch))
    options = dict(options)
    if options.pop("down_bias", False):
        options["down_bias"] = torch.zeros(E, options["hidden"], dtype=torch.bfloat16)
    call = bind(transpose_weight=transpose_weight, **options)
    h = call.x.new_empty(T * K, call.gate_up_nk.shape[1])
    hopper.backward(call, call.x, h, [*needs, False, False])
    found = {}
    for launch in launched:
        found.setdefault(launch._kernel.fn.__name__, []).append(launch._constants)
    assert len(found.get("_gather_kernel", ())) == copies
    assert found["gate_gradient_kernel"][0]["GATHERED"] is (copies == 0)
    d_down = found["weight_gradient_kernel"][0]
    # Rows of the weight's gradient are of its first operand, which is the other one where it lies transposed.
    assert d_down["A_GATHERED"] is (copies == 0 and not transpose_weight)
    assert d_down["B_GATHERED"] is (copies == 0 and transpose_weight)


def test_a_refusal_names_its_reason():
    call = bind(dtype=torch.float32)
    with pytest.raises(
        UnsupportedError, match="hopper: its products are of float16 and bfloat16, not float32"
    ):
        dispatch.choose("moe_mlp", call)


@pytest.mark.parametrize("version", ["3.5.1", "4.0.0+git1234", "unknown"])
def test_an_unknown_release_is_refused(version, monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    assert hopper.supports(bind()).endswith(f", not with {version}")


def test_a_release_that_lacks_a_name_is_refused(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "anabranch._backends.hopper.gluon", None)
    monkeypatch.delattr("anabranch._backends.hopper.gluon", raising=False)
    assert "lacks what its kernels use" in hopper.supports(bind())
