"""The tools that judge everything else can fail, and fail for the right reason."""

import pytest
import torch

from anabranch import testing as at
from anabranch.testing.steps import STEPS, results

BF16 = torch.bfloat16


def product(scale: float = 1.0):
    x, w = at.randn(32, 64, dtype=BF16, scale=scale).double(), at.randn(48, 64, dtype=BF16).double()
    return x @ w.T, x.abs() @ w.abs().T


@pytest.mark.parametrize("scale", [1e-3, 1, 30])
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_budget_takes_one_rounding_at_any_scale(dtype, scale):
    reference, magnitude = product(scale)
    actual = reference.to(dtype)
    at.assert_within_budget(actual, reference, actual)
    at.assert_component_wise(actual, reference, magnitude, 64)


@pytest.mark.parametrize("scale", [1e-3, 1, 30])
def test_budget_refuses_zeros_at_any_scale(scale):
    reference, magnitude = product(scale)
    zeros = torch.zeros_like(reference, dtype=BF16)
    with pytest.raises(AssertionError, match="out of bounds"):
        at.assert_within_budget(zeros, reference, reference.to(BF16))
    with pytest.raises(AssertionError, match="out of bounds"):
        at.assert_component_wise(zeros, reference, magnitude, 64)


def test_a_bound_that_zeros_meet_is_refused():
    reference = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="zeros would pass"):
        at.assert_within_budget(reference, reference, torch.full((2, 2), 1.6))
    with pytest.raises(AssertionError, match="zeros would pass"):
        at.assert_component_wise(reference, reference, reference * 2.0**53, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_never_passes(bad):
    reference, magnitude = product()
    actual = reference.to(BF16)
    actual[3, 4] = bad
    with pytest.raises(AssertionError, match=r"1 of 1536 elements are out of bounds, the worst at \(3, 4\)"):
        at.assert_within_budget(actual, reference, reference.to(BF16))
    with pytest.raises(AssertionError, match=r"the worst at \(3, 4\)"):
        at.assert_component_wise(actual, reference, magnitude, 64)
    with pytest.raises(AssertionError, match="result's baseline is not finite"):
        at.assert_within_budget(reference.to(BF16), reference, actual)
    with pytest.raises(AssertionError, match="result's reference is not finite"):
        at.assert_within_budget(reference.to(BF16), actual.double(), actual)


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_small_row_is_held_to_a_small_error(size):
    reference, magnitude = product()
    reference[5] *= size
    magnitude[5] *= size
    baseline = reference.to(BF16)
    wrong = baseline.clone()
    wrong[5] = 0
    with pytest.raises(AssertionError, match="the worst at"):
        at.assert_within_budget(wrong, reference, baseline, scale=magnitude)
    if size == 1e-2:
        with pytest.raises(AssertionError, match="the worst at"):
            at.assert_within_budget(wrong, reference, baseline)
    else:
        at.assert_within_budget(wrong, reference, baseline, rows=False)


def test_a_zero_row_is_exactly_zero():
    reference, magnitude = product()
    reference[7] = magnitude[7] = 0
    baseline = reference.to(BF16)
    actual = baseline.clone()
    actual[7, 0] = 1e-30
    with pytest.raises(AssertionError, match=r"the worst at \(7, 0\)"):
        at.assert_within_budget(actual, reference, baseline)
    with pytest.raises(AssertionError, match=r"the worst at \(7, 0\)"):
        at.assert_component_wise(actual, reference, magnitude, 64)


def test_two_roundings_are_more_than_one():
    values = torch.linspace(1, 2, 4001, dtype=torch.float64)
    once, twice = values.to(BF16), (values.to(BF16).double() * 1.001).to(BF16)
    at.assert_component_wise(once, values, values, 1)
    with pytest.raises(AssertionError):
        at.assert_component_wise(twice, values * 1.001, values, 1)
    at.assert_component_wise(twice, values * 1.001, values, 1, roundings=2)


def test_shapes_and_dtypes_are_compared():
    reference, magnitude = product()
    with pytest.raises(AssertionError, match=r"y: actual has shape \(32, 1\), the reference \(32, 48\)"):
        at.assert_within_budget(reference[:, :1], reference, reference, name="y")
    with pytest.raises(AssertionError, match=r"must be float64, not torch\.float32"):
        at.assert_component_wise(reference, reference.float(), magnitude, 64)
    with pytest.raises(AssertionError, match=r"dtype torch\.int64, which is not floating"):
        at.assert_within_budget(reference.long(), reference, reference)


def test_assert_same_sees_one_bit():
    a = torch.tensor([1.0, float("nan"), 0.0])
    at.assert_same(a, a.clone())
    b = a.clone()
    b[2] = 1e-45
    with pytest.raises(AssertionError, match=r"1 of 3 elements differ, the first at \(2,\)"):
        at.assert_same(b, a)
    with pytest.raises(AssertionError, match="dtype"):
        at.assert_same(a.double(), a)
    with pytest.raises(AssertionError, match="shape"):
        at.assert_same(a[None], a)


@pytest.mark.parametrize("kind", at.ROUTINGS)
def test_routings_are_what_they_are_called(kind):
    ids = at.routing(300, 6, 2, kind)
    counts = torch.bincount(ids.reshape(-1), minlength=6).tolist()
    assert ids.shape == (300, 2)
    assert sum(counts) == 600
    distinct = bool((ids[:, 0] != ids[:, 1]).all())
    assert distinct == (kind not in ("one_expert", "duplicates"))
    if kind == "even":
        assert set(counts) == {100}
    elif kind == "one_expert":
        assert counts == [0] * 5 + [600]
    elif kind == "zipf":
        assert counts[0] > 2 * counts[5] > 0
    else:
        empty = {"empty_first": [0], "empty_last": [5], "every_other": [0, 2, 4]}.get(kind, [])
        assert [e for e in range(6) if counts[e] == 0] == empty


def test_routing_drops_and_repeats_itself():
    draws = [at.routing(50, 4, 2, dropped=0.3, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*draws)
    assert int(((draws[0] < 0) | (draws[0] >= 4)).sum()) == 30
    assert at.routing(0, 4, 2).shape == (0, 2)
    assert at.routing(5, 1, 3, "empty_first", dtype=torch.int32).dtype == torch.int32
    with pytest.raises(ValueError, match="expected one of even, random"):
        at.routing(1, 1, 1, "evil")


@pytest.mark.parametrize("layout", at.STRIDES)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)])
def test_strides_keep_the_numbers(layout, shape):
    value = at.randn(*shape)
    view = at.strided(value, layout)
    assert view.shape == value.shape
    if "expanded" not in layout:
        assert torch.equal(view, value)
    if value.numel():
        assert view.is_contiguous() == (
            layout in ("contiguous", "offset") or (layout == "padded" and len(shape) < 2)
        )
        assert (view.storage_offset() == 3) == (layout == "offset")
        assert (0 in view.stride()) == ("expanded" in layout)


