"""topk_router as an operator: schema, compilation, autocast, checkpointing, second derivatives."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anabranch.errors import UnsupportedError
from anabranch.ops.topk_router import autograd
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("topk_router")
E, K = 8, 2
DEEPSEEK = dict(score="sigmoid", renormalize=True, num_groups=4, top_groups=2, scaling=2.5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(grad, biased):
    logits = randn(5, E).requires_grad_(grad)
    bias = randn(E) if biased else None
    options = (K, "sigmoid", "score_then_topk", True, 4, 2, 2.5, None)
    torch.library.opcheck(autograd.topk_router_forward, (logits, bias, *options))
    ids = torch.tensor([[0, 1]]).expand(5, K)
    torch.library.opcheck(
        autograd.topk_router_backward,
        (randn(5, K), logits.detach(), ids, *options),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.cpu
def test_second_derivative_is_refused_but_for_the_reference():
    logits = randn(5, E, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(topk_router(logits, K)[0].sum(), logits, create_graph=True)
    with pytest.raises(UnsupportedError, match="topk_router: create_graph"):
        grad.sum().backward()
    assert torch.autograd.gradgradcheck(lambda x: topk_router(x, K, backend="reference")[0], logits)


@pytest.mark.cpu
def test_compiles_once_for_any_number_of_tokens():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(logits, bias):
        # Literals: a float from elsewhere would be traced as an input first, and count twice.
        weights, ids = topk_router(
            logits, K, bias=bias, score="sigmoid", num_groups=4, top_groups=2, scaling=2.5
        )
        return (weights * (ids + 1)).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    bias = randn(E)
    for tokens in (7, 64, 65):
        logits = randn(tokens, E).requires_grad_()
        (grad,) = torch.autograd.grad(compiled(logits, bias), logits)
        (expected,) = torch.autograd.grad(loss(logits, bias), logits)
        assert_same(grad, expected)
    assert counter.frame_count == 1


@pytest.mark.cpu
def test_fake_tensors():
    with FakeTensorMode():
        logits = torch.empty(5, E, dtype=torch.bfloat16, requires_grad=True)
        weights, ids = topk_router(logits, K, **DEEPSEEK)
        weights.sum().backward()
        assert (weights.shape, weights.dtype) == ((5, K), torch.float32)
        assert (ids.shape, ids.dtype) == ((5, K), torch.int64)
        assert logits.grad.dtype == torch.bfloat16


def test_autocast_changes_nothing(device):
    logits = randn(50, E).requires_grad_()
    weights, ids = topk_router(logits, K, **DEEPSEEK)
    (grad,) = torch.autograd.grad(weights, logits, torch.ones_like(weights))
    with torch.autocast(device, torch.bfloat16):
        cast_weights, cast_ids = topk_router(logits, K, **DEEPSEEK)
        (cast_grad,) = torch.autograd.grad(cast_weights, logits, torch.ones_like(weights))
    assert_same(cast_weights, weights)
    assert_same(cast_ids, ids)
    assert_same(cast_grad, grad)


@pytest.mark.parametrize("options", [{}, DEEPSEEK, dict(order="topk_then_score")], ids=str)
def test_keeps_the_logits_and_the_ids_alone(options):
    kept = []
    logits = randn(5, E).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, ids = topk_router(logits, K, **options)
    assert [t.data_ptr() for t in kept] == [logits.data_ptr(), ids.data_ptr()]


def test_recomputes_the_same_under_checkpoint():
    logits = randn(1, E).expand(512, E).clone()
    logits[:, 5] = logits[:, 2] = logits.max() + 1  # two equal experts
    logits.requires_grad_()

    def loss(logits):
        weights, ids = topk_router(logits, 1, renormalize=False)
        return (weights * torch.arange(1, E + 1)[ids]).sum()

    (expected,) = torch.autograd.grad(loss(logits), logits)
    for _ in range(20):
        (grad,) = torch.autograd.grad(checkpoint(loss, logits, use_reentrant=False), logits)
        assert_same(grad, expected)
