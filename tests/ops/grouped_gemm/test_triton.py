"""The Triton backend of grouped_gemm: every path through the launcher; interpreted, the conformance suite too.

TRITON_INTERPRET=1 pytest tests/ops/grouped_gemm/test_triton.py interprets it.
"""

import os
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.errors import UnsupportedError
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.ops.grouped_gemm.cases import SMALL
from anabranch.testing import STRIDES, assert_same, guard_band, randn, routing, strided
from anabranch.testing.conformance import CHECKS, FULL, VARIANTS, check_case, make, solve
from anabranch.testing.problems import Flags, Problem

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETS, reason="needs TRITON_INTERPRET=1")
runs = pytest.mark.op("grouped_gemm", "triton")
pytestmark = [
    # NumPy, which interprets, warns of NaN where a GPU does not, and of how the interpreter reads a scalar.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
# The interpreter cannot multiply bf16.
DTYPES = (torch.float32, torch.float16, *[torch.bfloat16] * (torch.cuda.is_available() and not INTERPRETS))
# The others repeat much, or go over shapes that are here one by one.
QUICK = (
    "counts_that_claim_too_much",
    "dropped_and_repeated_choices",
    "every_pattern_of_empty_experts",
    "every_variant",
    "experts_that_share_a_tile",
    "full_precision",
    "no_tokens",
    "rows_past_the_last_expert",
    "square_and_half_square_weights",
)
ALIGNED = dict(E=4, N=32, K_dim=64)
"""Sizes that the tensor memory accelerator takes, in every dtype."""


@pytest.fixture
def facts():
    from anabranch._backends.triton import device

    return device


@pytest.fixture
def hopper(facts, monkeypatch):
    """The paths of a GPU with a tensor memory accelerator; what is interpreted of it are its descriptors."""
    if INTERPRETS:
        monkeypatch.setattr(facts, "capability", lambda _: (9, 0))
    elif torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with a tensor memory accelerator")


@contextmanager
def launches():
    """The constants of what is launched, by kernel."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from anabranch._backends.triton import remembered
    from anabranch._backends.triton.prepared import Launch

    remembered._remembered.cache_clear()  # a call that repeats another decides nothing
    function = InterpretedFunction if INTERPRETS else JITFunction
    found = []
    original = function.run

    def run(self, *args, **kwargs):
        found.append((self.fn.__name__, kwargs))
        return original(self, *args, **kwargs)

    function.run = run
    try:
        # Prepared launches pass Triton by.
        with mock.patch.object(Launch, "__call__", Launch.unprepared):
            yield found
    finally:
        function.run = original


def constants(found, kernel):
    return [kwargs for name, kwargs in found if name == kernel]


@interpreted
@pytest.mark.parametrize("check", QUICK)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check(check, dtype):
    CHECKS[check]("triton", dtype, "cpu")


@interpreted
@pytest.mark.parametrize("index", range(len(SMALL)), ids=[str(case) for case in SMALL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case(index, dtype):
    check_case("triton", dtype, "cpu", SMALL[index], VARIANTS[(2 * index + 1) % len(VARIANTS)])


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_the_accelerators_paths(hopper, dtype, flags, device):
    """Loads and stores through descriptors: values and gradients."""
    with launches() as found:
        solve("triton", make(dtype, device, flags=flags, **ALIGNED))
    forward, *_, backward = constants(found, "forward_kernel")
    assert forward["W_TMA"]
    assert forward["X_TMA"] is not flags.gather
    assert forward["OUT_TMA"] is not flags.scatter
    assert forward["KEEP_H"] == forward["H_TMA"] == (flags.activation is not None)
    assert backward["OUT_TMA"]
    assert constants(found, "weight_gradient_kernel")[0]["Z_TMA"] or flags.scatter


@runs
@pytest.mark.parametrize("counts", [[8, 0, 12, 4], [0, 0, 0, 0], [5, 0, 33, 13]], ids=str)
def test_ragged_descriptors_stop_at_the_experts_end(hopper, counts, device):
    """Rows past the last expert hold NaN in x and in the gradient; several tiles, whole and partial."""
    rows = sum(counts) + 7
    ids = [e for e, n in enumerate(counts) for _ in range(n)]
    ids = torch.tensor(ids + [-1] * (rows - len(ids))).reshape(rows, 1)
    problem = make(torch.float32, device, ids, flags=Flags(bias=True), counts=counts, **ALIGNED)
    with launches() as found:
        solve("triton", problem)
    assert all(k["X_TMA"] and k["OUT_TMA"] for k in constants(found, "forward_kernel"))


@runs
def test_descriptors_write_only_the_output(hopper, device):
    problem = make(torch.float32, device, flags=Flags(bias=True), **ALIGNED)
    out, untouched = guard_band(tuple(problem.grad.shape), torch.float32, columns=4)
    with torch.no_grad():
        problem.call("triton", out=out)
        expected = problem.call("triton")
    untouched()
    assert_same(out, expected)


REFUSED = {
    "the device has no tensor memory accelerator": (lambda: torch.zeros(16, 16), (8, 9)),
    "the tensor is empty": (lambda: torch.zeros(0, 16), (9, 0)),
    "the tile's inner dimension is not contiguous": (lambda: torch.zeros(16, 16).T, (9, 0)),
    "the base address is not a multiple of 16 bytes": (lambda: torch.zeros(16, 20)[:, 1:17], (9, 0)),
    "stride 18 of dimension 0 is not a positive multiple of 16 bytes": (lambda: torch.zeros(16, 18), (9, 0)),
    "size 18 of the tile's inner dimension is not a multiple of 16 bytes": (
        lambda: torch.zeros(16, 20)[:, :18],
        (9, 0),
    ),
    "stride 0 of dimension 0 is not a positive multiple of 16 bytes": (
        lambda: torch.zeros(1, 16).expand(16, 16),
        (9, 0),
    ),
}


@interpreted
@pytest.mark.parametrize("reason", REFUSED)
def test_why_the_accelerator_is_not_used(reason, facts, monkeypatch):
    value, capability = REFUSED[reason]
    monkeypatch.setattr(facts, "capability", lambda _: capability)
    assert facts.tma_refusal(value()) == reason


@interpreted
def test_what_the_accelerator_takes(facts, monkeypatch):
    monkeypatch.setattr(facts, "capability", lambda _: (9, 0))
    assert facts.tma_refusal(torch.zeros(3, 16, 20)) is None
    assert facts.tma_refusal(torch.zeros(16, 16).T, inner=0) is None
    assert facts.tma_refusal(torch.zeros(16, 24, dtype=torch.float16)[:, 8:]) is None


@runs
@pytest.mark.parametrize("flags", [FULL, Flags(bias=True)], ids=str)
def test_int64_offsets(flags, facts, monkeypatch, device):
    """Offsets of 64 bits give the same bits."""
    problem = make(torch.float32, device, flags=flags)
    expected = problem.run("triton")
    monkeypatch.setattr(facts, "INT32_MAX", 0)
    with launches() as found:
        actual = problem.run("triton")
    assert {str(k["OFFSET"]) for _, k in found if "OFFSET" in k} == {"int64"}
    for name, value in actual.items():
        assert_same(value, expected[name], name=name)


@runs
@pytest.mark.parametrize("on_hopper", [False, True])
@pytest.mark.parametrize("layout", STRIDES)
def test_every_memory_layout(layout, on_hopper, request, device):
    if on_hopper:
        request.getfixturevalue("hopper")
    problem = make(torch.float32, device, routing(9, 4, 2, "even"), flags=FULL, **ALIGNED)
    for name in ("x", "weight", "grad", "scale"):
        solve(
            "triton",
            problem.with_inputs(**{name: strided(getattr(problem, name), layout)}),
            f"{name} {layout}",
        )


@runs
def test_holes_among_an_experts_rows(device):
    """A row without a slot in the middle, as a sort made elsewhere may leave it, is zero and nobody's gradient."""
    flags = Flags(gather=True, bias=True, scale=True, activation="swiglu")
    problem = make(torch.float32, device, routing(6, 4, 2, "even"), flags=flags)
    row_to_slot = problem.layout.row_to_slot.clone()
    hole, slot = 4, int(row_to_slot[4])
    row_to_slot[hole] = -1
    slot_to_row = problem.layout.slot_to_row.clone()
    slot_to_row.view(-1)[slot] = -1
    holed = replace(problem.layout, row_to_slot=row_to_slot, slot_to_row=slot_to_row)
    scale = problem.scale.clone()
    scale.view(-1)[slot] = torch.nan
    grad = problem.grad.clone()
    grad[hole] = torch.nan
    changed = Problem(problem.ids, holed, flags, problem.x, problem.weight, problem.bias, scale, grad)
    actual, expected = changed.run("triton"), changed.run("reference")
    assert torch.equal(actual["out"][hole], torch.zeros_like(actual["out"][hole]))
    assert actual["scale"].view(-1)[slot] == 0
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def holed(counts, holes):
    """Rows in order, but some without a slot."""
    slots = torch.arange(sum(counts)).flip(0)
    slots[holes] = sum(counts)
    return ExpertLayout.from_sorted(torch.tensor(counts), slots, 2)


@runs
@pytest.mark.parametrize("value", [3.0, torch.nan])
@pytest.mark.parametrize(
    "options", [{}, dict(transpose_weight=True), dict(gather=True), dict(activation="silu")], ids=str
)
def test_holes_that_the_accelerator_loads(hopper, options, value):
    """Rows without a slot add nothing to weight's gradient, whatever they hold, though tiles take them in."""
    counts, holes = [33, 0, 19, 12], [4, 32, 63]
    gather, swap = options.get("gather", False), options.get("transpose_weight", False)
    x, weight, grad = (
        randn(32 if gather else 64, 64),
        randn(4, *((64, 32) if swap else (32, 64))),
        randn(64, 32),
    )
    grad[holes] = value
    if not gather:
        x[holes] = value
    weight.requires_grad_()

    def d_weight(backend):
        out = grouped_gemm(x, weight, holed(counts, holes), backend=backend, **options)
        return torch.autograd.grad(out, weight, grad)[0]

    with launches() as found:
        actual = d_weight("triton")
    torch.testing.assert_close(actual, d_weight("reference"), rtol=1e-5, atol=1e-5)
    tiles_first, pointers = constants(found, "weight_gradient_kernel")
    assert tiles_first["Z_TMA"]
    assert tiles_first["X_TMA"] is not gather
    assert pointers["Z_TMA"] is pointers["X_TMA"] is False
    assert_same(d_weight("triton"), actual)


@runs
@pytest.mark.parametrize(
    "options", [dict(gather=True, activation="silu"), dict(scatter=True, gather=True)], ids=str
)
def test_holes_that_nothing_loads(hopper, options):
    """What was written as zero, or is found through slots, is not looked at again."""
    weight = randn(4, 32, 64).requires_grad_()
    with launches() as found:
        out = grouped_gemm(randn(32, 64), weight, holed([33, 0, 19, 12], [4]), backend="triton", **options)
        torch.autograd.grad(out, weight, torch.ones_like(out))
    assert len(constants(found, "weight_gradient_kernel")) == 1
    assert not constants(found, "_mark_kernel")


@runs
@pytest.mark.parametrize(
    ("counts", "marked"), [([2] * 300, [299]), ([2] * 300, []), ([5000, 3, 0, 1], [0, 3])]
)
def test_only_experts_with_holes_are_done_again(counts, marked):
    from anabranch.ops.grouped_gemm.backends.triton import launch
    from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW

    last = torch.tensor(counts).cumsum(0) - 1
    layout = holed(counts, last[marked])
    rows = layout.num_rows
    d_z, x, found = randn(rows, 24), randn(rows, 40), torch.full((len(counts), 24, 40), torch.nan)
    expected = found.clone()
    launch.without_holes(d_z, x, layout, found, z_rows=ROW, x_rows=ROW)
    for expert in marked:
        live = slice(int(last[expert]) + 1 - counts[expert], int(last[expert]))
        expected[expert] = (d_z[live].double().T @ x[live].double()).float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@runs
def test_tf32_only_where_it_is_allowed(device):
    problem = make(torch.float32, device, flags=Flags())
    before = torch.backends.cuda.matmul.allow_tf32
    found = {}
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            with launches() as made:
                problem.run("triton")
            found[allowed] = {k["PRECISION"] for _, k in made if "PRECISION" in k}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert found == {False: {"ieee"}, True: {"tf32"}}


@runs
@pytest.mark.parametrize("kind", [tiles.FORWARD, tiles.GATED, tiles.INTERLEAVED, tiles.WEIGHT_GRADIENT])
def test_any_tiles_give_the_same_result(kind):
    """Flattened loops, narrow and wide tiles, groups of one."""
    from anabranch.epilogues import resolve
    from anabranch.ops.grouped_gemm.backends.triton import launch
    from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW

    layout = ExpertLayout.from_topk(routing(40, 3, 1, "zipf"), 3)
    x, w, d_z = randn(40, 48), randn(3, 64, 48, scale=48**-0.5), randn(40, 64)
    epilogue = resolve("test", "swiglu" if kind in (tiles.GATED, tiles.INTERLEAVED) else "silu")
    results = []
    for config in (
        tiles.GroupedGemmConfig(16, 16, 16, 4, 2, group_m=1),
        tiles.GroupedGemmConfig(16, 32, 64, 4, 1, flatten=True),
        tiles.GroupedGemmConfig(64, 64, 16, 8, 3),
    ):
        if kind == tiles.WEIGHT_GRADIENT:
            out = torch.full_like(w, torch.nan)
            launch.weight_gradient(d_z, x, layout, out, z_rows=ROW, x_rows=ROW, config=config)
        else:
            out = torch.full((40, 64 // epilogue.columns), torch.nan)
            launch.gemm(
                x, w, layout, out, epilogue=epilogue, interleaved=kind == tiles.INTERLEAVED, config=config
            )
        results.append(out)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)
    assert results[0].any()


@runs
def test_fp64_is_refused(device):
    with pytest.raises(UnsupportedError, match="triton: it accumulates in fp32, too coarse for float64"):
        make(torch.float64, device).call("triton")


@runs
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize(
    ("rows", "total", "dead"),
    [
        (130, 130, []), (130, 130, [0, 63, 64, 129]), (130, 64, [3]), (70, 0, []), (1, 1, []), (64, 2**31 - 1, [5]),
        (64, -5, []),
    ],
)  # fmt: skip
def test_what_hopper_clears(rows, total, dead, columns, device):
    """Rows that no slot has, in a pass of plain Triton after its product."""
    from anabranch.ops.grouped_gemm.backends.hopper.unused import clear

    offsets = torch.tensor([0, 0, total], dtype=torch.int32)
    row_to_slot = torch.arange(rows, dtype=torch.int32)
    row_to_slot[dead] = -1
    out, untouched = guard_band((rows, 1100), torch.float32, device, columns=columns)
    out.copy_(torch.rand(rows, 1100) + 1)
    expected = out.clone()
    expected[dead] = 0
    expected[max(0, total) :] = 0
    clear(out, offsets, row_to_slot)
    untouched()
    assert torch.equal(out, expected)
