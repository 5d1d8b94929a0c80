"""Modules and position builders on a GPU: what they compute on the CPU, in every precision."""

import copy
from dataclasses import fields, is_dataclass

import pytest
import torch

from anabranch.nn import Experts, MoE, MultiExpertLinear, Rotary, Router, load_balance_loss, z_loss
from anabranch.ops.positions.api import rope_index, vision_rotary, window_index
from anabranch.ops.positions.cases import CASES
from anabranch.testing import assert_same, assert_within_budget, in_any_order, randn

pytestmark = pytest.mark.gpu
T, H, INNER, E, K = 40, 32, 24, 6, 2


def moe():
    router = Router(H, E, K, score="sigmoid", renormalize=True, selection_bias=True)
    return MoE(H, INNER, E, K, router=router, shared_intermediate_size=16, shared_gate=True)


def choice():
    return torch.randint(-1, E + 1, (T, K)), torch.rand(T, K)


# Maker, and arguments of the forward.
MODULES = {
    "router": (lambda: Router(H, E, K, bias=True), lambda: [randn(T, H)]),
    "experts": (lambda: Experts(E, H, INNER, bias=True), lambda: [randn(T, H), *choice()]),
    "interleaved experts": (
        lambda: Experts(E, H, INNER, activation="gpt_oss", gate_layout="interleaved", transpose_weight=True),
        lambda: [randn(T, H), *choice()],
    ),
    "moe": (moe, lambda: [randn(2, T // 2, H)]),
    "multi_expert_linear": (
        lambda: MultiExpertLinear((16, 8), (24, 5), bias=True),
        lambda: [[randn(T, 16), randn(0, 8)]],
    ),
    "rotary": (lambda: Rotary(16), lambda: [randn(1, 2, T, 16), randn(1, 1, T, 16), torch.arange(T)]),
    "rotary sections": (
        lambda: Rotary(16, sections=[4, 2, 2], order="interleaved"),
        lambda: [randn(1, 2, T, 16), randn(1, 1, T, 16), torch.randint(0, 99, (3, 1, T))],
    ),
}


def cast(value, device, dtype):
    if isinstance(value, list):
        return [cast(v, device, dtype) for v in value]
    if value.is_floating_point():
        # The truth is that of inputs as the low precision has them.
        return value.to(device, dtype).requires_grad_()
    return value.to(device)


def tensors(value):
    """Those that gradients flow through, of a tensor or of several."""
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    several = [value] if isinstance(value, torch.Tensor) else value
    flat = [part for v in several for part in (tensors(v) if isinstance(v, (list, tuple)) else [v])]
    return [v for v in flat if isinstance(v, torch.Tensor) and v.requires_grad]


def results(module, arguments):
    outs = tensors(module(*arguments))
    grads = [torch.arange(y.numel(), dtype=torch.float64).sin().view(y.shape).to(y) for y in outs]
    leaves = [*tensors(arguments), *module.parameters()]
    return [*(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, grads, materialize_grads=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_what_it_does_on_the_cpu(name, dtype):
    make, inputs = MODULES[name]
    module, given = make().to(dtype), cast(inputs(), "cpu", dtype)
    twin = copy.deepcopy(module).double()
    truth = results(twin, cast(given, "cpu", torch.float64))
    rough = results(module, given)
    there = copy.deepcopy(module).cuda()
    found = results(there, cast(given, "cuda", dtype))
    for index, (actual, exact, near) in enumerate(zip(found, truth, rough, strict=True)):
        assert actual.is_cuda
        assert actual.dtype == near.dtype
        if not exact.numel():
            continue
        if dtype == torch.float64:
            torch.testing.assert_close(actual.cpu(), near, rtol=1e-10, atol=1e-10)
            continue
        # A few roundings of the largest number, where the CPU's arithmetic was lucky.
        near = in_any_order(near, exact.double(), T * K + H + INNER)
        lucky = 2 * torch.finfo(actual.dtype).eps * exact.abs().max()
        near = exact + (near.double() - exact).abs().clamp(min=float(lucky))
        assert_within_budget(actual.cpu(), exact.double(), near, name=f"result {index}", rows=False)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_router_tells_apart_logits_that_bf16_does_not(autocast):
    """Logits 1 and 1 + 2**-9, of which the larger is chosen; equal ones go to the lower id."""
    router = Router(2, 3, 2, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2**-9], [1.0, 0.0]]))
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        routing = router(torch.ones(4, 2, dtype=torch.bfloat16, device="cuda"))
    assert routing.logits.tolist() == [[1.0, 1.001953125, 1.0]] * 4
    assert routing.ids.tolist() == [[1, 0]] * 4


def test_losses_and_the_selection_bias():
    layer = moe().cuda()
    y, routing = layer(randn(T, H, device="cuda"), return_routing=True)
    loss = y.square().mean() + load_balance_loss(routing, score="sigmoid") + z_loss(routing.logits)
    loss.backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in layer.parameters())
    before = layer.router.selection_bias.clone()
    layer.router.update_selection_bias(torch.arange(E, device="cuda"))
    assert (layer.router.selection_bias != before).any()


def test_a_layer_built_there_is_made_of_its_tensors():
    layer = MoE(H, INNER, E, K, device="cuda", dtype=torch.bfloat16)
    assert all(value.is_cuda for value in (*layer.parameters(), *layer.buffers()))
    assert layer(randn(T, H, dtype=torch.bfloat16, device="cuda")).is_cuda


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_positions_of_real_prompts(case):
    given = case.arguments()
    there = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    for actual, expected in zip(rope_index(**there), rope_index(**given), strict=True):
        assert actual.is_cuda
        assert_same(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grids", [[], [[1, 8, 12], [2, 10, 6]]], ids=["none", "some"])
def test_vision_builders(grids, dtype):
    frequencies = torch.rand(20).to(dtype)
    for given in (grids, torch.tensor(grids, dtype=torch.int64).view(-1, 3).cuda()):
        angles = vision_rotary(frequencies.cuda(), given, 2)
        assert angles.is_cuda
        assert_same(angles.cpu(), vision_rotary(frequencies, grids, 2))
    for actual, expected in zip(
        window_index(given, 112, 2, 14), window_index(grids, 112, 2, 14), strict=True
    ):
        assert actual.is_cuda
        assert_same(actual.cpu(), expected)
