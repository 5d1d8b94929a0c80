"""Tiles of grouped_gemm by argument, and what the tuner is told of its products."""

import importlib.util
import os

import pytest
import torch

import anabranch
from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.testing import randn, routing
from anabranch.tuning import GroupedGemmConfig, key, lookup, search
from anabranch.tuning.cache import Cache
from anabranch.tuning.key import Place

pytestmark = [
    # the interpreter's own, at a loop whose bounds are device integers, and where a sigmoid is 0
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SMALL, OTHER = GroupedGemmConfig(16, 32, 16, 4, 2), GroupedGemmConfig(32, 32, 32, 4, 2)
T, E, K, N, K_DIM = 21, 4, 2, 40, 24


def arguments(tokens=T, dtype=torch.float16, size=1.0, **changed):
    generator = torch.Generator().manual_seed(3)
    ids = routing(tokens, E, K, dropped=0.2, generator=generator)
    given = {
        "x": randn(tokens, K_DIM, dtype=dtype, scale=size, generator=generator),
        "weight": randn(E, N, K_DIM, dtype=dtype, scale=K_DIM**-0.5, generator=generator),
        "layout": anabranch.ExpertLayout.from_topk(ids, E),
        "gather": True,
    }
    return {**given, **changed}


@pytest.mark.parametrize("config", [SMALL, "heuristic"], ids=["tiles", "heuristic"])
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_a_backend_without_tiles_refuses(backend, config):
    with pytest.raises(UnsupportedError, match="it has no tiles to configure"):
        anabranch.grouped_gemm(**arguments(backend=backend, config=config))
    call = {**arguments(config=config), "x": arguments()["x"].requires_grad_()}
    with pytest.raises(UnsupportedError, match="eager: it has no tiles to configure"):
        anabranch.explain(anabranch.grouped_gemm, **call)


@pytest.mark.parametrize(
    ("config", "error", "got"), [("large", ArgumentError, "'large'"), (3, ArgumentTypeError, "int")]
)
def test_not_a_configuration(config, error, got):
    with pytest.raises(error) as raised:
        anabranch.grouped_gemm(**arguments(config=config))
    expected = "a GroupedGemmConfig, 'heuristic' or None"
    assert str(raised.value) == f"grouped_gemm: config: expected {expected}, got {got}"


@interpreted
@pytest.mark.parametrize(
    "config", [GroupedGemmConfig(24, 32, 16, 4, 2), GroupedGemmConfig(256, 256, 256, 8, 4)]
)
def test_illegal_tiles_are_refused_with_the_reason(config):
    with pytest.raises(
        UnsupportedError, match=r"triton: config: (block_m = 24 is not|it needs .* shared memory)"
    ):
        anabranch.grouped_gemm(**arguments(backend="triton", config=config))


@pytest.fixture
def launches(monkeypatch):
    """The tiles of each launch of the two products."""
    from anabranch.ops.grouped_gemm.backends.triton import launch

    found = []
    original = launch.chosen

    def chosen(*arguments):
        config = original(*arguments)
        found.append((arguments[1].kind, config))
        return config

    monkeypatch.setattr(launch, "chosen", chosen)
    return found


@interpreted
@pytest.mark.parametrize("compiled", [False, True])
def test_the_tiles_asked_for_are_run(launches, compiled):
    function = (
        torch.compile(anabranch.grouped_gemm, fullgraph=True, backend="aot_eager")
        if compiled
        else anabranch.grouped_gemm
    )
    given = arguments(backend="triton")
    plain = anabranch.grouped_gemm(**given)
    leaf = given["x"].requires_grad_()
    out = function(**given, config=SMALL)
    torch.testing.assert_close(out, plain)
    assert launches[1] == ("forward", SMALL)
    out.sum().backward()
    assert leaf.grad is not None
    assert launches[2][1] != SMALL  # the gradient's tiles are its own


@interpreted
def test_out_takes_them_too(launches):
    out = torch.empty(T * K, N, dtype=torch.float16)
    anabranch.grouped_gemm(**arguments(backend="triton", config=SMALL, out=out))
    assert launches == [("forward", SMALL)]
    assert out.isfinite().all()


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """A search of two candidates on a GPU that is not there; its outcomes."""
    from anabranch.ops.grouped_gemm import config

    found = []

    def searched(trial):
        found.append(search.search(trial))
        return found[-1]

    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "1")
    monkeypatch.setattr(lookup, "_cache", Cache())
    monkeypatch.setattr(lookup, "search", searched)
    monkeypatch.setattr(key, "place", lambda device: Place("Imaginary", "sm_90", "3.6", "1"))
    monkeypatch.setattr(config, "search_space", lambda *args, **options: [SMALL, OTHER])
    monkeypatch.setattr(
        search,
        "medians",
        lambda runs, *rest: {c: 1.0 + (c != SMALL) + (c not in (SMALL, OTHER)) for c in runs},
    )
    return found


