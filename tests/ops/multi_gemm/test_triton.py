"""The Triton backend of multi_gemm: interpreted or on a GPU, against fp64, and compiled ahead of time for GPUs."""

import itertools
import os
from unittest import mock

import pytest
import torch

from anabranch import dispatch
from anabranch.errors import UnsupportedError
from anabranch.ops.multi_gemm import config as tiles
from anabranch.ops.multi_gemm.api import multi_gemm
from anabranch.ops.multi_gemm.config import COPIED, ELEMENTWISE, TMA, MultiGemmConfig
from anabranch.testing import STRIDES, assert_component_wise, guard_band, randn, strided

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.op("multi_gemm", "triton")
compiled = pytest.mark.skipif(INTERPRETS, reason="the interpreter has taken the compiler's place")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

FLAGS = list(itertools.product([False, True], repeat=2))
# the interpreter cannot multiply bf16
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (torch.cuda.is_available() and not INTERPRETS)]
# (m, n, k) of each expert
CASES = {
    "different": [(5, 3, 4), (7, 6, 2), (1, 9, 8)],
    "several_tiles": [(70, 130, 40), (17, 20, 33)],
    "empty": [(0, 6, 8), (9, 5, 8), (4, 0, 3), (3, 4, 0)],
    "all_empty": [(0, 6, 8), (3, 0, 8)],
    "aligned": [(32, 16, 48), (64, 32, 16)],
    "more_than_one_launch": [(3, 5, 6 + i) for i in range(9)],
}


def make(sizes, dtype, transpose_x=False, transpose_weight=False):
    xs = [randn(*((k, m) if transpose_x else (m, k)), dtype=dtype) for m, _, k in sizes]
    weights = [randn(*((k, n) if transpose_weight else (n, k)), dtype=dtype) for _, n, k in sizes]
    return xs, weights, [randn(m, n, dtype=dtype) for m, n, _ in sizes]


def check(xs, weights, grads, transpose_x=False, transpose_weight=False):
    """Results and both gradients against fp64."""
    flags = dict(transpose_x=transpose_x, transpose_weight=transpose_weight)
    leaves = [[v.detach().requires_grad_() for v in values] for values in (xs, weights)]
    ys = multi_gemm(*leaves, backend="triton", **flags)
    found = torch.autograd.grad(ys, [*leaves[0], *leaves[1]], grads)
    for i, (x, w, g) in enumerate(zip(xs, weights, grads, strict=True)):
        actual = ys[i].detach(), found[i], found[len(xs) + i]
        exact, magnitude = (
            products(*(f(v.double()) for v in (x, w, g)), **flags) for f in (torch.clone, torch.abs)
        )
        lengths = x.shape[0 if transpose_x else 1], *reversed(g.shape)
        for name, *values, length in zip("yxw", actual, exact, magnitude, lengths, strict=True):
            assert values[0].dtype == x.dtype
            assert_component_wise(*values, max(length, 1), name=f"{name}[{i}]")


def products(x, w, g, transpose_x, transpose_weight):
    x, w = x.T if transpose_x else x, w.T if transpose_weight else w
    y, d_x, d_w = x @ w.T, g @ w, g.T @ x
    return y, d_x.T if transpose_x else d_x, d_w.T if transpose_weight else d_w


@runs
@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "transpose_weight", "transpose_x", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype, flags):
    check(*make(CASES[name], dtype, *flags), *flags)


@runs
@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides(strides):
    """Inputs, weights and incoming gradients in turn."""
    values = make([(4, 6, 5), (16, 32, 48)], torch.float32)
    for place in range(3):
        given = list(values)
        given[place] = [strided(v, strides) for v in values[place]]
        check(*given)


@runs
@pytest.mark.parametrize("columns", [0, 42])
def test_writes_every_element_of_out_and_no_other(columns):
    sizes = [(5, 47, 8), (0, 3, 2), (3, 1, 9), (2, 6, 0)]
    xs, weights, _ = make(sizes, torch.float32)
    out, checks = zip(*(guard_band((m, n), torch.float32, columns=columns) for m, n, _ in sizes), strict=True)
    multi_gemm(xs, weights, out=out, backend="triton")
    for y, x, w in zip(out, xs, weights, strict=True):
        torch.testing.assert_close(y, x @ w.T)
    for untouched in checks:
        untouched()


@runs
@pytest.mark.parametrize("programs", [1, 3, 100])
def test_tiles_meet_every_program_and_product(programs, monkeypatch):
    """As many programs as tiles, fewer, or one: every tile of every product is somebody's."""
    from anabranch._backends.triton import device

    monkeypatch.setattr(device, "num_sms", lambda _: programs)
    sizes = [(40, 70, 8), (20, 33, 8), (16, 200, 8)]
    xs, weights, grads = make(sizes, torch.float32)
    check(xs, weights, grads)


@runs
@pytest.mark.parametrize("flatten", [False, True])
def test_any_configuration(flatten):
    from anabranch.ops.multi_gemm.backends.triton import launch

    x, w = randn(37, 50), randn(70, 50)
    y = torch.full((37, 70), torch.nan)
    launch.multi_gemm([(x, w, y)], MultiGemmConfig(16, 32, 16, 4, 2, group_m=2, flatten=flatten))
    torch.testing.assert_close(y, x @ w.T)


