"""torch.compile on a GPU, by the inductor: one graph, for every number of tokens, with eager's values."""

import pytest
import torch
import torch._dynamo.testing

from anabranch import moe_mlp
from anabranch.nn import MoE
from anabranch.testing import assert_same, assert_within_budget, in_any_order, randn, routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # the inductor's advice, as to allow TF32
]
E, K, H, WIDTH = 8, 2, 64, 48
TOKENS = (50, 64, 65, 200, 33)  # the first is no other size: equal ones would be taken for one


@pytest.fixture
def one_graph():
    """Compiles whole graphs by the inductor; counts them, and refuses another after the first two calls."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    yield lambda function: torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_moe_mlp(one_graph, dtype):
    compile_whole, counter = one_graph
    compiled = compile_whole(moe_mlp)
    up, down = (randn(*s, dtype=dtype, device="cuda") for s in ((E, 2 * WIDTH, H), (E, H, WIDTH)))
    leaves = [up.requires_grad_(), down.requires_grad_()]
    for tokens in TOKENS:
        x = randn(tokens, H, dtype=dtype, device="cuda").requires_grad_()
        weights = torch.rand(tokens, K, device="cuda").requires_grad_()
        ids = routing(tokens, E, K, "every_other", dropped=0.1, device="cuda")
        with torch._dynamo.config.patch(error_on_recompile=tokens != TOKENS[0]):
            out = compiled(x, up, down, ids, weights)
        expected = moe_mlp(x, up, down, ids, weights)
        assert_same(out, expected)
        grad = randn(tokens, H, dtype=dtype, device="cuda")
        grads = (torch.autograd.grad(y, (x, weights, *leaves), grad) for y in (out, expected))
        for a, b in zip(*grads, strict=True):
            assert_same(a, b)
    assert counter.frame_count == 1


def test_a_layer(one_graph):
    compile_whole, counter = one_graph
    layer = MoE(H, WIDTH, E, K, shared_intermediate_size=32, device="cuda")
    twin = MoE(H, WIDTH, E, K, shared_intermediate_size=32, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    compiled = compile_whole(layer)
    for tokens in TOKENS:
        x = randn(tokens, H, device="cuda")
        with torch._dynamo.config.patch(error_on_recompile=tokens not in TOKENS[:2]):
            results = []
            for module, value in ((compiled, x), (layer, x), (twin, x.double())):
                parameters = list((twin if module is twin else layer).parameters())
                y = module(value)
                results.append([y.detach(), *torch.autograd.grad(y.square().sum(), parameters)])
        for actual, plain, truth in zip(*results, strict=True):
            baseline = in_any_order(plain, truth, tokens * K + H + WIDTH)
            assert_within_budget(actual, truth, baseline, rows=False)
    assert counter.frame_count <= 2  # a float attribute makes the compiler start over once
