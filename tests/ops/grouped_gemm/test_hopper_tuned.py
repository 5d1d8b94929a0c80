"""How Hopper's products are cut: what is legal, what is tried, and that what is stored is launched."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.ops.grouped_gemm.backends.hopper import config as tiles
from anabranch.ops.grouped_gemm.backends.hopper import launch
from anabranch.ops.grouped_gemm.backends.hopper.config import NARROW, WIDE, Config
from anabranch.testing import randn, routing
from anabranch.tuning.search import NothingToCheck, search
from anabranch.tuning.spec import from_json

pytestmark = pytest.mark.cpu

LIMIT = 232_448
"""Bytes of shared memory that a program may have on Hopper."""
T, K, E, N, K_DIM = 96, 2, 4, 272, 256
ILLEGAL = {
    "columns": (dict(block_n=192), "its tiles are of 128 or 256 columns and 64 of the reduction"),
    "depth": (dict(block_k=32), "its tiles are of 128 or 256 columns and 64 of the reduction"),
    "stores": (dict(store_n=128), "store_n = 128 is not 32 or 64"),
    "memory": (dict(num_stages=5), "it needs 279552 bytes of shared memory, the device has 232448"),
    "one stage": (
        dict(num_stages=1, skew=0),
        "it has fewer than 2 stages, or no buffer, or no rows to a group",
    ),
    "group": (dict(group_m=4097), "group_m = 4097 is above 4096"),
    "no buffer": (dict(num_buffers=0), "it has fewer than 2 stages, or no buffer, or no rows to a group"),
    "skew": (dict(skew=4), "skew = 4 and lag = 0 do not go with 4 stages"),
    "negative": (dict(skew=-1), "skew = -1 and lag = 0 do not go with 4 stages"),
    "lag": (dict(lag=3, skew=0), "skew = 0 and lag = 3 do not go with 4 stages"),
    "both": (dict(lag=2, skew=2), "skew = 2 and lag = 2 do not go with 4 stages"),
}


def legal(config):
    return tiles.legal(config, tiles.shared_memory(config), LIMIT)


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal(case):
    changed, reason = ILLEGAL[case]
    assert legal(replace(WIDE, **changed)) == reason


@pytest.mark.parametrize("default", [WIDE, NARROW], ids=["wide", "narrow"])
def test_what_is_tried_is_legal_and_little(default):
    assert legal(default) is None
    space = tiles.search_space(default, tiles.VARIANTS, (0, 1), (2,))
    assert default not in space
    assert len(set(space)) == len(space) <= 28
    assert [config for config in space if legal(config) is not None] == []
    assert all(from_json(Config, vars(config)) == config for config in space)
    assert {config.group_m for config in space} == set(tiles.GROUPS)
    # One of each family first, then three of these whole.
    assert len({tiles.family(config) for config in space}) <= 7


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


def rows_of(tokens=T, dropped=0.2):
    ids = routing(tokens, E, K, dropped=dropped, generator=torch.Generator().manual_seed(3))
    return launch.rows_of(ExpertLayout.from_topk(ids, E))


def test_keys(hopper_asked, hopper_launched):
    swiglu = resolve("test", "swiglu")
    rows = rows_of()
    weight = empty(E, N, K_DIM)
    launch.gemm(
        empty(T, K_DIM), weight, rows, empty(T * K, N // 2), h=empty(T * K, N), epilogue=swiglu, gathered=True
    )
    launch.gemm(empty(T * K, N), weight.mT, rows, empty(T * K, K_DIM))
    launch.gemm(empty(T * K, K_DIM), weight, rows, empty(T * K, N // 2), epilogue=swiglu, interleaved=True)
    launch.weight_gradient(empty(T * K, N), empty(T, K_DIM), rows, weight, b_gathered=True)
    assert [str(plan.key) for plan, _ in hopper_asked] == [
        "grouped_gemm.hopper_forward_gated bfloat16 N=272 K=256 E=4 rows<=64 gather keep_h",
        "grouped_gemm.hopper_forward bfloat16 N=256 K=272 E=4 rows<=64 n_major",
        "grouped_gemm.hopper_forward_interleaved bfloat16 N=272 K=256 E=4 rows<=64",
        "grouped_gemm.hopper_weight_gradient bfloat16 N=272 K=256 E=4 rows<=64 b_gather",
    ]
    assert all(product.key() is plan.key for plan, product in hopper_asked)


def test_keys_of_many_token_counts_are_few(hopper_asked, hopper_launched):
    weight = empty(E, N, K_DIM)
    for tokens in range(1, 8192, 97):
        rows = launch.rows_of(ExpertLayout.from_counts(torch.zeros(E, dtype=torch.int32), tokens))
        launch.gemm(empty(tokens, K_DIM), weight, rows, empty(tokens, N))
    assert 1 < len({plan.key for plan, _ in hopper_asked}) <= 9


@pytest.mark.parametrize("kind", ["gemm", "weight_gradient"])
def test_what_is_stored_is_launched_while_it_holds(kind, store, hopper_asked, hopper_launched, monkeypatch):
    rows = rows_of()

    def run(**given):
        if kind == "gemm":
            launch.gemm(empty(T * K, K_DIM), empty(E, N, K_DIM), rows, empty(T * K, N), **given)
        else:
            launch.weight_gradient(empty(T * K, N), empty(T * K, K_DIM), rows, empty(E, N, K_DIM), **given)
        found = hopper_launched[-1]
        return found["GROUP_M"], found["STAGES"], found["BN"]

    assert run() == (16, 4, 256)
    product = hopper_asked[0][1]
    for config in (replace(WIDE, group_m=8), replace(NARROW, group_m=4)):
        store(product, vars(config))
        expected = config.group_m, config.num_stages, config.block_n
        assert [run(), run()] == [expected, expected]
    assert run(config=WIDE) == (16, 4, 256)
    for wrong in ({**vars(WIDE), "num_stages": 5, "group_m": 8}, {"block_m": 64}):
        store(product, wrong)
        assert run() == (16, 4, 256)
    store(product, vars(NARROW))
    assert run() == (16, 6, 128)
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "0")
    assert run() == (16, 4, 256)


def multiply(x, weight, rows, out, *, h=None, bias=None, epilogue, interleaved, gathered, config):
    """What launch.gemm writes: nothing to the output's rows past the last expert's, zeros to h's."""
    ends = rows.offsets.tolist()
    x = x[rows.row_to_slot.clamp(min=0) // K] if gathered else x
    z = torch.zeros(len(x), weight.shape[1])
    for expert in range(E):
        some = slice(ends[expert], ends[expert + 1])
        z[some] = x[some].float() @ weight[expert].float().T + (0 if bias is None else bias[expert].float())
    parts = (z[:, 0::2], z[:, 1::2]) if interleaved else z.chunk(epilogue.columns, 1)
    y = epilogue.forward(*parts)
    if config.group_m == 8:
        y[3] = y[4]
    if config.group_m == 4:
        y = y * 1.02
    out[: ends[-1]] = y[: ends[-1]].to(out.dtype)
    if h is not None:
        h.copy_(z)


def multiply_rows(a, b, rows, d_weight, *, a_gathered, b_gathered, config):
    """What launch.weight_gradient writes."""
    ends = rows.offsets.tolist()
    a, b = (
        v[rows.row_to_slot.clamp(min=0) // K] if how else v for v, how in ((a, a_gathered), (b, b_gathered))
    )
    for expert in range(E):
        some = slice(ends[expert], ends[expert + 1])
        if config.group_m == 8:
            some = slice(ends[expert], max(ends[expert], ends[expert + 1] - 1))
        d_weight[expert] = a[some].float().T @ b[some].float()


def clock(runs, rounds):
    return {config: 1.0 + (config.group_m == 32) for config in runs}


def attempt(product):
    """What is refused of all that the tuner may try."""
    trial = replace(product.trial(product.plan.heuristic), family=lambda config: config)
    return search(trial, clock).rejected


@pytest.mark.usefixtures("hopper_launched", "hopper_clears")
@pytest.mark.parametrize(
    ("activation", "interleaved", "gathered", "dropped"),
    [
        ("swiglu", False, True, 0.2),
        ("swiglu", False, True, 0.0),
        ("geglu", True, False, 0.2),
        (None, False, True, 0.2),
        ("gelu", False, False, 0.2),
    ],
)
def test_wrong_products_are_refused(activation, interleaved, gathered, dropped, hopper_asked, monkeypatch):
    epilogue, rows = resolve("test", activation), rows_of(dropped=dropped)
    g = torch.Generator().manual_seed(0)
    x = randn(T if gathered else T * K, K_DIM, generator=g, dtype=torch.bfloat16)
    weight = randn(E, N, K_DIM, scale=K_DIM**-0.5, generator=g, dtype=torch.bfloat16)
    h = empty(T * K, N) if activation else None
    out = empty(T * K, N // epilogue.columns)
    given = dict(bias=randn(E, N, generator=g, dtype=torch.bfloat16), epilogue=epilogue)
    launch.gemm(x, weight, rows, out, h=h, interleaved=interleaved, gathered=gathered, **given)
    ((_, product),) = hopper_asked
    monkeypatch.setattr(launch, "gemm", multiply)
    rejected = attempt(product)
    assert {config.group_m for config in rejected} == {4, 8}
    assert len(rejected) == sum(c.group_m in (4, 8) for c in product.candidates(product.plan.heuristic))


@pytest.mark.parametrize("gathered", [None, "a", "b"])
def test_wrong_gradients_of_a_weight_are_refused(gathered, hopper_asked, hopper_launched, monkeypatch):
    rows = rows_of()
    g = torch.Generator().manual_seed(0)
    a, b = (
        randn(T if gathered == name else T * K, columns, generator=g, dtype=torch.bfloat16)
        for name, columns in (("a", N), ("b", K_DIM))
    )
    how = dict(a_gathered=gathered == "a", b_gathered=gathered == "b")
    launch.weight_gradient(a, b, rows, empty(E, N, K_DIM), **how)
    ((_, product),) = hopper_asked
    monkeypatch.setattr(launch, "weight_gradient", multiply_rows)
    assert {config.group_m for config in attempt(product)} == {8}


def test_a_weights_gradient_is_not_searched_for_with_holes(hopper_asked, hopper_launched, monkeypatch):
    """What lies there counts, until another pass takes it away."""
    slots = torch.arange(T * K)
    slots[5] = T * K
    layout = ExpertLayout.from_sorted(torch.tensor([100, 0, 90, 2]), slots, K)
    rows = launch.rows_of(layout)
    assert rows.holes
    assert rows.partial
    a, b = (randn(T * K, columns, dtype=torch.bfloat16) for columns in (N, K_DIM))
    launch.weight_gradient(a, b, rows, empty(E, N, K_DIM))
    ((_, product),) = hopper_asked
    monkeypatch.setattr(launch, "weight_gradient", multiply_rows)
    with pytest.raises(NothingToCheck):
        attempt(product)
