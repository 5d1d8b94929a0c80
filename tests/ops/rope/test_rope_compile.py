"""rope under the compiler, fake tensors and the operator checks."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.rope.autograd import rope_forward, rope_inplace
from anabranch.testing import assert_same, randn

INDEX = torch.tensor([[0, 2, -1, 5], [3, 1, 9, 0]])
OPERANDS = {
    "plain": ((2, 4, 8), None, "half", 8, []),
    "partial": ((1, 4, 4), None, "adjacent", 4, []),
    "positions": ((6, 8), INDEX, "half", 8, []),
    "rows": ((3, 2, 4, 4), None, "half", 8, [1, 2, 1]),
    "rows_of_positions": ((6, 8), INDEX.expand(3, 2, 4), "half", 8, [1, 2, 1]),
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("with_k", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_operator(name, with_k, inplace):
    shape, positions, pairing, rotary_dim, sections = OPERANDS[name]
    q, k = randn(2, 4, 3, 8).transpose(1, 2), (randn(2, 1, 4, 8) if with_k else None)
    if not inplace:
        q.requires_grad_()
    rest = (randn(*shape), randn(*shape), positions, pairing, rotary_dim, 1, sections, "blocked", False, None)
    results = torch.library.opcheck(rope_inplace if inplace else rope_forward, (q, k, *rest))
    assert set(results.values()) == {"SUCCESS"}


def layer(q, k, cos, sin, index):
    """Everything once, on tensors of one length."""
    q, k = rope(q, k, cos, sin)
    q, _ = rope(q, None, cos[0], sin[0], pairing="adjacent", positions=index)
    rows = torch.stack((cos, sin, cos)), torch.stack((sin, cos, sin))
    return mrope(q, k, *rows, [2, 1, 1], order="interleaved")


def inputs(batch, tokens, grad):
    # Sizes that happen to be equal would be taken for one; these differ.
    q, k = (randn(batch, h, tokens, 8).requires_grad_(grad) for h in (3, 4))
    return q, k, randn(batch, tokens, 8), randn(batch, tokens, 8), torch.arange(tokens) - 1


def test_one_graph_for_every_length():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for batch, tokens in ((2, 5), (3, 7), (4, 64)):
        arguments = inputs(batch, tokens, grad=True)
        outs, expected = compiled(*arguments), layer(*arguments)
        grads = [torch.autograd.grad([y.sin().sum() for y in ys], arguments[:2]) for ys in (outs, expected)]
        for a, b in zip((*outs, *grads[0]), (*expected, *grads[1]), strict=True):
            assert_same(a, b)
    assert counter.frame_count == 1


def test_inplace_by_the_inductor():
    torch._dynamo.reset()

    def write(q, k, cos, sin):
        q = q + 1
        rope(q, k, cos, sin, inplace=True)
        rope(q, None, sin, cos, inplace=True)
        return q

    compiled = torch.compile(write, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        q, k, cos, sin, _ = inputs(2, tokens, grad=False)
        copy = k.clone()
        expected = write(q, copy, cos, sin)
        assert_same(compiled(q, k, cos, sin), expected)
        assert_same(k, copy)


def test_fake_tensors():
    with FakeTensorMode():
        q, k, cos, sin, index = inputs(2, 5, grad=True)
        y, z = layer(q, k, cos, sin, index)
        (y.sum() + z.sum()).backward()
        assert (y.shape, z.shape) == (q.shape, k.shape)
        assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
        y, _ = rope(q.detach().transpose(1, 2), None, cos, sin, head_axis=2)
        assert y.is_contiguous()


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, *arguments):
            return layer(*arguments)

    arguments = inputs(2, 5, grad=False)
    program = torch.export.export(Layer(), arguments)
    for a, b in zip(program.module()(*arguments), layer(*arguments), strict=True):
        assert_same(a, b)
