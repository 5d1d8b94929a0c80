"""ExpertLayout is a frozen pytree: it says its sizes, cannot be assigned to, and crosses every transform."""

import copy
import dataclasses

import pytest
import torch
import torch._dynamo.testing
from torch.utils import _pytree as pytree

from anabranch import ExpertLayout, grouped_gemm

FIELDS = ("counts", "offsets", "row_to_slot", "slot_to_row")


def layout(T: int = 4, E: int = 3) -> ExpertLayout:
    return ExpertLayout.from_topk(torch.arange(2 * T).reshape(T, 2) % (E + 1), E)


def maps() -> ExpertLayout:
    return ExpertLayout.from_slot_to_row(torch.tensor([[1, 0], [2, -1]]), 5)


def test_sizes():
    made = layout()
    assert (made.num_tokens, made.top_k, made.num_rows, made.num_experts) == (4, 2, 8, 3)
    assert made.device == torch.device("cpu")
    made = maps()
    assert (made.num_tokens, made.top_k, made.num_rows, made.num_experts) == (2, 2, 5, None)


def test_fields_are_int32():
    for made in (layout(), maps(), ExpertLayout.from_counts(torch.tensor([2, 1]), 4)):
        fields = [getattr(made, name) for name in FIELDS]
        assert all(f is None or (f.dtype == torch.int32 and f.is_contiguous()) for f in fields)


@pytest.mark.parametrize("field", FIELDS)
def test_frozen(field):
    made = layout()
    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{field}'"):
        setattr(made, field, torch.zeros(1))


def test_hash_and_equality_are_by_identity():
    made = layout()
    assert made == made
    assert made != layout()
    assert {made: 1}[made] == 1


@pytest.mark.parametrize("made", [layout(), maps()], ids=["full", "maps"])
def test_pytree(made):
    leaves, spec = pytree.tree_flatten(made)
    fields = [getattr(made, name) for name in FIELDS if getattr(made, name) is not None]
    assert [id(leaf) for leaf in leaves] == [id(field) for field in fields]
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, ExpertLayout)
    assert all(getattr(again, name) is getattr(made, name) for name in FIELDS)
    longer = pytree.tree_map(lambda leaf: None if leaf is None else leaf.long(), made)
    assert longer.row_to_slot.dtype == torch.int64
    assert copy.deepcopy(made).slot_to_row.tolist() == made.slot_to_row.tolist()


def test_compiles_as_an_argument():
    def function(x, weight, made):
        return grouped_gemm(x, weight, made, gather=True) + made.num_rows

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    weight = torch.randn(3, 5, 6)
    for T in (4, 7, 9):
        x = torch.randn(T, 6)
        assert torch.equal(compiled(x, weight, layout(T)), function(x, weight, layout(T)))
    assert counter.frame_count <= 2


def test_is_returned_from_compiled_code():
    compiled = torch.compile(ExpertLayout.from_topk, fullgraph=True, backend="aot_eager")
    made = compiled(torch.tensor([[0, 2], [1, 0]]), 3)
    assert isinstance(made, ExpertLayout)
    assert made.row_to_slot.tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize("strict", [False, True])
def test_exports_as_an_argument(strict):
    class Module(torch.nn.Module):
        def forward(self, x, weight, made):
            return grouped_gemm(x, weight, made)

    args = (torch.randn(8, 6), torch.randn(3, 5, 6), layout())
    program = torch.export.export(Module(), args, strict=strict)
    other = (torch.randn(8, 6), args[1], ExpertLayout.from_topk(torch.tensor([[2, 2]] * 4), 3))
    assert torch.equal(program.module()(*other), grouped_gemm(*other))
