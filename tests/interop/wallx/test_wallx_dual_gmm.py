"""The product of two experts, at both levels."""

import itertools

import pytest
import torch

from anabranch.interop.wallx import backend, ops
from anabranch.testing import assert_within_budget, in_any_order, randn, strided

FLAGS = [False, True]
PAIRS = list(itertools.product(FLAGS, FLAGS))
ROWS, INNER, COLUMNS = (5, 3), (7, 4), (6, 9)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def stored(matrix, transposed):
    return matrix.mT.contiguous() if transposed else matrix


def problem(device, dtype, trans_a=False, trans_b=False, rows=ROWS):
    """What the call takes, and the operands as (m, k) and (k, n)."""
    plain = [
        (randn(m, k, dtype=dtype, device=device), randn(k, n, dtype=dtype, device=device))
        for m, k, n in zip(rows, INNER, COLUMNS, strict=True)
    ]
    inputs = [stored(x, trans_a) for x, _ in plain]
    return [*inputs, *(stored(w, trans_b) for _, w in plain)], plain


def product(actual, a, b, swap=False):
    """Demands a @ b, stored as it is or transposed."""
    truth = a.double() @ b.double()
    plain = in_any_order(a @ b, truth, a.shape[1])
    assert_within_budget(actual, stored(truth, swap), stored(plain, swap))


def check(outputs, plain):
    for y, (x, w) in zip(outputs, plain, strict=True):
        assert y.dtype == x.dtype
        product(y, x, w)


@pytest.mark.parametrize(
    "given", [(), (0,), (1,), (0, 1)], ids=lambda which: f"outputs{''.join(map(str, which))}"
)
@pytest.mark.parametrize(("trans_a", "trans_b"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pair_of_transposes(device, dtype, trans_a, trans_b, given):
    args, plain = problem(device, dtype, trans_a, trans_b)
    outputs = [None, None]
    for i in given:
        outputs[i] = torch.full((ROWS[i], COLUMNS[i]), float("nan"), dtype=dtype, device=device)
    found = backend.asym_dual_gmm_separated(*args, *outputs, trans_a, trans_b)
    assert isinstance(found, tuple)
    for i, (y, output) in enumerate(zip(found, outputs, strict=True)):
        assert y.shape == (ROWS[i], COLUMNS[i])
        assert output is None or y is output
    check(found, plain)


@pytest.mark.parametrize("trans_b", FLAGS)
def test_outputs_of_any_strides(device, trans_b):
    args, plain = problem(device, torch.float32, trans_b=trans_b)
    outputs = [
        strided(torch.zeros(m, n, device=device), "padded") for m, n in zip(ROWS, COLUMNS, strict=True)
    ]
    check(backend.asym_dual_gmm_separated(*args, *outputs, trans_b=trans_b), plain)


@pytest.mark.parametrize("rows", [(0, 9), (9, 0), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("trans_b", FLAGS)
def test_experts_without_rows(device, rows, trans_b):
    args, plain = problem(device, torch.float32, trans_b=trans_b, rows=rows)
    args = [value.requires_grad_() for value in args]
    outputs = ops.asym_dual_gmm(*args, trans_b)
    check(outputs, plain)
    (outputs[0].sum() + outputs[1].sum()).backward()
    for i in (0, 1):
        weight = args[2 + i]
        assert weight.grad.shape == weight.shape
        assert rows[i] or not weight.grad.any()


@pytest.mark.parametrize("trans_b", FLAGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(device, dtype, trans_b):
    args, plain = problem(device, dtype, trans_b=trans_b)
    args = [value.requires_grad_() for value in args]
    outputs = ops.asym_dual_gmm(*args, trans_b)
    assert isinstance(outputs, tuple)
    check(outputs, plain)
    grads = [randn(*y.shape, dtype=dtype, device=device) for y in outputs]
    torch.autograd.backward(outputs, grads)
    for i, ((x, w), g) in enumerate(zip(plain, grads, strict=True)):
        product(args[i].grad, g, w.mT)
        product(args[2 + i].grad, x.mT, g, trans_b)


@pytest.mark.parametrize("needs", list(itertools.product(FLAGS, repeat=4)), ids=str)
def test_only_the_gradients_needed(device, needs):
    args, plain = problem(device, torch.float32)
    args = [value.requires_grad_(need) for value, need in zip(args, needs, strict=True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: kept.append(value.data_ptr()) or value, lambda v: v
    ):
        outputs = ops.asym_dual_gmm(*args)
    # The gradient of an input reads its weight, and the other way round.
    for i in range(4):
        assert (args[i].data_ptr() in kept) == needs[(i + 2) % 4]
    if any(needs):
        sum(y.sum() for y in outputs).backward()
    assert [value.grad is not None for value in args] == list(needs)
    for value, (x, w) in zip(args[2:], plain, strict=True):
        if value.grad is not None:
            ones = torch.ones(x.shape[0], w.shape[1], device=device)
            product(value.grad, x.mT, ones)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_matmul_does(device, dtype):
    args, plain = problem(device, torch.float32)
    with torch.autocast(device, dtype):
        outputs = ops.asym_dual_gmm(*args)
    rounded = [(x.to(dtype), w.to(dtype)) for x, w in plain]
    check(outputs, rounded)


@pytest.mark.gpu
def test_one_launch():
    args, _ = problem("cuda", torch.bfloat16)
    outputs = [
        torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for m, n in zip(ROWS, COLUMNS, strict=True)
    ]
    backend.asym_dual_gmm_separated(*args, *outputs)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        backend.asym_dual_gmm_separated(*args, *outputs)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [event.name for event in on_device if not event.name.startswith("Mem")] == [on_device[0].name]
