"""torch.compile takes every function whose output sizes do not depend on data, whole and with dynamic sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch.interop.wallx import backend, ops
from anabranch.testing import assert_same, randn

SIZES = (7, 64, 65)
H, K, D = 8, 2, 8


def gemm(t, device):
    args = [randn(*size, device=device) for size in ((t, H), (t + 2, H), (H, 12), (H, 5))]
    return lambda *args: ops.asym_dual_gmm(*args), args, 4


def gemm_separated(t, device):
    args = [randn(*size, device=device) for size in ((H, t), (H, t), (6, H), (5, H))]

    def run(x0, x1, w0, w1):
        output = torch.empty(x1.shape[1], 5, device=x0.device)
        y0, y1 = backend.asym_dual_gmm_separated(x0, x1, w0, w1, None, output, True, True)
        return y0 + 1, y1 + 1, output

    return run, args, 0


def moe(t, device):
    x, prob = randn(t, H, device=device), torch.rand(t, K, device=device)
    ids = torch.randint(-1, 5, (t, K)).to(device)

    def run(x, prob, ids):
        permuted, row_id_map = ops.permute(x, ids, 10)
        return ops.unpermute(permuted.sin(), row_id_map, prob)

    return run, [x, prob, ids], 2


def moe_lower(t, device):
    x, prob = randn(t, H, device=device), torch.rand(t, K, device=device)
    ids = torch.randint(-1, 5, (t, K)).to(device)

    def run(x, prob, ids):
        permuted, row_id_map, _ = backend.permute(x, ids, 0, None, 0)
        out = backend.unpermute(permuted, row_id_map, prob, x.shape[0], K)
        return (out, *backend.unpermute_bwd(out, permuted, row_id_map, prob))

    return run, [x, prob, ids], 0


def turn(t, device):
    args = [randn(*size, device=device) for size in ((1, 4, t, D), (1, 2, t, D), (3, 1, t, D), (3, 1, t, D))]
    return lambda *args: ops.multimodal_rope(*args, [1, 2, 1]), args, 2


def turn_lower(t, device):
    args = [randn(*size, device=device) for size in ((1, 4, t, D), (1, 2, t, D), (3, 1, t, D), (3, 1, t, D))]

    def run(q, k, cos, sin):
        q_out, k_out, q_own = torch.empty_like(q), torch.empty_like(k), q.clone()
        backend.rope(q, k, cos, sin, q_out, k_out, [2, 4, 2])
        backend.rope(q_own, k_out, cos, sin, q_own, k_out, [2, 4, 2])
        grad_q, grad_k = torch.empty_like(q), torch.empty_like(k)
        backend.rope_bwd(q_own, k_out, q, k, cos, sin, grad_q, grad_k, [2, 4, 2])
        return q_out, k_out, q_own, grad_q, grad_k

    return run, args, 0


CASES = [gemm, gemm_separated, moe, moe_lower, turn, turn_lower]


def results(function, args, leaves):
    args = [a.detach().clone().requires_grad_(i < leaves) for i, a in enumerate(args)]
    outs = function(*args)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    if leaves:
        sum(out.sin().sum() for out in outs).backward()
    return outs + [a.grad for a in args[:leaves]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_compiles_whole(device, case):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case(SIZES[0], device)[0], fullgraph=True, dynamic=True, backend=counter)
    for t in SIZES:
        function, args, leaves = case(t, device)
        for mine, eager in zip(results(compiled, args, leaves), results(function, args, leaves), strict=True):
            assert_same(mine, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_fake_tensors_run_no_kernel(device, case):
    function, args, leaves = case(SIZES[0], device)
    real = results(function, args, leaves)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = results(function, [mode.from_tensor(a) for a in args], leaves)
    for mine, eager in zip(fake, real, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (eager.shape, eager.dtype, eager.stride())
