"""What holds of every operation on a GPU: the same bits every time, no wait for the host, any stream, any GPU."""

import pytest
import torch

from anabranch.testing import assert_same
from anabranch.testing.steps import STEPS, results

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32]
every_step = pytest.mark.parametrize("name", STEPS)


def run(name, dtype=torch.bfloat16, device="cuda", seed=0):
    step = STEPS[name]
    return results(step, step.inputs(dtype, device, seed))


def same(actual, expected, name):
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_same(a, b, name=f"{name}, result {index}")


@every_step
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forty_repeats_are_equal_to_the_bit(name, dtype, deterministic):
    step = STEPS[name]
    inputs = step.inputs(dtype, "cuda")
    expected = results(step, inputs)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(40):
            same(results(step, inputs), expected, name)
    finally:
        torch.use_deterministic_algorithms(False)


@every_step
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(name, dtype):
    step = STEPS[name]
    inputs = step.inputs(dtype, "cuda")
    results(step, inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(step, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_step
def test_a_graph_of_forward_and_backward_follows_its_inputs(name):
    """Captured once, replayed for other numbers and another routing in the same memory."""
    step = STEPS[name]
    static = step.inputs(torch.bfloat16, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(step, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(step, static)
    for seed in (1, 2):
        fresh = step.inputs(torch.bfloat16, "cuda", seed)
        for key, value in fresh.items():
            static[key].copy_(value)
        graph.replay()
        same(captured, results(step, fresh), f"{name}, replay {seed}")


@every_step
def test_two_streams_at_once(name):
    """Two problems in flight together are two problems one after the other."""
    step = STEPS[name]
    problems = [step.inputs(torch.bfloat16, "cuda", seed) for seed in (1, 2)]
    expected = [results(step, inputs) for inputs in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    found = {}
    for round_number in range(10):
        for index, (stream, inputs) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                found[round_number, index] = results(step, inputs)
    torch.cuda.synchronize()
    for (round_number, index), values in found.items():
        same(values, expected[index], f"{name}, round {round_number}, stream {index}")


@every_step
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one(name):
    """The tensors' device rules; the results are those of the other GPU, to the bit where they are alike."""
    assert torch.cuda.current_device() == 0
    there = run(name, device="cuda:1")
    assert all(value.device.index == 1 for value in there)
    assert torch.cuda.current_device() == 0
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        same([value.to("cuda:0") for value in there], run(name, device="cuda:0"), name)
