"""Each kernel of moe_mlp's hopper backend alone, in a process of its own that a time limit ends: which one hangs?

    python benchmarks/hopper_kernels.py [NAME ...]

Prints TFLOP/s, or what went wrong, at T16384 H2048 I768 E128 K8 unless SIZES says otherwise. Needs an H100 or H200.
"""

import os
import subprocess
import sys

LIMIT = 60
SIZES = tuple(int(size) for size in os.environ.get("SIZES", "16384 2048 768 128 8").split())
NAMES = ("up", "up_keeping_h", "down", "d_h", "d_h_alone", "d_x", "d_down", "d_gate_up")


def time_one(name: str) -> None:
    """Runs a kernel 35 times, saying so as it goes."""
    import torch
    from triton.testing import do_bench

    import anabranch
    from anabranch.epilogues import resolve
    from anabranch.ops.moe_mlp.backends.hopper import launch
    from anabranch.testing import routing

    T, H, I, E, K = SIZES  # noqa: E741

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    swiglu = resolve("moe_mlp", "swiglu")
    ids, weights = routing(T, E, K, device="cuda"), torch.rand(T, K, device="cuda")
    rows, R = launch.rows_of(anabranch.ExpertLayout.from_topk(ids, E)), T * K
    x, gate_up, down = new(T, H), new(E, 2 * I, H), new(E, H, I)
    h, a, y = new(R, 2 * I), new(R, I), new(R, H)
    d_h, d_a, d_weights = torch.empty_like(h), torch.empty_like(a), torch.empty_like(weights)
    d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    up = dict(epilogue=swiglu, gathered=True)
    before = (y, down.mT, h, weights, rows, swiglu)
    kernels = {
        "up": (2, lambda: launch.gemm(x, gate_up, rows, a, **up)),
        "up_keeping_h": (2, lambda: launch.gemm(x, gate_up, rows, a, h=h, **up)),
        "down": (1, lambda: launch.gemm(a, down, rows, y)),
        "d_h": (1, lambda: launch.pre_activation_gradient(*before, d_h=d_h, a_out=d_a, d_scale=d_weights)),
        "d_h_alone": (1, lambda: launch.pre_activation_gradient(*before, d_h=d_h)),
        "d_x": (2, lambda: launch.gemm(h, gate_up.mT, rows, y)),
        "d_down": (1, lambda: launch.weight_gradient(y, a, rows, d_down)),
        "d_gate_up": (2, lambda: launch.weight_gradient(h, x, rows, d_gate_up, b_gathered=True)),
    }
    products, run = kernels[name]
    for times in (1, 4, 30):
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        print(f"{name}: {times} more ended", file=sys.stderr, flush=True)
    milliseconds = do_bench(run, return_mode="median")
    print(f"{name}: {milliseconds:.3f} ms, {2 * products * R * H * I / milliseconds / 1e9:.0f} TFLOP/s")


def main() -> None:
    """Runs the kernels named, or all."""
    for name in sys.argv[1:] or NAMES:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--alone", name], capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired as ended:
            print(f"{name}: did not end in {LIMIT} s; {(ended.stderr or b'').decode()[-200:]}")
        else:
            print(done.stdout.strip() or f"{name}: {done.stderr[-500:]}", flush=True)


if __name__ == "__main__":
    if "--alone" in sys.argv:
        time_one(sys.argv[-1])
    else:
        main()
