"""The Triton and Hopper backends on a GPU: checked against fp64, then timed against PyTorch in the same run.

    PYTHONPATH=src python benchmarks/triton_gpu.py [--out results.json]

Checks every operation it times, and times nothing if one is wrong. Times are medians; kernels that are short beside a
launch are timed under a CUDA graph. A column that names no backend is of the one that is chosen unasked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

import anabranch as ab
from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN
from anabranch.ops.grouped_gemm.backends.triton.launch import gemm, weight_gradient
from anabranch.ops.moe_mlp.cases import BENCHMARKS, Case
from anabranch.ops.route.reference import layout_from_topk
from anabranch.testing import routing, usable_backends

DEVICE, DTYPE = "cuda", torch.bfloat16
SHAPES = ("qwen", "sonic", "mixtral")
Results = dict[str, dict[str, float]]


def ms(run: Callable[[], object]) -> float:
    return do_bench(run, warmup=15, rep=60, return_mode="median")


def graph_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Time on the GPU alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
    return statistics.median(times)


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE, requires_grad=grad)


def relative(actual: torch.Tensor, truth: torch.Tensor) -> float:
    actual, truth = actual.detach().double(), truth.detach().double()
    return float((actual - truth).norm() / truth.norm())


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.grouped_mm(a, b, offs=offsets)


def backends() -> list[str]:
    """Those with kernels for this GPU."""
    return [name for name in usable_backends("moe_mlp", DEVICE) if name in ("hopper", "triton")]


def check_others() -> dict[str, float]:
    """The largest relative error of each other operation against the eager backend in fp64."""
    T, H, E, K = 300, 264, 9, 4
    ids, w = routing(T, E, K, "zipf", dropped=0.1).to(DEVICE), torch.rand(T, K, device=DEVICE)
    layout, x, y, weight = ab.ExpertLayout.from_topk(ids, E), randn(T, H), randn(T * K, H), randn(E, 2 * H, H)
    q, k, angle = randn(2, 8, 64, 128), randn(2, 2, 64, 128), torch.rand(3, 2, 64, 64, device=DEVICE) * 6
    cos, sin = angle.cos().repeat(1, 1, 1, 2), angle.sin().repeat(1, 1, 1, 2)
    calls = {
        "grouped_gemm": (ab.grouped_gemm, (x, weight, layout), {"gather": True, "scale": w}),
        **{
            f"grouped_gemm {name}": (
                ab.grouped_gemm,
                (x, weight, layout),
                {"gather": True, "activation": "swiglu", "backend": name},
            )
            for name in backends()
        },
        "permute": (ab.permute, (x, layout), {}),
        "unpermute": (ab.unpermute, (y, layout, w), {}),
        "rope": (ab.rope, (q, k, cos[0], sin[0]), {}),
        "mrope": (ab.mrope, (q, k, cos, sin, [16, 24, 24]), {}),
        "dual_gemm": (ab.dual_gemm, (x, y, weight[0], randn(40, H)), {}),
    }
    # A wrong layout would make both sides of the others wrong alike.
    plain, fields = layout_from_topk(ids, E), ("counts", "offsets", "row_to_slot", "slot_to_row")
    same = all(torch.equal(getattr(layout, field), getattr(plain, field)) for field in fields)
    errors = {"routing": 0.0 if same else 1.0}
    for name, (run, arguments, options) in calls.items():
        wide = [v.double() if isinstance(v, torch.Tensor) else v for v in arguments]
        found, expected = run(*arguments, **options), run(*wide, **{**options, "backend": "eager"})
        if isinstance(found, torch.Tensor):
            found, expected = (found,), (expected,)
        errors[name] = max(relative(a, b) for a, b in zip(found, expected, strict=True))
    return errors


def check() -> None:
    """Every operation in bf16 against fp64, moe_mlp with its gradients; exits on red."""
    others = check_others()
    print("relative errors:", {name: f"{error:.1e}" for name, error in others.items()})
    if not all(error < 5e-3 for error in others.values()):
        sys.exit("an operation is wrong; nothing is timed")
    T, H, I, E, K = 1000, 256, 128, 16, 4  # noqa: E741
    x, up, down = randn(T, H, grad=True), randn(E, 2 * I, H, grad=True), randn(E, H, I, grad=True)
    ids, w = (
        routing(T, E, K, "zipf", dropped=0.1).to(DEVICE),
        torch.rand(T, K, device=DEVICE, requires_grad=True),
    )
    wide = [v.detach().double().requires_grad_() for v in (x, up, down, w)]
    truth, grad = ab.moe_mlp(*wide[:3], ids, wide[3], backend="eager"), randn(T, H)
    expected = torch.autograd.grad(truth, wide, grad.double())
    for name in backends():
        out = ab.moe_mlp(x, up, down, ids, w, backend=name)
        found = torch.autograd.grad(out, (x, up, down, w), grad)
        errors = [relative(a, b) for a, b in zip((out, *found), (truth, *expected), strict=True)]
        if not max(errors) < 5e-3:
            sys.exit(f"moe_mlp by {name} is wrong by {errors}; nothing is timed")
        print(f"relative errors of moe_mlp by {name}, out and gradients:", [f"{e:.1e}" for e in errors])


def peer(x, up, down, ids, w):
    """The layer through torch's grouped_mm."""
    (T, H), E, K = x.shape, up.shape[0], ids.shape[1]
    order = torch.argsort(ids.reshape(-1), stable=True)
    ends = torch.histc(ids.reshape(-1).float(), E, 0, E - 1).cumsum(0).int()
    gate, value = grouped_mm(x[order // K], up.mT, ends).chunk(2, -1)
    y = grouped_mm(torch.nn.functional.silu(gate) * value, down.mT, ends)
    y = y * w.reshape(-1)[order][:, None].to(x.dtype)
    return torch.zeros_like(y).index_copy(0, order, y).view(T, K, H).sum(1)


def products(case: Case, kind: str) -> dict[str, float]:
    """TFLOP/s of the up projection's three products, and of their peers."""
    T, H, I, E, K = case.tokens, case.hidden, case.intermediate, case.experts, case.top_k  # noqa: E741
    layout = ab.ExpertLayout.from_topk(routing(T, E, K, kind).to(DEVICE), E)
    ends, tokens, rows = layout.offsets[1:].contiguous(), (layout.row_to_slot // K).long(), T * K
    x, x_rows, up, h = randn(T, H), randn(rows, H), randn(E, 2 * I, H), randn(rows, 2 * I)
    out, d_x, d_up = torch.empty_like(h), torch.empty_like(x_rows), torch.empty_like(up)
    runs: dict[str, Callable[[], object]] = {
        "dense": lambda: x_rows @ up[0].T,
        "fwd triton": lambda: gemm(x_rows, up, layout, out),
        "fwd grouped_mm": lambda: grouped_mm(x_rows, up.mT, ends),
        "fwd gather triton": lambda: gemm(x, up, layout, out, x_rows=TOKEN),
        "fwd gather + grouped_mm": lambda: grouped_mm(x[tokens], up.mT, ends),
        "dX triton": lambda: gemm(h, up.mT, layout, d_x),
        "dX grouped_mm": lambda: grouped_mm(h, up, ends),
        "dW triton": lambda: weight_gradient(h, x_rows, layout, d_up, z_rows=ROW, x_rows=ROW),
        "dW grouped_mm": lambda: grouped_mm(h.T, x_rows, ends),
    }
    if "hopper" in backends():
        from anabranch.ops.grouped_gemm.backends.hopper import launch as hopper

        runs |= {
            "fwd hopper": lambda: hopper.gemm(x_rows, up, hopper.rows_of(layout), out),
            "fwd gather hopper": lambda: hopper.gemm(x, up, hopper.rows_of(layout), out, gathered=True),
            "dX hopper": lambda: hopper.gemm(h, up.mT, hopper.rows_of(layout), d_x),
            "dW hopper": lambda: hopper.weight_gradient(h, x_rows, hopper.rows_of(layout), d_up),
        }
    return {name: 4e-9 * rows * H * I / ms(run) for name, run in runs.items()}


def layer(case: Case, kind: str) -> dict[str, float]:
    """TFLOP/s of moe_mlp, and of the layer through a compiled grouped_mm."""
    T, H, I, E, K = case.tokens, case.hidden, case.intermediate, case.experts, case.top_k  # noqa: E741
    x, up, down = randn(T, H, grad=True), randn(E, 2 * I, H, grad=True), randn(E, H, I, grad=True)
    w, grad = torch.rand(T, K, device=DEVICE, requires_grad=True), randn(T, H)
    ids, result = routing(T, E, K, kind).to(DEVICE), {}
    ours = [(name, partial(ab.moe_mlp, backend=name)) for name in backends()]
    for name, run in (*ours, ("grouped_mm", torch.compile(peer))):

        def forward(run=run) -> None:
            with torch.no_grad():
                run(x, up, down, ids, w)

        def step(run=run) -> None:
            torch.autograd.grad(run(x, up, down, ids, w), (x, up, down, w), grad)

        result[f"{name} fwd"] = 6e-9 * T * K * H * I / ms(forward)
        result[f"{name} fwd+bwd"] = 18e-9 * T * K * H * I / ms(step)
    return result


def bandwidth() -> Results:
    """GB/s, bytes read once and written once, beside a large device copy and one of as many bytes."""
    big = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(big)
    copy = 2 * big.numel() / graph_ms(lambda: other.copy_(big), 3) / 1e6
    results: Results = {"copy": {"GB/s": copy}}

    def note(name: str, size: int, run: Callable[[], object]) -> None:
        speed, half = size / graph_ms(run) / 1e6, size // 2
        alike = size / graph_ms(lambda: other[:half].copy_(big[:half])) / 1e6
        results[name] = {"GB/s": speed, "of copy": speed / copy, "of a copy alike": speed / alike}

    for T, H, K, E in ((16384, 2048, 8, 128), (8192, 4096, 2, 8)):
        x, y, w = randn(T, H), randn(T * K, H), torch.rand(T, K, device=DEVICE)
        ids = routing(T, E, K).to(DEVICE)
        layout, size = ab.ExpertLayout.from_topk(ids, E), 2 * (T + T * K) * H
        note(f"permute T{T} H{H} K{K}", size, lambda: ab.permute(x, layout))
        note(f"sort + permute T{T} H{H} K{K}", size, lambda: ab.permute(x, ab.ExpertLayout.from_topk(ids, E)))
        note(f"unpermute weighted T{T} H{H} K{K}", size, lambda: ab.unpermute(y, layout, w))
    for B, S, heads, kv, D in ((4, 8192, 32, 8, 128), (1, 8192, 16, 2, 128)):
        q, k, angle = randn(B, heads, S, D), randn(B, kv, S, D), torch.rand(B, S, D // 2, device=DEVICE) * 6
        cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
        size, three = 4 * (q.numel() + k.numel()), (torch.stack((cos,) * 3), torch.stack((sin,) * 3))
        note(f"rope B{B} H{heads}/{kv}", size + 8 * cos.numel(), lambda: ab.rope(q, k, cos, sin))
        note(
            f"mrope B{B} H{heads}/{kv}", size + 8 * cos.numel(), lambda: ab.mrope(q, k, *three, [16, 24, 24])
        )
    return results


def dual() -> Results:
    """TFLOP/s of dual_gemm and of cuBLAS called twice."""
    results: Results = {}
    for m0, m1, k, n0, n1 in (
        (8192, 4096, 2048, 11008, 4096),
        (512, 256, 1024, 2048, 4096),
        (2048, 64, 2048, 11008, 4096),
    ):
        x0, x1, w0, w1 = randn(m0, k), randn(m1, k), randn(n0, k), randn(n1, k)
        flops = 2e-9 * k * (m0 * n0 + m1 * n1)
        ours, twice = graph_ms(lambda: ab.dual_gemm(x0, x1, w0, w1)), graph_ms(lambda: (x0 @ w0.T, x1 @ w1.T))
        results[f"dual_gemm {m0},{m1},{k},{n0},{n1}"] = {"ours": flops / ours, "cuBLAS twice": flops / twice}
    return results


def small() -> Results:
    """ms of moe_mlp's forward for few tokens, and of reading the active experts' weights once at copy bandwidth."""
    case, results = BENCHMARKS["qwen"], {}
    up, down = (
        randn(case.experts, 2 * case.intermediate, case.hidden),
        randn(case.experts, case.hidden, case.intermediate),
    )
    for T in (1, 8, 64, 256, 1024, 4096):
        x, w = randn(T, case.hidden), torch.rand(T, case.top_k, device=DEVICE)
        ids = routing(T, case.experts, case.top_k).to(DEVICE)
        with torch.no_grad():
            graph, eager = (
                graph_ms(lambda: ab.moe_mlp(x, up, down, ids, w)),
                ms(lambda: ab.moe_mlp(x, up, down, ids, w)),
            )
        floor = ids.unique().numel() * 6 * case.hidden * case.intermediate / 4.25e9
        results[f"T{T}"] = {"graph ms": graph, "eager ms": eager, "weights ms": floor}
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    check()
    results: dict[str, Results] = {"products": {}, "layer": {}}
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")

    def keep(title: str, rows: Results) -> None:
        """A long run that is cut off leaves what it has."""
        results.setdefault(title, {}).update(rows)
        for name, values in rows.items():
            print(
                f"{title:9s} {name:32s}",
                *(f"{key} {value:.4g};" for key, value in values.items()),
                flush=True,
            )
        if out:
            out.write_text(json.dumps(results, indent=1))

    for shape in SHAPES:
        for kind in ("random", "zipf"):
            for part in (products, layer):
                keep(part.__name__, {f"{shape} {kind}": part(BENCHMARKS[shape], kind)})
                torch.cuda.empty_cache()
    for whole in (bandwidth, dual, small):
        keep(whole.__name__, whole())


if __name__ == "__main__":
    main()
