"""permute, unpermute and the gradients, at both levels, against loops over plain ints and fp64."""

import itertools

import pytest
import torch

from anabranch.interop.wallx import backend, ops
from anabranch.testing import assert_same, assert_within_budget, randn, strided

H = 24
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IDS = {
    "two_each": [[3, 1], [0, 3], [1, 0], [2, 2], [3, 0]],
    "dropped": [[0, -1], [-1, -7], [2, 1], [-1, 2], [1, 0], [3, -1]],
    "none_kept": [[-1, -2], [-3, -1]],
    "one_choice": [[4], [0], [4], [2]],
    "flat": [1, 0, 1, -1, 0],
    "duplicates": [[5, 8, 8, 3], [8, 8, 8, 8], [0, 1, 2, 3]],
    "far_apart": [[2**31 - 1, 0], [7, -(2**31)], [2**31 - 1, 7]],
}
OUT = (0, 1, 3, 100)


def expected_map(ids, num_out_tokens):
    """row_id_map and, of each row, the token; a sort of (expert, slot) pairs."""
    ids = [[e] if isinstance(e, int) else e for e in ids]
    slots = sorted((e, t * len(row) + k) for t, row in enumerate(ids) for k, e in enumerate(row) if e >= 0)
    top_k, tokens = len(ids[0]), len(ids)
    rows = num_out_tokens or tokens * top_k
    row_id_map, sources = [-1] * (tokens * top_k), [None] * rows
    for row, (_, slot) in enumerate(slots[:rows]):
        token, k = divmod(slot, top_k)
        row_id_map[k * tokens + token] = row
        sources[row] = token
    return row_id_map, sources


