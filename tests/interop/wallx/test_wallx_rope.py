"""rope, its gradient and multimodal_rope, against the matrix that the formula spells out, in fp64."""

import pytest
import torch

import anabranch
from anabranch.interop.wallx import backend, ops
from anabranch.testing import assert_same, assert_within_budget, guard_band, randn, strided

B, HQ, HK, S, D = 2, 3, 1, 5, 16
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Doubled, so that halves of a pair differ in their section, but for the last ones.
SECTIONS = {"blocks": [4, 6, 6], "odd": [5, 5, 6], "gap": [8, 0, 8], "all_in_one": [0, 16, 0]}
STANDARD = {"none": None, "false": False, "empty": []}
ALL = SECTIONS | STANDARD


def matrices(cos, sin, sections):
    """(B, S, D, D) in fp64: out[d] = sum over e of matrix[d, e] * x[e], channel by channel as it is written."""
    out = torch.zeros(B, S, D, D, dtype=torch.float64, device=cos.device)
    for d in range(D):
        if sections:
            row = 0 if d < sections[0] else 1 if d < sections[0] + sections[1] else 2
            c, s = cos[row, :, :, d], sin[row, :, :, d]
        else:
            c, s = cos[:, :, d], sin[:, :, d]
        out[:, :, d, d] = c.double()
        # rotate_half(x)[d] is -x[d + D/2] in the first half and x[d - D/2] in the second.
        half = D // 2
        out[:, :, d, (d + half) % D] = -s.double() if d < half else s.double()
    return out


def exact(x, turn, transposed=False):
    return torch.einsum("bsed,bhse->bhsd" if transposed else "bsde,bhse->bhsd", turn, x.double())


def baseline(x, turn, transposed=False):
    """In fp32, as two products and a sum, then rounded."""
    turn = turn.float()
    turn = turn.mT if transposed else turn
    half = D // 2
    own = torch.diagonal(turn, dim1=-2, dim2=-1)[:, None]
    index = torch.arange(D, device=x.device)
    other = turn[..., index, (index + half) % D][:, None]
    wide = x.float()
    return (wide * own + torch.cat((wide[..., half:], wide[..., :half]), -1) * other).to(x.dtype)


def problem(device, dtype=torch.float32, rows=True, tables=torch.float32):
    shape = (3, B, S, D) if rows else (B, S, D)
    return (
        *(randn(B, heads, S, D, dtype=dtype, device=device) for heads in (HQ, HK)),
        *(randn(*shape, dtype=tables, device=device) for _ in range(2)),
    )


def spaces(*like):
    return [torch.full_like(x, float("nan")) for x in like]


@pytest.mark.parametrize("sections", list(ALL.values()), ids=list(ALL))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(device, dtype, sections):
    q, k, cos, sin = problem(device, dtype, rows=bool(sections))
    kept = [value.clone() for value in (q, k, cos, sin)]
    turn = matrices(cos, sin, sections)
    outs = spaces(q, k)
    assert backend.rope(q, k, cos, sin, *outs, sections) is None
    for x, out in zip((q, k), outs, strict=True):
        assert_within_budget(out, exact(x, turn), baseline(x, turn))
    grads = spaces(q, k)
    assert backend.rope_bwd(q, k, None, None, cos, sin, *grads, sections) is None
    for x, grad in zip((q, k), grads, strict=True):
        assert_within_budget(grad, exact(x, turn, True), baseline(x, turn, True))
    for value, before in zip((q, k, cos, sin), kept, strict=True):
        assert_same(value, before)


@pytest.mark.parametrize("in_place", ["both", "q", "k", "other_objects"])
@pytest.mark.parametrize("sections", [SECTIONS["blocks"], None], ids=str)
@pytest.mark.parametrize("function", ["rope", "rope_bwd"])
def test_in_place(device, function, sections, in_place):
    q, k, cos, sin = problem(device, torch.bfloat16, rows=bool(sections))

    def run(q, k, *outs):
        if function == "rope":
            backend.rope(q, k, cos, sin, *outs, sections)
        else:
            backend.rope_bwd(q, k, q, k, cos, sin, *outs, sections)

    expected = spaces(q, k)
    run(q, k, *expected)
    outs = [q if in_place in ("both", "q") else torch.empty_like(q)]
    outs.append(k if in_place in ("both", "k") else torch.empty_like(k))
    if in_place == "other_objects":
        outs = [q.detach(), k.view(k.shape)]
    run(q, k, *outs)
    for out, want in zip(outs, expected, strict=True):
        assert_same(out, want)


@pytest.mark.parametrize("layout", ["transposed", "offset", "padded", "every_second"])
def test_strides(device, layout):
    q, k, cos, sin = problem(device)
    expected = spaces(q, k)
    backend.rope(q, k, cos, sin, *expected, SECTIONS["blocks"])
    given = [strided(value, layout) for value in (q, k, cos, sin)]
    outs = [strided(value, layout) for value in spaces(q, k)]
    backend.rope(*given, *outs, SECTIONS["blocks"])
    for out, want in zip(outs, expected, strict=True):
        assert_same(out.contiguous(), want)


