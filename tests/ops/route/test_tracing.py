"""The routing operators are proper operators: checked schemas, fakes that agree, whole graphs."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch import ExpertLayout
from anabranch.ops.route import autograd
from anabranch.testing import routing

CALLS = {
    "from_topk": lambda T: (routing(T, 5, 2, dropped=0.2), 5),
    "from_counts": lambda T: (torch.tensor([T, 0, 3]), 2 * T),
    "from_sorted": lambda T: (torch.tensor([T, 1]), torch.arange(2 * T).flip(0), 2),
    "from_slot_to_row": lambda T: (torch.arange(2 * T).reshape(T, 2) - 1, 2 * T + 3),
}
OPERATORS = {
    "from_topk": autograd.route_topk,
    "from_counts": autograd.route_counts,
    "from_sorted": autograd.route_sorted,
    "from_slot_to_row": autograd.route_maps,
}


@pytest.mark.parametrize("constructor", CALLS)
@pytest.mark.parametrize("T", [0, 1, 6])
def test_opcheck(constructor, T):
    torch.library.opcheck(OPERATORS[constructor], CALLS[constructor](T))


def fields(layout: ExpertLayout) -> list[torch.Tensor]:
    every = (layout.counts, layout.offsets, layout.row_to_slot, layout.slot_to_row)
    return [field for field in every if field is not None]


@pytest.mark.parametrize("constructor", CALLS)
def test_compile(constructor):
    make = getattr(ExpertLayout, constructor)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(make, fullgraph=True, dynamic=True, backend=counter)
    for T in (7, 64, 65):
        args = CALLS[constructor](T)
        for actual, expected in zip(fields(compiled(*args)), fields(make(*args)), strict=True):
            assert torch.equal(actual, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("constructor", CALLS)
def test_fake_tensors(constructor):
    args = CALLS[constructor](6)
    real = fields(getattr(ExpertLayout, constructor)(*args))
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = fields(getattr(ExpertLayout, constructor)(*args))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("constructor", CALLS)
def test_export(constructor):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return getattr(ExpertLayout, constructor)(*args)

    args = CALLS[constructor](6)
    program = torch.export.export(Module(), args)
    for actual, expected in zip(fields(program.module()(*args)), fields(Module()(*args)), strict=True):
        assert torch.equal(actual, expected)
