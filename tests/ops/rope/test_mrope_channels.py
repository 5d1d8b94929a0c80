"""mrope with sections of channels: each takes its own entry of its own row, as rope does with tables so merged."""

import pytest
import torch

from anabranch.errors import ArgumentError
from anabranch.ops.rope.api import mrope, rope
from anabranch.testing import assert_same, randn

pytestmark = pytest.mark.op("rope")
SECTIONS = [
    [4, 6, 6],
    [5, 5, 6],
    [1, 1, 14],
    [14, 1, 1],
    [8, 0, 8],
    [8, 8, 0],
    [0, 16, 0],
    [0, 0, 16],
    [16, 0, 0],
]


def merged(table, sections):
    rows = [row for row, size in enumerate(sections) for _ in range(size)]
    return torch.stack([table[row, ..., d] for d, row in enumerate(rows)], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sections", SECTIONS, ids=str)
def test_each_channel_follows_its_row(backend, sections, dtype):
    q, k, dq, dk = (randn(2, h, 3, 20, dtype=dtype) for h in (2, 1, 2, 1))
    cos, sin = randn(3, 2, 3, 16), randn(3, 2, 3, 16)
    results = []
    for function, tables, options in (
        (mrope, (cos, sin), dict(sections=sections, order="channels")),
        (rope, (merged(cos, sections), merged(sin, sections)), {}),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        outs = function(*leaves, *tables, rotary_dim=16, backend=backend, **options)
        results.append((*outs, *torch.autograd.grad(outs, leaves, (dq, dk))))
    for mine, expected in zip(*results, strict=True):
        assert_same(mine.detach(), expected.detach())


@pytest.mark.parametrize("form", ["one_batch", "tokens_first", "packed", "inplace", "strided_tables"])
def test_forms(backend, form):
    q, k = randn(2, 3, 5, 16), randn(2, 1, 5, 16)
    cos, sin = randn(3, 2, 5, 16), randn(3, 2, 5, 16)
    options = dict(backend=backend)
    if form == "one_batch":
        cos, sin = cos[:, :1], sin[:, :1]
    elif form == "tokens_first":
        q, k, options["head_axis"] = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), 2
    elif form == "packed":
        q, k, cos, sin = q[0].transpose(0, 1), k[0].transpose(0, 1), cos[:, 0], sin[:, 0]
    elif form == "strided_tables":
        cos, sin = cos.mT.contiguous().mT, sin.repeat_interleave(2, -1)[..., ::2]
    expected = rope(q, k, merged(cos, [4, 6, 6]), merged(sin, [4, 6, 6]), **options)
    given = (q.clone(), k.clone()) if form == "inplace" else (q, k)
    outs = mrope(*given, cos, sin, [4, 6, 6], order="channels", inplace=form == "inplace", **options)
    for mine, wanted in zip(outs, expected, strict=True):
        assert_same(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_rows_are_rope(backend, dtype):
    cos, sin = randn(2, 3, 8), randn(2, 3, 8)
    q, k = randn(2, 3, 3, 8, dtype=dtype), randn(2, 1, 3, 8, dtype=dtype)
    rows = (cos.expand(3, -1, -1, -1), sin.expand(3, -1, -1, -1))
    options = dict(sections=[3, 3, 2], order="channels", backend=backend)
    for a, b, c in zip(
        mrope(q, k, *rows, **options),
        mrope(q, k, cos, sin, **options),
        rope(q, k, cos, sin, backend=backend),
        strict=True,
    ):
        assert_same(a, c)
        assert_same(b, c)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sections": [2, 1, 1]},
            r"sections: expected three sizes that add up to rotary_dim = 8, got \[2, 1, 1\]",
        ),
        (
            {"cos": torch.ones(3, 1, 2, 4), "sin": torch.ones(3, 1, 2, 4)},
            "cos: expected .* rotary_dim = 8 .*, got W = 4",
        ),
        (
            {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8), "positions": torch.zeros(3, 1, 2).long()},
            'positions: expected None with order="channels", got a tensor',
        ),
    ],
)
def test_refuses(change, message):
    arguments = dict(q=torch.ones(1, 2, 2, 8), k=None, cos=torch.ones(3, 1, 2, 8), sin=torch.ones(3, 1, 2, 8))
    with pytest.raises(ArgumentError, match=f"mrope: {message}"):
        mrope(**{**arguments, "sections": [3, 3, 2], "order": "channels", **change})
