"""Every op's kernels with the tiles chosen without tuning, compiled for every architecture: none spills, all fit.

A maker calls its op as models of several kinds do, forward and backward, and with strides that forbid wide loads.
Run by `make aot`; a Triton that interprets cannot compile.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from anabranch import (
    ExpertLayout,
    dispatch,
    grouped_gemm,
    moe_mlp,
    mrope,
    multi_gemm,
    permute,
    rope,
    topk_router,
    unpermute,
)
from anabranch.epilogues import base
from anabranch.ops.rope.cases import CASES as ROPE
from anabranch.testing.aot import SHARED_MEMORY, compiling

pytestmark = [pytest.mark.no_poison, pytest.mark.slow]

PACKAGE = Path(dispatch.__file__).parent
MAKERS = {}
"""(what calls the op, whether it multiplies fp32 in TF32 if allowed) by op."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
FEW_ACTIVATIONS = ("gelu", "geglu", "gpt_oss")


def maker(function):
    MAKERS[function.__name__] = function
    return function


def empty(*shape, dtype=torch.bfloat16, odd=False):
    """A leaf; or with ``odd`` one that no wide load can take."""
    value = torch.empty(*shape[:-1], shape[-1] + odd, dtype=dtype)[..., odd:]
    return value.detach().requires_grad_(dtype.is_floating_point)


def backward(*outs):
    torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])


@maker
def make_grouped_gemm(dtype, full, only=None):
    E, K, N, K_dim = 4, 2, 512, 256

    def call(
        rows, *, gather=False, scatter=False, bias=False, scale=False, odd=False, tr=False, n=N, **options
    ):
        T = rows * E // K
        layout = ExpertLayout.from_topk(torch.zeros(T, K, dtype=torch.int64), E)
        weight = empty(E, K_dim, n, dtype=dtype, odd=odd) if tr else empty(E, n, K_dim, dtype=dtype, odd=odd)
        out = grouped_gemm(
            empty(T if gather else T * K, K_dim, dtype=dtype, odd=odd),
            weight,
            layout,
            gather=gather,
            scatter=scatter,
            bias=empty(E, n, dtype=dtype) if bias else None,
            scale=empty(T, K, dtype=torch.float32) if scale else None,
            transpose_weight=tr,
            backend="triton",
            **options,
        )
        backward(out)

    if only:
        call(512, gather=True, bias=True, activation=only)
        return
    for rows in (16, 48, 96, 512):
        call(rows, gather=True, scatter=True, bias=True, scale=True)
        call(rows, gather=True, activation="swiglu")
        if rows > 16 and full:
            call(rows, bias=True, activation="gelu")
    call(512)
    call(512, tr=True, bias=True, scale=True)
    for activation in () if full else FEW_ACTIVATIONS:  # test_epilogue has them all
        call(512, gather=True, bias=True, activation=activation)
    call(512, gather=True, scatter=True, bias=True, scale=True, activation="gpt_oss", tr=True)
    call(512, gather=True, bias=True, scale=True, activation="swiglu")
    call(512, scatter=True, bias=True, scale=True, activation="silu")
    call(512, bias=True, scale=True, activation="gelu_tanh")
    for rows in (16, 512):  # odd addresses, then columns that no vector divides
        call(rows, gather=True, scatter=True, bias=True, scale=True, odd=True, activation="gelu")
        call(rows, odd=True, tr=True, activation="gpt_oss")
    call(512, n=N + 6, gather=True, activation="swiglu")
    call(512, n=N + 6, scatter=True, bias=True, scale=True)


@maker
def make_moe_mlp(dtype, full, only=None):
    def call(T, activation="swiglu", tr=False, bias=False, H=512, I=256, K=4, E=4, **options):  # noqa: E741
        N = I * base.REGISTRY[activation].columns
        shapes = ((E, H, N), (E, I, H)) if tr else ((E, N, H), (E, H, I))
        out = moe_mlp(
            empty(T, H, dtype=dtype),
            *(empty(*shape, dtype=dtype) for shape in shapes),
            torch.zeros(T, K, dtype=torch.int64),
            empty(T, K, dtype=torch.float32),
            gate_up_bias=empty(E, N, dtype=dtype) if bias else None,
            down_bias=empty(E, H, dtype=dtype) if bias else None,
            activation=activation,
            transpose_weight=tr,
            backend="triton",
            **options,
        )
        backward(out)

    if only:
        call(512, only, bias=True, gate_layout="interleaved")
        return
    for T in (8, 48, 96, 512) if full else (8, 512):
        call(T)
        call(T, "gpt_oss", tr=True, bias=True, gate_layout="interleaved")
    call(512, bias=True, weight_on="input")
    call(512, "relu_squared", tr=True)
    if not full:  # test_epilogue has them all
        call(512, "geglu", bias=True, gate_layout="interleaved")
    call(512, "gpt_oss", bias=True, gate_layout="interleaved", weight_on="input")
    call(512, H=517, I=129)


@maker
def make_multi_gemm(dtype, full):
    def call(sizes, odd=False, **flags):
        xs = [empty(m, k, dtype=dtype, odd=odd) for m, _, k in sizes]
        backward(
            *multi_gemm(
                xs, [empty(n, k, dtype=dtype, odd=odd) for _, n, k in sizes], backend="triton", **flags
            )
        )

    call([(512, 2048, 1024), (256, 4096, 1024)])
    call([(4096, 4096, 256), (2048, 4096, 256)])
    call([(1, 4096, 256), (16, 4096, 256)])
    if full:
        call([(512, 512, 512), (512, 512, 512)], odd=True, transpose_x=True, transpose_weight=True)
        call([(64, 4099, 64)])


