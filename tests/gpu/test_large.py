"""Offsets past 2**31 elements, in every operand that can be so large; some rows against fp64."""

import pytest
import torch
import torch.nn.functional as F

from anabranch import ExpertLayout, grouped_gemm, moe_mlp, multi_gemm, permute, unpermute
from anabranch.ops.rope.api import rope
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import assert_component_wise, assert_same, assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.no_poison]
LIMIT = 2**31
T, K, H, E = 37_500, 8, 7168, 8
R = T * K
assert R * H > LIMIT


@pytest.fixture(autouse=True)
def memory():
    """Hands memory back between the tests, which share nothing."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def needs(gigabytes):
    """Skips where there is less free memory."""
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, there are {free:.0f}")


def draw(*shape, scale=1.0, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=scale)


def some(count, size):
    """Indices from the first to the last, those round element 2**31 of rows of ``size`` among them."""
    border = [i for i in range(LIMIT // size - 2, LIMIT // size + 3) if 0 <= i < count]
    spread = torch.linspace(0, count - 1, 40, dtype=torch.float64).long().tolist()
    return torch.tensor(sorted({*spread, *border}), device="cuda")


def sorted_layout():
    ids = torch.randint(0, E, (T, K), device="cuda")
    return ids, ExpertLayout.from_topk(ids, E)


def close(actual, left, right, terms, name):
    """Rows of a product against fp64: (rows, k) times (rows, n, k)."""
    left, right = left.double()[:, None], right.double().mT
    truth, size = left @ right, left.abs() @ right.abs()
    assert_component_wise(actual, truth[:, 0], size[:, 0], terms, name=name)


def test_a_weight():
    """The last of 129 experts starts at element 2**31 exactly; the others hold NaN, which nobody reads."""
    needs(20)
    weight = torch.full((129, 4096, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
    weight[128] = draw(4096, 4096)
    weight.requires_grad_()
    x, grad = draw(16, 4096).requires_grad_(), draw(16, 4096)
    layout = ExpertLayout.from_topk(torch.full((16, 1), 128, device="cuda"), 129)
    out = grouped_gemm(x, weight, layout)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), grad)
    w = weight[128].detach().double()
    for name, actual, a, b, terms in (
        ("out", out, x.double(), w.T, 4096),
        ("d_x", d_x, grad.double(), w, 4096),
        ("d_weight", d_weight[128], grad.double().T, x.double(), 16),
    ):
        assert_component_wise(actual, (a @ b).detach(), (a.abs() @ b.abs()).detach(), terms, name=name)
    assert not any(bool(expert.any()) for expert in d_weight[:128])


@pytest.mark.parametrize("gather", [False, True])
def test_a_products_input_and_its_gradient(gather):
    needs(30)
    ids, layout = sorted_layout()
    x = draw(T if gather else R, H).requires_grad_()
    weight = draw(E, 64, H, scale=H**-0.5).requires_grad_()
    grad = draw(R, 64)
    out = grouped_gemm(x, weight, layout, gather=gather)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), grad)
    rows = some(R, H)
    slots = layout.row_to_slot[rows].long()
    experts = weight.detach()[ids.view(-1)[slots]]
    close(out[rows], x.detach()[slots // K if gather else rows], experts, H, "out")
    if not gather:
        close(d_x[rows], grad[rows], experts.mT, 64, "d_x")
    start, stop = layout.offsets[-2:].tolist()
    truth = torch.zeros(64, H, dtype=torch.float64, device="cuda")
    size = torch.zeros_like(truth)
    for part in torch.arange(start, stop, device="cuda").split(4096):
        values = x.detach()[layout.row_to_slot[part].long() // K if gather else part].double()
        truth += grad[part].double().T @ values
        size += grad[part].double().abs().T @ values.abs()
    assert_component_wise(d_weight[-1], truth, size, stop - start, name="d_weight")


@pytest.mark.parametrize("scatter", [False, True])
def test_a_products_output(scatter):
    needs(30)
    ids, layout = sorted_layout()
    x, weight = draw(R, 64).requires_grad_(), draw(E, H, 64, scale=1 / 8)
    out = grouped_gemm(x, weight, layout, scatter=scatter)
    rows = some(R, H)
    slots = layout.row_to_slot[rows].long()
    close(out[slots if scatter else rows], x.detach()[rows], weight[ids.view(-1)[slots]], 64, "out")
    grad = draw(R, H)
    (d_x,) = torch.autograd.grad(out, x, grad)
    experts = weight[ids.view(-1)[slots]].mT
    close(d_x[rows], grad[slots if scatter else rows], experts, H, "d_x")


def test_permute_and_unpermute():
    """Small integers: every copy and sum is exact."""
    needs(30)
    _, layout = sorted_layout()
    numbers = torch.arange(T, device="cuda") % 251
    x = numbers.bfloat16()[:, None].expand(T, H).requires_grad_()
    rows = permute(x, layout)
    tokens = layout.row_to_slot.long() // K
    for part in torch.arange(R, device="cuda").split(20_000):
        assert_same(rows.detach()[part], x.detach()[tokens[part]], name="permute")
    y = rows.detach().requires_grad_()
    weights = torch.ones(T, K, device="cuda", requires_grad=True)
    out = unpermute(y, layout, weights)
    assert_same(out.detach(), 8 * x.detach())
    grad = draw(T, H)
    d_y, d_weights = torch.autograd.grad(out, (y, weights), grad)
    for part in torch.arange(R, device="cuda").split(20_000):
        assert_same(d_y[part], grad[tokens[part]], name="d_y")
    sums, sizes = ((numbers * v.double().sum(1))[:, None].expand(T, K) for v in (grad, grad.abs()))
    assert_component_wise(d_weights, sums, sizes, H, name="d_weights")
    (d_x,) = torch.autograd.grad(rows, x, d_y)
    assert_same(d_x, 8 * grad)


def test_a_layers_pre_activation():
    """moe_mlp's h, which nobody sees: tokens whose rows lie beyond, forward and backward."""
    needs(60)
    hidden, width = 256, 4096
    assert R * 2 * width > LIMIT
    ids = torch.randint(0, E, (T, K), device="cuda")
    x, grad = draw(T, hidden).requires_grad_(), draw(T, hidden)
    up, down = draw(E, 2 * width, hidden, scale=1 / 16), draw(E, hidden, width, scale=1 / 64)
    weights = torch.rand(T, K, device="cuda").requires_grad_()
    out = moe_mlp(x, up, down, ids, weights)
    found = [out.detach(), *torch.autograd.grad(out, (x, weights), grad)]
    tokens = torch.linspace(0, T - 1, 24, dtype=torch.float64).long().cuda()

    def plain(dtype):
        a, w = x.detach()[tokens].to(dtype).requires_grad_(), weights.detach()[tokens].requires_grad_()
        rows = []
        for i, chosen in enumerate(ids[tokens].tolist()):
            parts = []
            for k, expert in enumerate(chosen):
                gate, value = (up[expert].to(dtype) @ a[i]).chunk(2)
                parts.append(w[i, k] * (down[expert].to(dtype) @ (F.silu(gate) * value)))
            rows.append(torch.stack(parts).sum(0))
        y = torch.stack(rows)
        grads = torch.autograd.grad(y, (a, w), grad[tokens].to(y.dtype))
        return [y.detach(), *grads]

    for name, actual, truth, rough in zip(
        ("out", "d_x", "d_weights"), found, plain(torch.float64), plain(torch.bfloat16), strict=True
    ):
        assert_within_budget(actual[tokens], truth.double(), rough, name=name, rows=False)