def test_empty_patterns_are_all_of_them():
    patterns = list(at.empty_patterns(3, rows=2))
    assert len({tuple(c > 0 for c in counts) for counts in patterns}) == len(patterns) == 8
    assert patterns[0] == [0, 0, 0]
    assert patterns[-1] == [2, 3, 4]


@pytest.mark.parametrize(
    ("shape", "columns"), [((5,), 0), ((5, 7), 0), ((5, 7), 3), ((5, 2, 7), 1), ((0, 7), 1)]
)
def test_guard_band_sees_a_touch(shape, columns):
    view, check = at.guard_band(shape, BF16, columns=columns)
    assert view.shape == shape
    assert bool(view.isnan().all())
    assert view.is_contiguous() == (columns == 0 or 0 in shape)
    view.fill_(123)
    check()
    end = view.storage_offset() + (view.numel() if columns == 0 else shape[-1])
    torch.as_strided(view, (1,), (1,), end).fill_(5)
    with pytest.raises(AssertionError, match="1 elements around a tensor"):
        check()


@pytest.mark.parametrize(
    "dtype", [torch.float16, BF16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_poison_is_nan_in_every_dtype(dtype, monkeypatch):
    blocks = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: blocks.append(full(*a, **k)) or blocks[-1])
    at.poison("cpu", torch.zeros(3, 4, dtype=dtype))
    assert len(blocks) == 2
    values = blocks[0].view(dtype)
    assert values.numel() == 12
    assert bool((values.isnan() if dtype.is_floating_point else values > 2**30).all())


def test_usable_backends():
    assert at.usable_backends("grouped_gemm")[-2:] == ["eager", "reference"]
    assert "hopper" not in at.usable_backends("grouped_gemm")


def one_after_the_other(x, w):
    """x @ w.T in fp32, from the first term to the last."""
    total = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1] * w[:, k]
    return total


@pytest.mark.parametrize("scale", [1e-3, 1, 30])
@pytest.mark.parametrize("terms", [64, 1024])
def test_a_sum_in_any_order_is_right_and_tf32_is_not(terms, scale):
    x, w = at.randn(24, terms, scale=scale), at.randn(40, terms)
    reference = x.double() @ w.double().T
    baseline = at.in_any_order(reference.float(), reference, terms)  # the most exact there is
    at.assert_within_budget(one_after_the_other(x, w), reference, baseline)
    ten_bits = [(v.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for v in (x, w)]
    with pytest.raises(AssertionError, match="out of bounds"):
        at.assert_within_budget(one_after_the_other(*ten_bits), reference, baseline)


def test_no_order_moves_what_is_zero_or_rounded_more_coarsely():
    reference = torch.tensor([[0.0, 0.0], [3.0, -1.0]], dtype=torch.float64)
    assert at.in_any_order(reference.float(), reference, 100)[0].eq(0).all()
    at.assert_same(at.in_any_order(reference.to(BF16), reference, 100), reference.to(BF16))
    empty = torch.zeros(0, 3)
    at.assert_same(at.in_any_order(empty, empty.double(), 100), empty)


def test_tensors_are_made_where_it_is_said():
    assert at.here() == torch.device("cpu")
    with at.on("meta"):
        assert at.randn(2, 3).is_meta
        assert at.routing(4, 3, 2).is_meta
        with at.on("cpu"):
            assert at.guard_band((2, 3), torch.float32)[0].device.type == "cpu"
        assert at.randn(2, 3, device="cpu").device.type == "cpu"
    assert at.randn(2, 3).device.type == "cpu"


@pytest.mark.parametrize("name", STEPS)
def test_every_step_gives_finite_results_of_its_own(name):
    step = STEPS[name]
    first, second = (results(step, step.inputs(torch.float32, "cpu", seed)) for seed in (0, 1))
    assert all(bool(value.isfinite().all()) for value in first)
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
