"""Whether tensors share memory, against listing every byte."""

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.errors import ArgumentError
from anabranch.ops.overlap import overlap, overlaps_itself
from anabranch.testing import usable_backends


def addresses(tensor):
    """The bytes of a tensor, one list an element."""
    index = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = (index.unsqueeze(-1) + torch.arange(size) * stride).reshape(-1)
    width = tensor.element_size()
    return [byte for i in index.tolist() for byte in range(i * width, (i + 1) * width)]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_overlap_against_enumeration(dtypes):
    """Random views of one buffer, some with elements in one place."""
    buffer = torch.zeros(400)
    found = {True: 0, False: 0}
    for _ in range(400):
        views = []
        for dtype in dtypes:
            strides = [
                [48, 12, 4, 1],
                [12, 48, 1, 4],
                [24, 6, 2, 1],
                [1, 4, 12, 48],
                [60, 7, 3, 2],
                [9, 0, 3, 3],
            ]
            size = torch.randint(1, 4, (4,)).tolist()
            stride = strides[int(torch.randint(len(strides), (1,)))]
            views.append(buffer.view(dtype).as_strided(size, stride, int(torch.randint(0, 100, (1,)))))
        a, b = views
        shared = bool(set(addresses(a)) & set(addresses(b)))
        assert overlap(a, b) == shared, (a.shape, a.stride(), b.shape, b.stride())
        found[shared] += 1
    assert min(found.values()) > 50


VIEWS = {
    "whole": (lambda x: x, False),
    "transposed": (lambda x: x.transpose(0, 2), False),
    "slices": (lambda x: x[:, ::2, 1:3], False),
    "expanded": (lambda x: x[:1].expand(3, -1, -1), True),
    "empty": (lambda x: x[:0].expand(3, 0, 4, 4), False),
    "windows": (lambda x: x.reshape(-1).unfold(0, 8, 4), True),
    "pieces": (lambda x: x.reshape(-1).unfold(0, 8, 8), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_overlap_inside(name):
    view, inside = VIEWS[name]
    assert overlaps_itself(view(torch.zeros(3, 4, 4))) == inside


@pytest.mark.parametrize("backend", usable_backends("grouped_gemm"))
def test_an_output_with_elements_in_one_place_is_refused(backend):
    layout = ExpertLayout.from_counts(torch.tensor([2]), 2)
    out = torch.zeros(1, 4).expand(2, 4)
    with pytest.raises(ArgumentError) as raised:
        grouped_gemm(torch.ones(2, 3), torch.ones(1, 4, 3), layout, out=out, backend=backend)
    expected = "grouped_gemm: out: expected no two elements in one place of memory, got strides (0, 1)"
    assert str(raised.value) == expected
    assert not out.any()