@pytest.mark.parametrize("inplace", [False, True])
def test_rope(inplace):
    needs(40)
    heads, tokens, channels = 32, 600_000, 128
    assert heads * tokens * channels > LIMIT
    q = draw(1, heads, tokens, channels)
    angles = torch.rand(tokens, channels // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    places = some(tokens, channels)

    def turned(x, sign):
        a, b = x[0, :, places].double().chunk(2, -1)
        c, s = cos[places].double(), sign * sin[places].double()
        parts = (a * c, b * s), (b * c, a * s)
        size = torch.cat([(one.abs() + other.abs()) for one, other in parts], -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1), size

    expected = turned(q, 1)
    if inplace:
        rope(q, None, cos, sin, inplace=True)
        assert_component_wise(q[0, :, places], *expected, 4, name="q")
        return
    q.requires_grad_()
    y, _ = rope(q, None, cos, sin)
    assert_component_wise(y.detach()[0, :, places], *expected, 4, name="q")
    grad = draw(*q.shape)
    (d_q,) = torch.autograd.grad(y, q, grad)
    assert_component_wise(d_q[0, :, places], *turned(grad, -1), 4, name="d_q")


def test_topk_router():
    needs(40)
    experts, k = 512, 8
    tokens = LIMIT // experts + 5000
    logits = draw(tokens, experts).requires_grad_()
    weights, ids = topk_router(logits, k)
    up = torch.rand(tokens, k, device="cuda")
    (grad,) = torch.autograd.grad(weights, logits, up)
    rows = some(tokens, experts)
    wide = logits.detach()[rows].double().requires_grad_()
    truth, same_ids = topk_router(wide, k, backend="reference")
    assert_same(ids[rows], same_ids)
    (d_truth,) = torch.autograd.grad(truth, wide, up[rows].double())
    low = logits.detach()[rows].float().requires_grad_()
    rough, _ = topk_router(low, k, backend="reference")
    (d_rough,) = torch.autograd.grad(rough, low, up[rows])
    assert_within_budget(weights.detach()[rows], truth.detach(), truth.detach() + 2.0**-20 * truth.detach())
    assert_within_budget(grad[rows], d_truth, d_rough.bfloat16(), name="d_logits")


def test_multi_gemm():
    needs(30)
    x, weight = draw(R, H).requires_grad_(), draw(64, H, scale=H**-0.5)
    (y,) = multi_gemm([x], [weight])
    rows = some(R, H)
    close(y[rows], x.detach()[rows], weight.expand(len(rows), -1, -1), H, "y")
    grad = draw(R, 64)
    (d_x,) = torch.autograd.grad(y, x, grad)
    close(d_x[rows], grad[rows], weight.T.expand(len(rows), -1, -1), 64, "d_x")
