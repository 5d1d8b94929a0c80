"""The Gluon kernels as the hopper backend launches them, compiled: none spills in its loops, all fit."""

import json
import re

import pytest
import torch
import triton

from anabranch import ExpertLayout, dispatch, grouped_gemm, moe_mlp
from anabranch.testing.aot import SHARED_MEMORY, SHARED_WORDS, compiling

pytestmark = [pytest.mark.no_poison, pytest.mark.slow]

KERNELS = {"product_kernel", "gate_gradient_kernel", "weight_gradient_kernel"}
PRODUCTS = {"product_kernel", "weight_gradient_kernel"}
CASES = {
    "swiglu": {},
    "transposed": dict(transpose_weight=True, bias=True),
    "gpt_oss": dict(activation="gpt_oss", gate_layout="interleaved", transpose_weight=True, bias=True),
    "input": dict(activation="geglu", gate_layout="interleaved", weight_on="input"),
    "odd": dict(activation="gelu", H=72, I=40, bias=True, dtype=torch.float16),
}


GEMMS = {
    "rows": {},
    "gather": dict(gather=True, activation="swiglu", bias=True),
    "transposed": dict(gather=True, transpose_weight=True, activation="silu"),
    "narrow": dict(gather=True, transpose_weight=True, N=72, bias=True, dtype=torch.float16),
    "odd": dict(activation="gpt_oss", K_dim=40, N=144),
}


def run(activation="swiglu", H=512, I=256, bias=False, dtype=torch.bfloat16, **options):  # noqa: E741
    T, K, E = 512, 4, 4
    N = I if activation == "gelu" else 2 * I
    swap = options.get("transpose_weight", False)

    def zeros(*shape, dtype=dtype):
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    out = moe_mlp(
        zeros(T, H),
        zeros(E, H, N) if swap else zeros(E, N, H),
        zeros(E, I, H) if swap else zeros(E, H, I),
        torch.arange(T * K).view(T, K) % E,
        zeros(T, K, dtype=torch.float32),
        gate_up_bias=zeros(E, N) if bias else None,
        down_bias=zeros(E, H) if bias else None,
        activation=activation,
        backend="hopper",
        **options,
    )
    out.backward(torch.zeros_like(out))


def run_gemm(K_dim=512, N=512, bias=False, dtype=torch.bfloat16, **options):
    T, K, E = 512, 4, 4
    layout = ExpertLayout.from_topk(torch.arange(T * K).view(T, K) % E, E)

    def zeros(*shape):
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    out = grouped_gemm(
        zeros(T if options.get("gather") else T * K, K_dim),
        zeros(E, K_dim, N) if options.get("transpose_weight") else zeros(E, N, K_dim),
        layout,
        bias=zeros(E, N) if bias else None,
        backend="hopper",
        **options,
    )
    out.backward(torch.zeros_like(out))


def frozen_bounds(ttgir):
    """Bounds of a loop inside another that come from a load before both: one tile's, which all tiles then go by."""
    made, loops, found = {}, [], []

    def loaded(name):
        depth, rest = made.get(name, (1, ""))
        if depth or not rest.startswith(("tt.load", "arith.")):
            return False
        return rest.startswith("tt.load") or any(map(loaded, re.findall(r"%[\w#]+", rest)))

    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and indent <= loops[-1]:
            loops.pop()
        loop = re.search(r"scf\.for %\w+ = (%\w+) to (%\w+)", line)
        if loop:
            found += [line.strip() for bound in loop.groups() if loops and loaded(bound)]
            loops.append(indent)
        elif value := re.match(r"\s*(%\w+) = (.*)", line):
            made[value[1]] = len(loops), value[2]
    return found


@pytest.mark.parametrize("case", CASES)
def test_kernels(case, monkeypatch, record_property):
    check(lambda: run(**CASES[case]), KERNELS, monkeypatch, record_property)


@pytest.mark.parametrize("case", GEMMS)
def test_kernels_of_grouped_gemm(case, monkeypatch, record_property):
    check(lambda: run_gemm(**GEMMS[case]), PRODUCTS, monkeypatch, record_property)


def check(run, kernels, monkeypatch, record_property):
    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    frozen, compile_it = [], triton.compile

    def compile_and_look(*args, **options):
        kernel = compile_it(*args, **options)
        frozen.extend(frozen_bounds(kernel.asm["ttgir"]))
        return kernel

    monkeypatch.setattr(triton, "compile", compile_and_look)
    with compiling(90) as found:
        run()
    assert not frozen, "\n".join(frozen)
    rows = [kernel.row() for kernel in found]
    record_property("kernels", json.dumps(rows))
    assert {k.name for k in found} >= kernels
    wrong = [row for row in rows if row["spilled"] > SHARED_WORDS or row["shared"] > SHARED_MEMORY[90]]
    assert not wrong, "\n".join(map(str, wrong))