PRODUCTS = {
    "gated": {"activation": "swiglu"},
    "everything": {"activation": "gpt_oss", "scatter": True, "bias": True, "scale": True},
    "plain": {},
}


@interpreted
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_tuned_and_right(tuning, launches, product, size):
    """Right candidates pass the check, at any size of the numbers, and the results are those of eager."""
    options = dict(PRODUCTS[product])
    dtype = torch.float32 if product == "gated" else torch.float16
    given = arguments(dtype=dtype, size=size)
    if options.pop("bias", False):
        options["bias"] = randn(E, N, dtype=dtype)
    if options.pop("scale", False):
        options["scale"] = torch.rand(T, K) + 0.1
    given = {**given, **options}
    results = []
    for backend in ("triton", "eager"):
        leaves = {name: given[name].detach().clone().requires_grad_() for name in ("x", "weight")}
        out = anabranch.grouped_gemm(**{**given, **leaves}, backend=backend)
        out.sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
    assert [outcome.best for outcome in tuning] == [SMALL] * 3
    assert all(outcome.rejected == {} for outcome in tuning)
    kind = "forward_gated" if "activation" in options else "forward"
    assert [outcome.key.kind for outcome in tuning] == [kind, "forward", "weight_gradient"]
    for actual, expected in zip(*results, strict=True):
        tolerance = float(expected.abs().max()) * (2e-3 if dtype == torch.float16 else 2e-6)
        torch.testing.assert_close(actual, expected, rtol=0, atol=4 * tolerance)
    # Without gradients it may be another product; and then there is nothing left to search.
    searched = 3 if product == "plain" else 4  # a plain product keeps nothing for its gradient
    for _ in range(2):
        anabranch.grouped_gemm(**given, backend="triton")
        assert launches[-1][1] == SMALL
        assert len(tuning) == searched
    anabranch.grouped_gemm(**given, backend="triton", config="heuristic")
    assert launches[-1][1] not in (SMALL, OTHER)


@interpreted
@pytest.mark.parametrize("op", ["moe_mlp", "grouped_gemm"])
def test_the_command_tunes_what_a_step_launches(tuning, op):
    pytest.importorskip("typer")
    from anabranch.cli.tune import run_case
    from anabranch.ops.moe_mlp.cases import Case

    run_case(op, Case(12, 16, 24, 4, 2), torch.float32, torch.device("cpu"))
    kinds = [outcome.key.kind for outcome in tuning]
    # Inference and training keep different things of the gated product; the others are tuned once.
    assert kinds.count("forward_gated") == 2
    assert kinds.count("weight_gradient") == 2
    assert kinds.count("forward") >= 3
    assert not any(outcome.rejected for outcome in tuning)
    assert len({str(outcome.key) for outcome in tuning}) == len(tuning)


@with_triton
def test_keys_of_many_token_counts_are_few():
    from anabranch.epilogues import resolve
    from anabranch.ops.grouped_gemm.backends.triton import kernels, launch

    keys = set()
    for tokens in range(1, 8192, 41):
        layout = anabranch.ExpertLayout.from_counts(torch.zeros(8, dtype=torch.int32), tokens * 2)
        out = torch.empty(tokens * 2, 32)
        product = launch.product(
            torch.empty(tokens, 16), torch.empty(8, 64, 16), layout, out, None, None, None,
            resolve("test", "swiglu"), False, kernels.TOKEN, kernels.ROW,
        )  # fmt: skip
        keys.add(product.key())
    assert 1 < len(keys) <= 12
    assert "N=64 K=16 E=8" in str(keys.pop())


@with_triton
def test_memory_like_the_calls_own():
    from anabranch.ops.grouped_gemm.backends.triton.tuned import like

    value = torch.zeros(9, 40, dtype=torch.float16)[:, 3:19]
    copy = like(value)
    assert copy.stride() == value.stride()
    assert copy.data_ptr() % 16 == value.data_ptr() % 16
    assert copy.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


@with_triton
@pytest.mark.parametrize("limit", [64, 99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["forward", "forward_gated", "forward_interleaved", "weight_gradient"])
def test_there_are_candidates_for_any_gpu(kind, dtype, limit):
    from anabranch.ops.grouped_gemm.backends.triton.tuned import _sensible
    from anabranch.ops.grouped_gemm.config import search_space

    space = search_space(dtype, limit * 1024, kind)
    for rows in (16, 256, 4096):
        assert _sensible(space, key.Key("grouped_gemm", kind, "bfloat16", 64, 64, 8, rows))