def expected_sum(y, row_id_map, prob, tokens, top_k):
    """The weighted sum by indexing, in the dtype of y; differentiable."""
    index = torch.tensor(row_id_map, device=y.device).view(top_k, tokens).T
    kept = (index >= 0).unsqueeze(-1)
    terms = torch.where(kept, y[index.clamp(min=0)], 0)
    return (terms if prob is None else terms * prob.to(y.dtype).unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("num_out_tokens", OUT)
@pytest.mark.parametrize("ids", list(IDS.values()), ids=list(IDS))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_permute(device, dtype, ids, num_out_tokens):
    x = randn(len(ids), H, dtype=torch.bfloat16, device=device)
    indices = torch.tensor(ids, dtype=dtype, device=device)
    workspace = [object()]
    permuted, row_id_map, same = backend.permute(x, indices, num_out_tokens, workspace, 4096)
    assert same is workspace
    wanted, sources = expected_map(ids, num_out_tokens)
    assert row_id_map.dtype == torch.int32
    assert row_id_map.tolist() == wanted
    assert permuted.shape == (len(sources), H)
    for row, token in enumerate(sources):
        assert_same(permuted[row], torch.zeros_like(x[0]) if token is None else x[token])
    upper = ops.permute(x, indices, num_out_tokens)
    assert_same(upper[0], permuted)
    assert_same(upper[1], row_id_map)


def test_none_keeps_all(device):
    x, indices = randn(5, H, device=device), torch.tensor(IDS["two_each"], device=device)
    assert_same(ops.permute(x, indices)[0], ops.permute(x, indices, 0)[0])
    assert_same(ops.permute(x, indices, None, 10**6)[0], ops.permute(x, indices, 10)[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_ids_of_any_width(device, dtype):
    low = 0 if dtype == torch.uint8 else -1
    ids = [[low, torch.iinfo(dtype).max], [3, 0], [torch.iinfo(dtype).max, 3]]
    x = randn(3, H, device=device)
    _, row_id_map, workspace = backend.permute(x, torch.tensor(ids, dtype=dtype, device=device), 0, x, 0)
    assert workspace is x
    assert row_id_map.tolist() == expected_map(ids, 0)[0]


@pytest.mark.parametrize("layout", ["transposed", "offset", "padded", "every_second_row"])
def test_strides(device, layout):
    x, ids = randn(6, H, device=device), torch.tensor(IDS["dropped"], device=device)
    permuted, row_id_map = ops.permute(strided(x, layout), strided(ids, layout))
    assert_same(permuted, ops.permute(x, ids)[0])
    assert_same(row_id_map, ops.permute(x, ids)[1])
    prob = torch.rand(6, 2, device=device)
    assert_same(
        ops.unpermute(strided(permuted, layout), strided(row_id_map, "every_second"), strided(prob, layout)),
        ops.unpermute(permuted, row_id_map, prob),
    )


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(device, tokens):
    x = randn(tokens, H, device=device)
    permuted, row_id_map = ops.permute(x, torch.ones(tokens, 2, dtype=torch.int32, device=device))
    assert permuted.shape == (2 * tokens, H)
    out = ops.unpermute(permuted, row_id_map, torch.ones(tokens, 2, device=device))
    assert_same(out, 2 * x)
    assert backend.unpermute(permuted, row_id_map, None, tokens, 2).shape == (tokens, H)
    act_grad, prob_grad = backend.unpermute_bwd(x, permuted, row_id_map, torch.ones(tokens, 2, device=device))
    assert act_grad.shape == permuted.shape
    assert prob_grad.shape == (tokens, 2)


@pytest.mark.parametrize("num_out_tokens", OUT)
@pytest.mark.parametrize("ids", list(IDS.values()), ids=list(IDS))
def test_round_trip(device, ids, num_out_tokens):
    """With unit weights each token comes back once for every slot that has a row."""
    x, indices = randn(len(ids), H, device=device), torch.tensor(ids, device=device)
    permuted, row_id_map, _ = backend.permute(x, indices, num_out_tokens, None, 0)
    top_k = row_id_map.numel() // len(ids)
    kept = (row_id_map.view(top_k, len(ids)) >= 0).sum(0)
    unit = torch.empty(0, device=device)
    out = backend.unpermute(permuted, row_id_map, unit, len(ids), top_k)
    assert_within_budget(out, x.double() * kept[:, None], x * kept[:, None])
    assert_same(out, backend.unpermute(permuted, row_id_map, None, len(ids), top_k))


@pytest.mark.parametrize("weights", ["fp32", "none", "empty"])
@pytest.mark.parametrize("num_out_tokens", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_and_its_gradients(device, dtype, num_out_tokens, weights):
    """By both levels: unpermute_bwd is the gradient of unpermute, and the upper level's backward equals it."""
    ids = IDS["dropped"] if weights == "fp32" else [[row[0]] for row in IDS["dropped"]]
    tokens, top_k = len(ids), len(ids[0])
    wanted, sources = expected_map(ids, num_out_tokens)
    row_id_map = torch.tensor(wanted, dtype=torch.int32, device=device)
    y = randn(len(sources), H, dtype=dtype, device=device)
    grad = randn(tokens, H, dtype=dtype, device=device)
    unit = torch.empty(0, device=device) if weights == "empty" else None
    prob = torch.rand(tokens, top_k, device=device) if weights == "fp32" else unit
    exact, plain = [], []
    for wide, found in ((torch.float64, exact), (torch.float32, plain)):
        leaf = y.to(wide, copy=True).requires_grad_()
        factor = torch.ones(tokens, top_k, device=device) if weights != "fp32" else prob
        factor = factor.to(wide, copy=True).requires_grad_()
        result = expected_sum(leaf, wanted, factor, tokens, top_k)
        result.backward(grad.to(wide))
        found += [result.detach(), leaf.grad, factor.grad]
    plain = [value.to(want) for value, want in zip(plain, (dtype, dtype, torch.float32), strict=True)]

    out = backend.unpermute(y, row_id_map, prob, tokens, top_k)
    act_grad, prob_grad = backend.unpermute_bwd(grad, y, row_id_map, prob)
    assert act_grad.dtype == out.dtype == dtype
    assert prob_grad.dtype == torch.float32
    assert_within_budget(out, exact[0], plain[0], name="out")
    assert_within_budget(act_grad, exact[1], plain[1], name="act_grad")
    assert_within_budget(prob_grad, exact[2], plain[2], name="prob_grad", rows=False)
    dropped = row_id_map.view(top_k, tokens).T < 0
    assert not prob_grad[dropped].any()
    unused = [row for row, token in enumerate(sources) if token is None]
    assert not act_grad[unused].any()

    leaf = y.clone().requires_grad_()
    factor = prob.clone().requires_grad_() if weights == "fp32" else prob
    result = ops.unpermute(leaf, row_id_map, factor)
    result.backward(grad)
    assert_same(result.detach(), out)
    assert_same(leaf.grad, act_grad)
    if weights == "fp32":
        assert_same(factor.grad, prob_grad)


def test_weights_of_other_dtypes(device):
    ids = torch.tensor(IDS["dropped"], device=device)
    y, row_id_map = ops.permute(randn(6, H, dtype=torch.bfloat16, device=device), ids)
    grad, prob = randn(6, H, dtype=torch.bfloat16, device=device), torch.rand(6, 2, device=device).bfloat16()
    for mine, wide in zip(
        backend.unpermute_bwd(grad, y, row_id_map, prob),
        backend.unpermute_bwd(grad, y, row_id_map, prob.float()),
        strict=True,
    ):
        assert_same(mine, wide)


def test_what_is_dropped_may_hold_anything(device):
    """A row without a slot and the weight of a dropped slot are not read, not even to be multiplied by 0."""
    ids = torch.tensor([[1, -1], [0, 1]], device=device)
    x = randn(2, H, device=device)
    y, row_id_map = ops.permute(x, ids)
    y[3] = float("nan")
    prob = torch.tensor([[1.0, float("nan")], [1.0, 1.0]], device=device)
    out = backend.unpermute(y, row_id_map, prob, 2, 2)
    assert_same(out[0], x[0])
    act_grad, prob_grad = backend.unpermute_bwd(torch.ones_like(x), y, row_id_map, prob)
    assert act_grad.isfinite().all()
    assert prob_grad.isfinite().all()


def test_a_map_may_name_rows_that_are_not_there(device):
    y = randn(3, H, device=device)
    row_id_map = torch.tensor([0, 7, -9, 2], dtype=torch.int64, device=device)
    out = backend.unpermute(y, row_id_map, None, 4, 1)
    assert_same(out, torch.stack((y[0], torch.zeros_like(y[0]), torch.zeros_like(y[0]), y[2])))


def test_sums_in_fp32(device):
    """In bf16 a running sum of 256 and six ones stays 256."""
    values = torch.tensor([256, 1, 1, 1, 1, 1, 1, 0], device=device).bfloat16()[:, None].expand(8, H)
    row_id_map = torch.arange(8, dtype=torch.int32, device=device)
    out = backend.unpermute(values, row_id_map, None, 1, 8)
    assert out.tolist() == [[262.0] * H]
    x = randn(1, H, dtype=torch.bfloat16, device=device).requires_grad_()
    permuted, _ = ops.permute(x, torch.arange(8, device=device)[None])
    permuted.backward(values)
    assert x.grad.tolist() == [[262.0] * H]


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=2)), ids=str)
def test_only_the_gradients_needed(device, needs):
    ids = torch.tensor(IDS["two_each"], device=device)
    y, row_id_map = ops.permute(randn(5, H, device=device), ids)
    prob = torch.rand(5, 2, device=device).requires_grad_(needs[1])
    y = y.requires_grad_(needs[0])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: kept.append(value.data_ptr()) or value, lambda v: v
    ):
        out = ops.unpermute(y, row_id_map, prob)
    assert (y.data_ptr() in kept) == needs[1], "the rows are read by the gradient of probs alone"
    if any(needs):
        out.sum().backward()
    assert (y.grad is not None, prob.grad is not None) == needs


@pytest.mark.parametrize("num_out_tokens", [None, 4, 20])
def test_gradcheck(num_out_tokens):
    x = randn(6, 3, dtype=torch.float64).requires_grad_()
    prob = randn(6, 2, dtype=torch.float64).requires_grad_()
    ids = torch.tensor(IDS["dropped"])

    def there_and_back(x, prob):
        permuted, row_id_map = ops.permute(x, ids, num_out_tokens)
        return ops.unpermute(permuted.sin(), row_id_map, prob)

    assert torch.autograd.gradcheck(there_and_back, (x, prob))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_gpu():
    x = randn(64, H, device="cuda").requires_grad_()
    ids = torch.randint(-1, 8, (64, 2), device="cuda")
    prob = torch.rand(64, 2, device="cuda", requires_grad=True)

    def step():
        permuted, row_id_map = ops.permute(x, ids, 100)
        ops.unpermute(permuted, row_id_map, prob).sum().backward()
        lower, row_id_map, _ = backend.permute(x.detach(), ids, 0, None, 0)
        backend.unpermute_bwd(x.detach(), lower, row_id_map, prob.detach())

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