@runs
def test_full_fp32():
    (y,) = multi_gemm([torch.full((2, 64), 1 + 2**-12)], [torch.ones(3, 64)], backend="triton")
    assert torch.equal(y, torch.full((2, 3), 64.015625))


@runs
def test_fp64_is_refused():
    with pytest.raises(UnsupportedError, match="triton: it accumulates in fp32, too coarse for float64"):
        multi_gemm([randn(2, 2, dtype=torch.float64)], [randn(2, 2, dtype=torch.float64)], backend="triton")


DUAL = {
    "training": [(8192, 11008, 2048), (4096, 4096, 2048)],
    "small": [(512, 2048, 1024), (256, 4096, 1024)],
    "uneven": [(2048, 11008, 2048), (64, 4096, 2048)],
    "decode": [(1, 11008, 2048), (16, 4096, 2048)],
}


def choose(name, dtype=torch.bfloat16, limit=232_448, **how):
    return tiles.heuristic(DUAL[name], dtype, limit, 132, **how)


def test_tiles_follow_the_sizes():
    blocks = {name: (choose(name).block_m, choose(name).block_n) for name in DUAL}
    assert blocks["training"] == blocks["uneven"] == (128, 256)
    assert choose("training").flatten
    assert blocks["small"] == (64, 256)  # the largest would leave half of the device idle
    assert blocks["decode"][0] == 16
    assert not any(choose(name).flatten for name in ("small", "decode"))


def test_the_deepest_tile_is_not_waited_for():
    """Gradients of x and the weight in one launch: long reductions beside short ones."""
    for name, block in (("small", (64, 128)), ("decode", (128, 128))):
        sizes = [s for m, n, k in DUAL[name] for s in ((m, k, n), (n, k, m))]
        config = tiles.heuristic(sizes, torch.bfloat16, 232_448, 132)
        assert (config.block_m, config.block_n) == block


def test_when_the_last_program_is_through():
    """Two products of 3 and 2 tiles for 2 programs: the first takes 3 of them, one long."""
    config = MultiGemmConfig(16, 16, 16, 4, 2)
    choices = tiles.Table({config: 0.5}, 1000.0)
    sizes = [(48, 16, 16), (16, 32, 160)]
    short, long = 16**3 / 0.5 + 1000, 160 * 16**2 / 0.5 + 1000
    assert tiles.duration(config, choices, sizes, 2) == 2 * short + long
    assert tiles.duration(config, choices, sizes, 100) == long


@pytest.mark.parametrize("name", DUAL)
@pytest.mark.parametrize("loads", [ELEMENTWISE, COPIED, TMA])
@pytest.mark.parametrize("limit", [65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_chosen_tiles_are_legal(name, loads, limit, dtype):
    for precision in ("ieee", "tf32"):
        config = choose(name, dtype, limit, loads=loads, precision=precision)
        assert tiles.legal(config, dtype, limit, loads) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MultiGemmConfig(48, 64, 64, 4, 2), "block_m = 48 is not a power of two of at least 16"),
        (MultiGemmConfig(64, 64, 8, 4, 2), "block_k = 8 is not a power of two of at least 16"),
        (MultiGemmConfig(64, 64, 64, 3, 2), "num_warps = 3 is not a power of two up to 16"),
        (MultiGemmConfig(64, 64, 64, 4, 0), "num_stages = 0 is below 1"),
        (MultiGemmConfig(128, 256, 64, 8, 4), "its tiles need 262144 bytes of shared memory"),
        (MultiGemmConfig(128, 256, 64, 4, 2), "its accumulator needs 256 registers a thread"),
    ],
)
def test_what_is_illegal(config, reason):
    assert tiles.legal(config, torch.bfloat16, 232_448).startswith(reason)


def compile_calls(arch, calls):
    from anabranch.testing.aot import compiling

    with mock.patch.object(dispatch, "probe", return_value=None), compiling(arch) as found:
        for xs, weights in calls:
            leaves = [*xs, *weights]
            ys = multi_gemm(xs, weights, backend="triton")
            if any(v.requires_grad for v in leaves):
                torch.autograd.grad(ys, leaves, [torch.empty_like(y) for y in ys])
    return found


def empty(*shape, grad=False):
    return torch.empty(*shape, dtype=torch.bfloat16).requires_grad_(grad)


@compiled
@pytest.mark.no_poison
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_without_spills(arch):
    """Forward and backward of two experts, one launch each; then strides that forbid wide loads or stores."""
    sizes = DUAL["small"]
    both = [empty(m, k, grad=True) for m, _, k in sizes], [empty(n, k, grad=True) for _, n, k in sizes]
    odd = torch.empty(256, 1025, dtype=torch.bfloat16)[:, 1:]
    found = compile_calls(arch, [both, ([odd], [empty(512, 1024)]), ([empty(4096, 64)], [empty(4099, 64)])])
    assert [kernel.constants["COUNT"] for kernel in found] == [2, 4, 1, 1]
    for kernel in found:
        assert not kernel.spilled_bytes, kernel


@compiled
@pytest.mark.no_poison
def test_another_number_of_rows_compiles_nothing():
    weights = [empty(11008, 2048), empty(4096, 2048)]
    calls = [([empty(m, 2048), empty(m + 1, 2048)], weights) for m in (4096, 5003, 8000)]
    assert len(compile_calls(90, calls)) == 1