def test_views_of_one_projection(device):
    """q and k as attention has them: transposed views of one (B, S, heads, D) buffer, turned in place."""
    _, _, cos, sin = problem(device)
    buffer = randn(B, S, HQ + HK, D, device=device)
    q, k = buffer[:, :, :HQ].transpose(1, 2), buffer[:, :, HQ:].transpose(1, 2)
    expected = spaces(q, k)
    backend.rope(q, k, cos, sin, *expected, SECTIONS["blocks"])
    backend.rope(q, k, cos, sin, q, k, SECTIONS["blocks"])
    assert_same(buffer, torch.cat([out.transpose(1, 2) for out in expected], 2))


def test_writes_nothing_else(device):
    q, k, cos, sin = problem(device)
    out, check = guard_band((B * HQ * S, D), torch.float32, device, columns=8)
    k_out = torch.empty_like(k)
    backend.rope(q, k, cos, sin, out.unflatten(0, (B, HQ, S)), k_out, SECTIONS["blocks"])
    check()
    want = spaces(q, k)
    backend.rope(q, k, cos, sin, *want, SECTIONS["blocks"])
    assert_same(out.view(B, HQ, S, D) if out.is_contiguous() else out.unflatten(0, (B, HQ, S)), want[0])


@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multimodal_rope(device, dtype, tables):
    section = [2, 3, 3]
    q, k, cos, sin = problem(device, dtype, tables=tables)
    turn = matrices(cos, sin, [4, 6, 6])
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    outs = ops.multimodal_rope(*leaves, cos, sin, section)
    assert isinstance(outs, tuple)
    lower = spaces(q, k)
    backend.rope(q, k, cos, sin, *lower, [2 * size for size in section])
    grads = [randn(*x.shape, dtype=dtype, device=device) for x in (q, k)]
    torch.autograd.backward(outs, grads)
    backward = spaces(q, k)
    backend.rope_bwd(*grads, q, k, cos, sin, *backward, [4, 6, 6])
    for i, x in enumerate((q, k)):
        assert_same(outs[i].detach(), lower[i])
        assert_within_budget(outs[i], exact(x, turn), baseline(x, turn))
        assert_same(leaves[i].grad, backward[i])
        assert_within_budget(leaves[i].grad, exact(grads[i], turn, True), baseline(grads[i], turn, True))
        assert_same(leaves[i].detach(), x)


def test_the_tables_alone_are_kept_for_the_gradient(device):
    q, k, cos, sin = problem(device)
    q, k = q.requires_grad_(), k.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: kept.append(value) or value, lambda value: value
    ):
        ops.multimodal_rope(q, k, cos, sin, [2, 3, 3])
    assert {value.data_ptr() for value in kept} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_needed(device, frozen):
    q, k, cos, sin = problem(device)
    leaves = [x.requires_grad_(i != frozen) for i, x in enumerate((q, k))]
    outs = ops.multimodal_rope(*leaves, cos, sin, [2, 3, 3])
    assert [out.requires_grad for out in outs].count(True) >= 1
    (outs[0].sum() + outs[1].sum()).backward()
    assert leaves[frozen].grad is None
    turn = matrices(cos, sin, [4, 6, 6])
    other = leaves[1 - frozen]
    ones = torch.ones_like(other)
    assert_within_budget(other.grad, exact(ones, turn, True), baseline(ones, turn, True))


def test_tables_of_one_batch_are_those_of_all(device):
    q, k, cos, sin = problem(device)
    one = [table[:, :1] for table in (cos, sin)]
    all_of_it = [table.expand(3, B, S, D) for table in one]
    for found, expected in zip(
        ops.multimodal_rope(q, k, *one, [2, 3, 3]),
        ops.multimodal_rope(q, k, *all_of_it, [2, 3, 3]),
        strict=True,
    ):
        assert_same(found, expected)


def test_gradcheck():
    q, k = (randn(1, heads, 2, 8, dtype=torch.float64).requires_grad_() for heads in (2, 1))
    cos, sin = (randn(3, 1, 2, 8, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(lambda q, k: ops.multimodal_rope(q, k, cos, sin, [1, 2, 1]), (q, k))


def test_the_section_of_a_channel_is_its_own():
    """Channel 36 of 128 is height here and in the model; channel 100, its pair, is width here alone.

    With rows that are equal, as for text, that makes no difference.
    """
    q, k = randn(1, 2, 3, 128), randn(1, 1, 3, 128)
    cos, sin = (randn(3, 1, 3, 64).repeat(1, 1, 1, 2) for _ in range(2))
    mine = ops.multimodal_rope(q, k, cos, sin, [16, 24, 24])
    model = anabranch.mrope(q, k, cos, sin, [16, 24, 24])
    same = (mine[0] == model[0]).all(0).all(0).all(0)
    assert same[36]
    assert not same[100]
    equal = cos[:1].expand(3, 1, 3, 128), sin[:1].expand(3, 1, 3, 128)
    for x, y in zip(
        ops.multimodal_rope(q, k, *equal, [16, 24, 24]),
        anabranch.mrope(q, k, *equal, [16, 24, 24]),
        strict=True,
    ):
        assert_same(x, y)
