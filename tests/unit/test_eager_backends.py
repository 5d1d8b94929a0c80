"""What the eager backends share: products of any strides by whichever library, blocks, and the sum over choices."""

from itertools import combinations, pairwise

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm, moe_mlp
from anabranch._backends.eager import cuts, product, walk
from anabranch._backends.eager.epilogue import activate
from anabranch.epilogues import Epilogue, Gated, from_spec
from anabranch.testing import assert_component_wise, assert_same, randn, routing, strided

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["dense", "transposed", "offset", "padded", "every_second", "expanded", "expanded_columns"]
M, N, K_DIM = 120, 112, 96
assert M * N * K_DIM >= product.ONEDNN_WORTH


def made(layout, *shape, dtype):
    value = randn(*shape, dtype=dtype)
    return value if layout == "dense" else strided(value, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [M, 3])
@pytest.mark.parametrize("bias", [None, (N,), (M, N)], ids=str)
def test_products_of_any_strides(bias, rows, dtype):
    for left, right in [*zip(LAYOUTS, LAYOUTS, strict=True), *pairwise(LAYOUTS)]:
        a, w = made(left, M, K_DIM, dtype=dtype)[:rows], made(right, N, K_DIM, dtype=dtype)
        b = None if bias is None else randn(*bias, dtype=dtype)[: rows if len(bias) == 2 else N]
        around = torch.full((rows, N + 5), 7.0, dtype=dtype)
        product.matmul_nt(a, w, around[:, 2 : N + 2], b)
        expected, size = a.double() @ w.double().T, a.double().abs() @ w.double().abs().T
        if b is not None:
            expected, size = expected + b.double(), size + b.double().abs()
        assert_component_wise(around[:, 2 : N + 2], expected, size, K_DIM, name=f"{left} x {right}")
        assert bool((around[:, :2] == 7).all())
        assert bool((around[:, N + 2 :] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [M, 3])
def test_the_accumulator_is_exposed_where_that_is_said(rows, dtype):
    a, w, bias = (randn(*s, dtype=dtype) for s in ((rows, K_DIM), (N, K_DIM), (N,)))
    if not product.exposes_accumulator(a):
        return
    out = torch.empty(rows, N)
    product.matmul_nt(a, w, out, bias)
    expected, size = (
        a.double() @ w.double().T + bias.double(),
        a.abs().double() @ w.abs().double().T + bias.abs(),
    )
    assert_component_wise(out, expected, size, K_DIM)


def combine(values, dtype, columns):
    """The sum of one token's rows, each of one number."""
    choices = torch.arange(len(values))[None] * 0
    path = walk.Walk.of(ExpertLayout.from_topk(choices, 1), 1)
    y = path.new_places(torch.empty(0, dtype=dtype), columns)
    y[:-1] = torch.tensor(values, dtype=dtype)[:, None]
    return path.combine(y)


@pytest.mark.parametrize("columns", [1, 7, 64, 200])
def test_sums_over_choices_are_rounded_once(columns):
    assert bool((combine([256, 1, 1, 1, 1, 1, 1, 0], torch.bfloat16, columns) == 262).all())
    assert bool((combine([1, 2.0**-9, -1], torch.bfloat16, columns) == 2.0**-9).all())
    assert bool((combine([2048, 1, 1, 1, 1], torch.float16, columns) == 2052).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_combine(dropped, dtype):
    ids = routing(50, 6, 4, dropped=dropped)
    weights = torch.rand(50, 4, dtype=dtype).where((ids >= 0) & (ids < 6), torch.nan)
    layout = ExpertLayout.from_topk(ids, 6)
    path = walk.Walk.of(layout, 1)
    assert path.drops == (dropped > 0)
    y = path.new_places(torch.empty(0, dtype=dtype), 40)
    y[:-1] = randn(path.places, 40, dtype=dtype)
    terms = y.double()[layout.slot_to_row.where(layout.slot_to_row >= 0, path.places)]
    for w in (None, weights):
        exact = terms if w is None else terms * w.double().nan_to_num()[..., None]
        assert_component_wise(path.combine(y, w), exact.sum(1), exact.abs().sum(1), 4)


class Unchanged(Epilogue):
    def forward(self, z):
        return z


class Ones(Epilogue):
    def forward(self, z):
        return z.new_ones(1).expand_as(z)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "spec",
    ["swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu(limit=0.7)", "gpt_oss", Unchanged(), Ones()],
    ids=str,
)
def test_activate_leaves_its_operands_alone(spec, interleaved):
    """Whatever the inner function of a gate returns, its operand included."""
    epilogue = from_spec(spec) if isinstance(spec, str) else Gated()
    if not isinstance(spec, str):
        object.__setattr__(epilogue, "inner", spec)
    z = randn(9, 10)
    before = z.clone()
    columns = (z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, dim=-1)
    assert_same(activate(epilogue, *columns), epilogue.forward(*columns))
    assert_same(z, before)


def test_a_walk_leaves_out_rows_without_a_slot():
    counts, row_to_slot = torch.tensor([0, 3, 0, 2]), torch.tensor([4, -1, 0, 9, 2, 5])
    path = walk.Walk.of(ExpertLayout.from_sorted(counts, row_to_slot, 2), cuts.BLOCK)
    assert [(b.start, b.stop, b.experts) for b in path.blocks] == [(0, 2, [(1, 0, 2)]), (2, 3, [(3, 0, 1)])]
    assert path.idle == [0, 2]
    assert path.rows is not None
    assert path.rows.tolist() == [0, 2, 4]
    assert path.slots.tolist() == [4, 0, 2]
    assert path.tokens.tolist() == [2, 0, 1]
    assert path.slot_to_place.tolist() == [[1, 3], [2, 3], [0, 3]]


@pytest.mark.parametrize("price", [None, 95])
def test_a_walk_does_not_write_to_its_layout(price):
    """One of int64, as may be put together by hand, is not converted, and so not copied."""
    made = ExpertLayout.from_topk(routing(60, 4, 2), 4)
    fields = [value.long() for value in (made.counts, made.offsets, made.row_to_slot, made.slot_to_row)]
    copies = [value.clone() for value in fields]
    path = walk.Walk.of(ExpertLayout(*fields), 8, price)
    assert path.tokens.tolist() == (path.slots // 2).tolist()
    for value, copy in zip(fields, copies, strict=True):
        assert_same(value, copy)


ROWS, PRICE = 300, 95


@pytest.fixture(params=[True, False], ids=["searched", "longest"])
def searched(request, monkeypatch):
    """Whether even blocks are cut where it is cheapest, or each is as long as its fillers allow."""
    monkeypatch.setattr(cuts, "STEPS", 2**20 if request.param else 0)
    return request.param


def even_walk(layout, rows=ROWS):
    return walk.Walk.of(layout, cuts.BLOCK // rows, PRICE)


def check_even(path, layout):
    """Every row has one place with its slot, and each filler repeats a row of its expert."""
    offsets, places = layout.offsets.tolist(), path.places_of_rows.tolist()
    assert len(places) == offsets[-1]
    assert path.slots[path.places_of_rows].tolist() == layout.row_to_slot[: offsets[-1]].tolist()
    assert path.tokens.tolist() == (path.slots // layout.top_k).tolist()
    assert path.rows[path.places_of_rows].tolist() == list(range(offsets[-1]))
    assert sorted(set(range(path.places)) - set(places)) == path.fillers.nonzero()[:, 0].tolist()
    kept = layout.slot_to_row >= 0
    assert torch.equal(path.slot_to_place[kept], path.places_of_rows[layout.slot_to_row[kept].long()])
    assert bool((path.slot_to_place[~kept] == path.places).all())
    seen, place = [], 0
    for block in path.blocks:
        first, last = block.experts[0][0], block.experts[-1][0]
        assert (block.rows.start, block.rows.stop) == (offsets[first], offsets[last + 1])
        assert block.start == place
        assert len(set(block.sizes)) == 1
        place = block.stop
        for expert, i, j in block.experts:
            rows = path.rows[block.start + i : block.start + j].tolist()
            assert sorted(set(rows)) == list(range(offsets[expert], offsets[expert + 1]))
            seen.append(expert)
    assert place == path.places
    assert seen == [e for e in range(layout.num_experts) if offsets[e] < offsets[e + 1]]


def check_sizes(path, rows, searched):
    """No block is larger, and no more fillers are in it, than the rule says that cut it."""
    for block in path.blocks:
        count, experts = block.rows.stop - block.rows.start, len(block.experts)
        if searched:
            assert block.size - count <= PRICE * (experts - 1)
            assert experts == 1 or block.size <= cuts.LARGEST * rows
        else:
            assert block.size - count <= cuts.FILLERS * count + cuts.SPARE * experts
            assert block.size - count <= cuts.WORTH * experts
            assert count - block.sizes[0] < cuts.EVEN * rows


@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["even", "random", "every_other", "empty_last", "duplicates"])
@pytest.mark.parametrize("top_k", [3, 4])
def test_even_blocks(top_k, kind, dropped, searched):
    layout = ExpertLayout.from_topk(routing(300, 8, top_k, kind, dropped=dropped), 8)
    path = even_walk(layout)
    assert path.fillers is not None
    assert path.idle == (layout.counts == 0).nonzero()[:, 0].tolist()
    check_even(path, layout)
    check_sizes(path, ROWS, searched)


@pytest.mark.parametrize("heights", [(400, 500), (400, 490)])
def test_tall_experts_share_a_block_if_few_rows_are_missing(heights, searched):
    """A fifth of a tall expert's rows would cost more than a product of its own."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([*heights, *heights]))[:, None]
    layout = ExpertLayout.from_topk(ids, 4)
    path = even_walk(layout, 400)
    apart = heights[1] - heights[0] > (PRICE if searched else 2 * cuts.WORTH)
    check_even(path, layout)
    assert {len(block.experts) for block in path.blocks} == ({1} if apart else {2})


@pytest.mark.usefixtures("searched")
def test_uneven_counts_have_no_even_blocks():
    ids = torch.repeat_interleave(torch.arange(12), 2 ** torch.arange(12))[:, None]
    assert walk.Walk.of(ExpertLayout.from_topk(ids, 12), 1, 1).fillers is None
    assert walk.Walk.of(ExpertLayout.from_topk(torch.full((3, 2), -1), 4), 1, 1).fillers is None


def cost(counts, ends):
    """Places, and PRICE for each block; None if there may be no such blocks."""
    total, first = 0, 0
    for last in ends:
        block = counts[first:last]
        places = max(block) * len(block)
        if len(block) > 1 and (0 in block or places > ROWS):
            return None
        total += places + PRICE * (places > 0)
        first = last
    return total


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_cut(seed):
    """None of all the ways to cut costs less."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(-20, [60, 120, 180][seed % 3], (9,), generator=generator).clamp_(min=0).tolist()
    inner = range(1, len(counts))
    every = [(*cut, len(counts)) for n in range(len(counts)) for cut in combinations(inner, n)]
    costs = [found for ends in every if (found := cost(counts, ends)) is not None]
    assert cost(counts, cuts._cheapest(counts, ROWS, PRICE)) == min(costs)
    assert min(costs) < max(costs)


def test_the_search_is_for_few_experts(monkeypatch):
    """It takes the square of how many share a block; where these are many, or have few rows, it is left out."""
    found = []
    monkeypatch.setattr(cuts, "_cheapest", lambda counts, *_: found.append(len(counts)) or [len(counts)])
    for experts in (8, 22, 23, 32, 64):
        for rows in (4, 128):
            offsets = [rows * e for e in range(experts + 1)]
            cuts.even_blocks(offsets, 512, PRICE, 2)
    assert found == [8, 8, 22, 22, 23, 32]


def test_too_many_blocks_are_not_all_cut():
    assert len(cuts._longest([1, 1000] * 50, 10, 3)) == 4
    assert len(cuts._longest([1, 0, 0] * 50, 10, 3)) == 10


def test_a_block_costs_more_rows_where_they_are_short():
    sizes = [2**n for n in range(32)]
    prices = [cuts.price(size) for size in sizes]
    assert prices == sorted(prices, reverse=True)
    assert (prices[0], prices[-1]) == (cuts.DEAREST, cuts.PACKING)
    assert prices[0] > prices[18] > prices[-1]


def test_fillers_leave_no_trace():
    """NaN in an expert's last row, which fillers repeat, stays in that row and that expert's gradients."""
    ids = torch.tensor([[0]] * 9 + [[1]] * 8 + [[2]] * 9)
    assert walk.Walk.of(ExpertLayout.from_topk(ids, 3), 8, PRICE).fillers is not None
    bf16 = {"dtype": torch.bfloat16}
    x, gate_up, down = randn(26, 6, **bf16), randn(3, 8, 6, **bf16), randn(3, 6, 4, **bf16)
    weights = torch.rand(26, 1)
    weights[3] = torch.nan
    x[16] = torch.nan
    leaves = [v.requires_grad_() for v in (x, gate_up, down, weights)]
    out = moe_mlp(x, gate_up, down, ids, weights)
    assert out.isnan().any(1).nonzero()[:, 0].tolist() == [3, 16]
    for grad in torch.autograd.grad(out, leaves[1:3], torch.ones_like(out)):
        assert grad.isnan().flatten(1).any(1).tolist() == [True, True, False]


@pytest.mark.parametrize("flags", [{}, {"gather": True, "activation": "swiglu"}, {"scatter": True}], ids=str)
def test_rows_without_a_slot_do_nothing(flags):
    """In the middle of an expert's rows: as if the rows there are had been told alone."""
    counts, row_to_slot = torch.tensor([0, 3, 0, 2]), torch.tensor([4, -1, 0, -1, 2, -1])
    layout = ExpertLayout.from_sorted(counts, row_to_slot, 2)
    x = randn(3 if flags.get("gather") else 6, 5, dtype=torch.float64)
    if not flags.get("gather"):
        x[row_to_slot < 0] = torch.nan
    scale = torch.tensor([[0.5, torch.nan], [2.0, torch.nan], [3.0, torch.nan]], dtype=torch.float64)
    x, weight, scale = (v.requires_grad_() for v in (x, randn(4, 6, 5, dtype=torch.float64), scale))
    out = grouped_gemm(x, weight, layout, scale=scale, **flags)
    expected = [torch.zeros(out.shape[1], dtype=torch.float64)] * 6
    for row, expert in ((0, 1), (2, 1), (4, 3)):
        slot = int(row_to_slot[row])
        y = weight[expert] @ x[slot // 2 if flags.get("gather") else row]
        if "activation" in flags:
            y = torch.nn.functional.silu(y[:3]) * y[3:]
        expected[slot if flags.get("scatter") else row] = y * scale.view(-1)[slot]
    expected = torch.stack(expected)
    torch.testing.assert_close(out, expected)
    grad = randn(*out.shape, dtype=torch.float64)
    for a, b in zip(
        *(torch.autograd.grad(y, (x, weight, scale), grad) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_do_not_show(dtype, monkeypatch):
    """However experts are put together, the result is the same to the bit."""
    ids = routing(40, 8, 2, "zipf", dropped=0.1)
    shapes = ((40, 16), (8, 24, 16), (8, 16, 12), (40, 2), (8, 24), (8, 16))
    x, up, down, w, up_bias, down_bias = (randn(*s, dtype=dtype).requires_grad_() for s in shapes)
    results = []
    for size, steps in ((cuts.BLOCK, cuts.STEPS), (1, cuts.STEPS), (200, cuts.STEPS), (200, 0)):
        monkeypatch.setattr(cuts, "BLOCK", size)
        monkeypatch.setattr(cuts, "STEPS", steps)
        out = moe_mlp(x, up, down, ids, w, gate_up_bias=up_bias, down_bias=down_bias)
        results.append((out, *torch.autograd.grad(out.sum(), (x, up, down, w, up_bias, down_bias))))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_same(actual, expected)
