"""mrope: which row each pair follows, in both orders, and the shapes its operands may have."""

import pytest
import torch

from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.rope.cases import CASES
from anabranch.testing import assert_same, assert_within_budget, randn

pytestmark = pytest.mark.op("rope")
ANGLES = (0.1, 0.2, 0.3)


def written_out(sections, order):
    """The row of each pair, one after the other."""
    temporal, height, width = sections
    if order == "blocked":
        return [0] * temporal + [1] * height + [2] * width
    rows, left = [], {1: height, 2: width}
    for pair in range(sum(sections)):
        row = pair % 3
        if row and left[row]:
            left[row] -= 1
            rows.append(row)
        else:
            rows.append(0)
    assert not any(left.values())
    return rows


SECTIONS = [
    ([16, 24, 24], "blocked"),
    ([24, 20, 20], "blocked"),
    ([8, 12, 12], "blocked"),
    ([32, 0, 32], "blocked"),
    ([64, 0, 0], "blocked"),
    ([1, 1, 62], "blocked"),
    ([0, 0, 4], "blocked"),
    ([24, 20, 20], "interleaved"),
    ([22, 21, 21], "interleaved"),
    ([11, 11, 10], "interleaved"),
    ([12, 0, 4], "interleaved"),
    ([14, 2, 0], "interleaved"),
    ([64, 0, 0], "interleaved"),
    ([1, 1, 1], "interleaved"),
]


def test_published_layouts(backend):
    """Qwen2-VL's and Qwen3-VL's, spelled out pair by pair."""
    del backend
    assert written_out([16, 24, 24], "blocked") == [0] * 16 + [1] * 24 + [2] * 24
    assert written_out([24, 20, 20], "interleaved") == [0, 1, 2] * 20 + [0] * 4


@pytest.mark.fp64
@pytest.mark.parametrize("full_width", [True, False])
@pytest.mark.parametrize(("sections", "order"), SECTIONS, ids=str)
def test_each_pair_follows_its_row(backend, oracle, sections, order, full_width):
    pairs = sum(sections)
    angles = torch.tensor(ANGLES, dtype=torch.float64)[:, None, None, None].expand(3, 2, 3, pairs)
    table = torch.cat((angles, angles), -1) if full_width else angles
    q, k, dq, dk = (randn(2, h, 3, 2 * pairs + 4, dtype=torch.float64) for h in (2, 1, 2, 1))
    leaves = [q.requires_grad_(), k.requires_grad_()]
    outs = mrope(
        *leaves, table.cos(), table.sin(), sections, order=order, rotary_dim=2 * pairs, backend=backend
    )
    grads = torch.autograd.grad(outs, leaves, (dq, dk))
    expected = torch.tensor([ANGLES[row] for row in written_out(sections, order)], dtype=torch.float64)
    expected = expected.expand(2, 3, pairs)
    for x, y in zip((q, k), outs, strict=True):
        torch.testing.assert_close(y, oracle(x.detach(), expected))
    for d, dx in zip((dq, dk), grads, strict=True):
        torch.testing.assert_close(dx, oracle(d, -expected))


@pytest.mark.parametrize("full_width", [True, False])
@pytest.mark.parametrize(("sections", "order"), [([1, 2, 1], "blocked"), ([2, 1, 1], "interleaved")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_rows_are_rope(backend, sections, order, full_width, dtype):
    width = 8 if full_width else 4
    cos, sin = randn(2, 3, width), randn(2, 3, width)
    q, k = randn(2, 3, 3, 8, dtype=dtype), randn(2, 1, 3, 8, dtype=dtype)
    rows = (cos.expand(3, -1, -1, -1), sin.expand(3, -1, -1, -1))
    merged = mrope(q, k, *rows, sections, order=order, backend=backend)
    text = mrope(q, k, cos, sin, sections, order=order, backend=backend)
    for a, b, c in zip(merged, text, rope(q, k, cos, sin, backend=backend), strict=True):
        assert_same(a, c)
        assert_same(b, c)


@pytest.mark.parametrize("head_axis", [1, 2])
@pytest.mark.parametrize("shape", ["3BSW", "31SW", "BSW", "1SW", "SW"])
def test_table_shapes(backend, shape, head_axis):
    rows = randn(3, 2, 5, 4)
    if shape in ("31SW", "1SW", "SW"):
        rows = rows[:, :1]
    if not shape.startswith("3"):
        rows = rows[:1].expand(3, -1, -1, -1)
    given = {"BSW": rows[0], "1SW": rows[0], "SW": rows[0, 0]}.get(shape, rows)
    merged = torch.cat((rows[0, ..., :1], rows[1, ..., 1:3], rows[2, ..., 3:]), -1)
    q = randn(2, 3, 5, 8) if head_axis == 1 else randn(2, 5, 3, 8)
    expected, _ = rope(q, None, merged.cos(), merged.sin(), head_axis=head_axis, backend=backend)
    for widen in (lambda t: t, lambda t: torch.cat((t, t), -1)):
        cos, sin = widen(given.cos()), widen(given.sin())
        y, _ = mrope(q, None, cos, sin, [1, 2, 1], head_axis=head_axis, backend=backend)
        assert_same(y, expected)


@pytest.mark.parametrize("order", ["blocked", "interleaved"])
def test_packed(backend, order):
    cos, sin = randn(3, 5, 4), randn(3, 5, 4)
    q = randn(5, 3, 8)
    options = dict(sections=[2, 1, 1], order=order, backend=backend)
    y, _ = mrope(q, None, cos, sin, **options)
    expected, _ = mrope(q[None], None, cos[:, None], sin[:, None], head_axis=2, **options)
    assert_same(y, expected[0])
    text, _ = mrope(q, None, cos[0], sin[0], **options)
    assert_same(text, rope(q, None, cos[0], sin[0], backend=backend)[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models(backend, device, oracle, baseline, case):
    """Shapes and angles of real models, in bf16."""
    arguments = case.arguments(2, 10, device=device)
    # A few heads are as good as all.
    q, k = (x[:, :2] for x in (arguments.pop("q"), arguments.pop("k")))
    function = mrope if case.sections else rope
    outs = function(q, k, **arguments, backend=backend)
    cos, sin = arguments["cos"], arguments["sin"]
    pairs = case.width // 2
    if case.sections:
        rows = torch.tensor(written_out(case.sections, case.order))
        pick = rows.expand(*cos.shape[1:3], pairs).unsqueeze(0)
        cos, sin = (t[..., :pairs].gather(0, pick)[0] for t in (cos, sin))
    elif case.half_width:
        cos, sin = cos[None], sin[None]
    else:
        step = slice(None, pairs) if case.pairing == "half" else slice(None, None, 2)
        cos, sin = cos[None, :, step], sin[None, :, step]
    angles = torch.atan2(sin.double(), cos.double())
    pairing = arguments.get("pairing", "half")
    for x, y in zip((q, k), outs, strict=True):
        assert_within_budget(
            y, oracle(x, angles, pairing=pairing), baseline(x, cos, sin, pairing=pairing), name=case.name
        )
