"""The gradients without a forward, and configurations of their own."""

import importlib
import itertools

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.ops.grouped_gemm.api import grouped_gemm_gradients
from anabranch.testing import assert_same, randn, routing
from anabranch.tuning import GroupedGemmConfig, GroupedGemmConfigs

T, E, K, N, K_DIM = 9, 4, 2, 32, 48
TILES = GroupedGemmConfig(32, 16, 16, 4, 2)
BACKENDS = pytest.mark.op("grouped_gemm")
# Triton's interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def operands(activation=None):
    layout = ExpertLayout.from_topk(routing(T, E, K, dropped=0.2), E)
    columns = N // 2 if activation == "swiglu" else N
    leaves = [randn(T, K_DIM), randn(E, N, K_DIM), randn(E, N), torch.rand(T, K)]
    return layout, leaves, randn(T * K, columns)


@BACKENDS
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_they_are_autograds(activation, backend):
    if backend == "reference":
        return  # it is differentiated as it runs
    layout, leaves, grad = operands(activation)
    options = dict(gather=True, scatter=True, activation=activation, backend=backend)
    needed = [leaf.clone().requires_grad_() for leaf in leaves]
    y = grouped_gemm(*needed[:2], layout, bias=needed[2], scale=needed[3], **options)
    wanted = torch.autograd.grad(y, needed, grad)
    x, weight, bias, scale = leaves
    for needs in itertools.product([False, True], repeat=4):
        found = grouped_gemm_gradients(grad, x, weight, layout, needs, bias=bias, scale=scale, **options)
        assert [value is not None for value in found] == list(needs)
        for value, expected in zip(found, wanted, strict=True):
            if value is not None:
                assert_same(value, expected)


@BACKENDS
def test_a_weight_that_tells_its_shape(backend):
    if backend == "reference":
        return
    layout, (x, weight, _, _), grad = operands()
    needs = (False, True, False, False)
    shape = torch.full((), torch.nan, device=x.device).expand(E, N, K_DIM)
    _, found, _, _ = grouped_gemm_gradients(grad, x, shape, layout, needs, gather=True, backend=backend)
    _, wanted, _, _ = grouped_gemm_gradients(grad, x, weight, layout, needs, gather=True, backend=backend)
    assert_same(found, wanted)


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (None, TypeError, "grouped_gemm: grad: expected a tensor"),
        (randn(T * K, N + 1), ValueError, "grouped_gemm: grad: expected shape of the result"),
        (randn(T * K, N).half(), TypeError, "grouped_gemm: grad: expected x's dtype float32, got float16"),
        (randn(T * K, N).to("meta"), ValueError, "grouped_gemm: grad: expected x's device"),
    ],
)
def test_a_gradient_that_is_not_the_outputs(grad, error, message):
    layout, (x, weight, _, _), _ = operands()
    with pytest.raises(error, match=message):
        grouped_gemm_gradients(grad, x, weight, layout, [True, True, False, False], gather=True)


@BACKENDS
def test_each_product_has_its_own_tiles(backend, monkeypatch):
    layout, (x, weight, _, scale), grad = operands()
    each = dict(
        forward=TILES, d_x=GroupedGemmConfig(16, 32, 32, 4, 2), d_weight=GroupedGemmConfig(64, 16, 32, 2, 1)
    )
    leaves = [v.requires_grad_() for v in (x, weight, scale)]

    def run(config):
        y = grouped_gemm(x, weight, layout, gather=True, scale=scale, config=config, backend=backend)
        return y, *torch.autograd.grad(y, leaves, grad)

    wanted, launched = run(None), []
    if backend == "triton":
        launch = importlib.import_module("anabranch.ops.grouped_gemm.backends.triton.launch")
        chosen = launch.chosen
        monkeypatch.setattr(
            launch, "chosen", lambda config, *rest: launched.append(config) or chosen(config, *rest)
        )
    for names in ((), ("forward",), ("d_x",), ("d_weight",), tuple(each)):
        config = GroupedGemmConfigs(**{name: each[name] for name in names})
        if backend != "triton" and names:
            with pytest.raises(NotImplementedError, match="no tiles to configure"):
                run(config)
            continue
        for found, expected in zip(run(config), wanted, strict=True):
            torch.testing.assert_close(found, expected)
        assert set(launched) - {None, "heuristic"} == {each[name] for name in names}
        launched.clear()


@BACKENDS
@pytest.mark.parametrize("name", ["forward", "d_x", "d_weight"])
def test_tiles_that_do_not_fit_are_refused_at_once(name, backend):
    layout, (x, weight, _, _), _ = operands()
    large = GroupedGemmConfigs(**{name: GroupedGemmConfig(128, 128, 128, 8, 20)})
    reason = "bytes of shared memory, the device has" if backend == "triton" else "no tiles to configure"
    with pytest.raises(NotImplementedError, match=reason):
        grouped_gemm(x, weight, layout, gather=True, config=large, backend=backend)


@pytest.mark.parametrize("name", ["forward", "d_x", "d_weight"])
def test_what_is_no_configuration(name):
    layout, (x, weight, _, _), _ = operands()
    with pytest.raises(ValueError, match=f"grouped_gemm: config.{name}: expected a GroupedGemmConfig"):
        grouped_gemm(x, weight, layout, gather=True, config=GroupedGemmConfigs(**{name: "fast"}))
    with pytest.raises(TypeError, match=f"grouped_gemm: config.{name}: expected a GroupedGemmConfig"):
        grouped_gemm(x, weight, layout, gather=True, config=GroupedGemmConfigs(**{name: (128, 128)}))