@maker
def make_permute(dtype, full):
    for K in (1, 2, 8, 22) if full else (8,):
        layout = ExpertLayout.from_topk(torch.zeros(64, K, dtype=torch.int64), 32)
        rows = permute(empty(64, 2048, dtype=dtype), layout, backend="triton")
        backward(rows)
        backward(
            unpermute(
                empty(*rows.shape, dtype=dtype), layout, empty(64, K, dtype=torch.float32), backend="triton"
            )
        )
        backward(unpermute(empty(*rows.shape, dtype=dtype, odd=True), layout, backend="triton"))


@maker
def make_rope(dtype, full):
    for case in ROPE if full else ROPE[:2]:
        given = case.arguments(1, 4096, dtype)
        for name in ("q", "k"):
            given[name].requires_grad_()
        backward(*(mrope if "sections" in given else rope)(**given, backend="triton"))


@maker
def make_route(dtype, full):
    from anabranch.ops.route.backends import triton

    for T, E in ((256, 128), (16384, 128), (131072, 256)):
        for kind in (torch.int32, torch.int64):
            triton.topk(torch.empty(T, 8, dtype=kind), E)
    triton.counts(torch.empty(128, dtype=torch.int64), 4096)
    triton.sorted_rows(torch.empty(128, dtype=torch.int32), torch.empty(4096, dtype=torch.int32), 8)
    triton.maps(torch.empty(512, 8, dtype=torch.int32), 4096)


@maker
def make_topk_router(dtype, full):
    deepseek = dict(
        score="sigmoid", renormalize=True, bias=torch.empty(256), num_groups=8, top_groups=4, scaling=2.5
    )
    for T, E, K, options in (
        (16384, 128, 8, dict(renormalize=True)),
        (16384, 256, 8, deepseek),
        (64, 256, 8, deepseek),
        (16384, 32, 4, dict(order="topk_then_score")),
        (64, 8, 2, {}),
        (16384, 1024, 32, {}),
        (1, 4096, 8, {}),
    ):
        weights, _ = topk_router(empty(T, E, dtype=dtype), K, backend="triton", **options)
        backward(weights)


OPS = {name.removeprefix("make_"): function for name, function in MAKERS.items()}
# Products differ in tiles by dtype; the others' kernels are the same but for the width of a load.
PRODUCTS = ("grouped_gemm", "moe_mlp", "multi_gemm")
RUNS = [
    (op, dtype, arch)
    for op in OPS
    for arch in SHARED_MEMORY
    for dtype in (DTYPES if op in PRODUCTS else ("bf16", "fp32") if op != "route" else ("bf16",))
    if arch != 89  # compiles as 86 does
    and (arch != 86 or (op in PRODUCTS and dtype != "fp16"))
]


def backends_of(op):
    folder = PACKAGE / "ops" / op / "backends"
    return [*folder.glob("triton.py"), *folder.glob("triton/*.py")]


def kernels_of(op):
    return {
        name
        for path in backends_of(op)
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)
    }


def test_every_op_has_a_maker():
    ops = {path.name for path in (PACKAGE / "ops").iterdir() if path.is_dir() and backends_of(path.name)}
    assert ops == set(OPS)


@pytest.fixture
def tf32(dtype):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("op", "dtype", "arch"), RUNS, ids=[f"{op}-{dtype}-{arch}" for op, dtype, arch in RUNS]
)
def test_default(op, dtype, arch, monkeypatch, record_property, tf32):
    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    full = dtype == "bf16" and arch != 86
    with compiling(arch) as found:
        OPS[op](DTYPES[dtype], full)
    record_property("kernels", json.dumps([row(kernel) for kernel in found]))
    assert kernels_of(op) <= {kernel.name for kernel in found}
    check_resources(found, arch)


# What the full runs of test_default leave out: each epilogue there is, so that its name picks it.
@pytest.mark.parametrize("arch", [arch for arch in SHARED_MEMORY if arch not in (86, 89)])
@pytest.mark.parametrize("name", sorted(base.REGISTRY))
def test_epilogue(name, arch, monkeypatch, record_property):
    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    with compiling(arch) as found:
        make_grouped_gemm(torch.bfloat16, True, only=name)
        if base.REGISTRY[name].columns == 2:
            make_moe_mlp(torch.bfloat16, True, only=name)
    record_property("kernels", json.dumps([row(kernel) for kernel in found]))
    code = {getattr(kernel.constants.get("EPILOGUE"), "__module__", None) for kernel in found}
    assert base.REGISTRY[name]().device_code in code
    check_resources(found, arch)


def check_resources(found, arch):
    # 8.6 is here for its 99 KiB of shared memory; its compiler spills a few bytes of a few kernels.
    wrong = [
        row(k) for k in found if k.shared_bytes > SHARED_MEMORY[arch] or (k.spilled_bytes and arch != 86)
    ]
    assert not wrong, "\n".join(map(str, wrong))
    if isinstance(arch, int):
        assert all(k.registers is not None for k in found), "cuobjdump is missing"


def row(kernel):
    simple = {k: v for k, v in kernel.constants.items() if isinstance(v, int | str)}
    return kernel.row(constants=simple, warps=kernel.num_warps, stages=kernel.num_stages)
