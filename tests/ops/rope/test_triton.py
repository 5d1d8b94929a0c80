"""What is special to the Triton kernels of rope: tiles, masks, offsets, and what the compiler makes of them.

They run where there is a GPU, or interpreted on the CPU: TRITON_INTERPRET=1 pytest tests/ops/rope/test_triton.py
"""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from anabranch import dispatch
from anabranch.errors import UnsupportedError
from anabranch.ops.rope import reference
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.rope.call import bind_mrope, bind_rope
from anabranch.ops.rope.cases import CASES
from anabranch.testing import assert_same, assert_within_budget, guard_band, randn, strided

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter truncates where it makes bf16.
BF16 = torch.cuda.is_available() and not INTERPRETED
DTYPES = (torch.float32, torch.float16, *[torch.bfloat16] * BF16)

runs = pytest.mark.op("rope", "triton")
# NumPy, which interprets, warns of NaN where a GPU does not, and of how the interpreter reads a scalar.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def arguments(q, k, table, *, positions=None, head_axis=1, sections=None, **kwargs):
    """Arguments of rope, or of mrope where there are sections, of the given shapes."""
    made = dict(q=q, k=k, head_axis=head_axis, **kwargs)
    made |= dict(cos=randn(*table), sin=randn(*table))
    if positions is not None:
        # Some are outside.
        made["positions"] = torch.randint(-2, table[0] + 2, positions)
    return made if sections is None else made | dict(sections=sections)


FORMS = {
    "half, full width": dict(q=(2, 9, 5, 16), k=(2, 1, 5, 16), table=(2, 5, 16)),
    "half, half width": dict(q=(2, 3, 5, 16), k=(2, 2, 5, 16), table=(1, 5, 8)),
    "adjacent, full width": dict(q=(2, 3, 5, 16), k=(2, 1, 5, 16), table=(2, 5, 16), pairing="adjacent"),
    "adjacent, half width": dict(q=(2, 3, 5, 16), k=None, table=(5, 8), pairing="adjacent"),
    "tokens before heads": dict(q=(2, 5, 3, 16), k=(2, 5, 1, 16), table=(2, 5, 16), head_axis=2),
    "packed": dict(q=(37, 3, 20), k=(37, 1, 20), table=(37, 20)),
    "part, half": dict(q=(1, 3, 5, 44), k=(1, 2, 5, 44), table=(5, 12), rotary_dim=12),
    "part, adjacent": dict(
        q=(1, 3, 5, 23), k=(1, 2, 5, 23), table=(5, 6), rotary_dim=6, pairing="adjacent"
    ),
    "two channels": dict(q=(2, 3, 5, 2), k=(2, 1, 5, 2), table=(2, 5, 2)),
    "one token": dict(q=(3, 4, 1, 64), k=(3, 1, 1, 64), table=(3, 1, 64)),
    "two blocks of tokens": dict(q=(1, 2, 70, 40), k=None, table=(70, 40)),
    "positions": dict(q=(3, 2, 5, 16), k=(3, 1, 5, 16), table=(6, 16), positions=(3, 5)),
    "positions for all": dict(
        q=(3, 2, 5, 16), k=None, table=(6, 16), positions=(1, 5), pairing="adjacent", rotary_dim=16
    ),
    "blocked": dict(q=(2, 3, 5, 24), k=(2, 1, 5, 24), table=(3, 2, 5, 24), sections=[3, 4, 5]),
    "blocked, one batch": dict(q=(2, 3, 5, 24), k=None, table=(3, 1, 5, 8), sections=[0, 3, 5], rotary_dim=16),
    "interleaved": dict(
        q=(2, 3, 5, 24), k=(2, 1, 5, 24), table=(3, 2, 5, 12), sections=[5, 4, 3], order="interleaved"
    ),
    "interleaved, packed": dict(
        q=(5, 3, 40), k=(5, 1, 40), table=(3, 5, 24), sections=[8, 0, 4], order="interleaved", rotary_dim=24
    ),
    "rows of positions": dict(
        q=(2, 3, 5, 16), k=(2, 1, 5, 16), table=(6, 16), sections=[2, 3, 3], positions=(3, 2, 5)
    ),
    "rows of positions, interleaved": dict(
        q=(2, 5, 3, 16), k=None, table=(6, 8), sections=[4, 2, 2], order="interleaved", positions=(3, 1, 5), head_axis=2
    ),
}  # fmt: skip


def bind(given):
    return (bind_mrope if "sections" in given else bind_rope)(**given)


def run(given):
    return (mrope if "sections" in given else rope)(**given)


def make(form, dtype):
    """Arguments, with q and k that require grad, and a gradient for each of the results."""
    q, k = form["q"], form["k"]
    leaves = [None if s is None else randn(*s, dtype=dtype).requires_grad_() for s in (q, k)]
    grads = [randn(*s, dtype=dtype) for s in (q, k) if s is not None]
    return arguments(*leaves, **{n: v for n, v in form.items() if n not in ("q", "k")}), grads


def results(given, grads):
    """Outputs and gradients."""
    leaves = [given[name] for name in ("q", "k") if given[name] is not None]
    outs = [y for y in run(given) if y is not None]
    return [*(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, grads)]


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_against_the_reference(form, dtype):
    given, grads = make(FORMS[form], dtype)
    found = results({**given, "backend": "triton"}, grads)
    guess = results({**given, "backend": "reference"}, grads)
    call = bind(given)
    wide = replace(
        call,
        **{n: None if x is None else x.detach().double().requires_grad_() for n, x in (("q", call.q), ("k", call.k))},
    )  # fmt: skip
    outs = [y for y in reference.rope(wide) if y is not None]
    truth = [
        *outs,
        *torch.autograd.grad(
            outs, [x for x in (wide.q, wide.k) if x is not None], [g.double() for g in grads]
        ),
    ]
    for name, y, exact, baseline in zip("abcd", found, truth, guess, strict=False):
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_within_budget(y, exact, baseline, name=name)
        r = call.rotary_dim
        source = exact[..., r:].to(dtype)
        assert_same(y[..., r:], source)


@runs
@pytest.mark.parametrize(
    "layout", ["transposed", "offset", "padded", "every_second", "expanded", "expanded_columns"]
)
@pytest.mark.parametrize("form", ["half, full width", "part, adjacent", "blocked", "rows of positions"])
def test_any_strides(form, layout):
    given, grads = make(FORMS[form], torch.float32)
    odd = {n: strided(x, layout) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    odd_grads = [strided(g, layout) for g in grads]
    plain = {n: x.contiguous() if isinstance(x, torch.Tensor) else x for n, x in odd.items()}
    for these in (odd, plain):
        these.update(backend="triton", q=these["q"].requires_grad_(), k=these["k"].requires_grad_())
    for a, b in zip(
        results(odd, odd_grads), results(plain, [g.contiguous() for g in odd_grads]), strict=True
    ):
        assert_same(a, b)


@runs
@pytest.mark.parametrize("form", [form for form in FORMS if "packed" not in form])
def test_in_place(form):
    """The same bits, and nothing beside q and k is written."""
    given, _ = make(FORMS[form], torch.float32)
    given = {**given, "backend": "triton", "q": given["q"].detach(), "k": given["q"].detach().clone()}
    expected = run(given)
    q, check_q = guard_band(tuple(given["q"].shape), torch.float32, columns=3)
    k, check_k = guard_band(tuple(given["k"].shape), torch.float32)
    q.copy_(given["q"]), k.copy_(given["k"])
    outs = run({**given, "q": q, "k": k, "inplace": True})
    assert outs[0] is q
    assert not torch.equal(q, given["q"])
    for y, x in zip(outs, expected, strict=True):
        assert_same(y, x)
    check_q(), check_k()


@runs
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_outside_the_table_nothing_changes(pairing):
    """Not even what a rotation by no angle would lose."""
    q = randn(1, 2, 5, 8)
    q[:, :, 1] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -0.0, 1.0, -1.0])
    positions = torch.tensor([2, -1, 3, 2**40, -(2**40)])
    cos, sin = randn(3, 8), randn(3, 8)
    y, _ = rope(q, None, cos, sin, positions=positions, pairing=pairing, backend="triton")
    assert torch.equal(y[:, :, 1:].view(torch.int32), q[:, :, 1:].view(torch.int32))
    assert not torch.equal(y[:, :, 0], q[:, :, 0])


@runs
@pytest.mark.parametrize("order", ["blocked", "interleaved"])
def test_equal_tables_give_equal_bits(order):
    """Whatever their form: one a pair or one a channel, three rows, positions."""
    q, k = randn(2, 3, 5, 16), randn(2, 1, 5, 16)
    cos, sin = randn(5, 8), randn(5, 8)
    full = [torch.cat((t, t), -1) for t in (cos, sin)]
    rows = [t.expand(3, 1, -1, -1) for t in (cos, sin)]
    index = torch.arange(5)
    expected = rope(q, k, cos, sin, backend="triton")
    for outs in (
        rope(q, k, *full, backend="triton"),
        rope(q, k, cos, sin, positions=index, backend="triton"),
        mrope(q, k, *rows, [4, 2, 2], order=order, backend="triton"),
        mrope(q, k, *full, [4, 2, 2], order=order, positions=index.expand(3, 1, -1), backend="triton"),
    ):
        for a, b in zip(outs, expected, strict=True):
            assert_same(a, b)


@runs
@pytest.mark.parametrize(
    "form", ["half, full width", "part, half", "rows of positions", "adjacent, full width"]
)
def test_tiles_do_not_show(form, monkeypatch):
    """However heads and tokens are cut, and however wide offsets are."""
    from anabranch._backends.triton import device
    from anabranch.ops.rope.backends import triton as backend

    given, grads = make(FORMS[form], torch.float32)
    given["backend"] = "triton"
    expected = results(given, grads)
    for change in (
        dict(SMALL=0),
        dict(HEADS=1),
        dict(THREADS=1),
        dict(VECTORS=2, THREADS=32),
        dict(THREADS=4096),
    ):
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setattr(backend, name, value)
            patch.setattr(device, "INT32_MAX", 0)
            for a, b in zip(results(given, grads), expected, strict=True):
                assert_same(a, b)


@runs
def test_fp64_is_refused():
    q = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="triton: it rotates in fp32, too coarse for float64"):
        rope(q, None, q[0], q[0], backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="compiles, which an interpreting Triton cannot")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_without_spills(arch):
    """Ahead of time, with no GPU: the kernels of real models' shapes."""
    pytest.importorskip("triton")
    from anabranch.ops.rope.backends import triton as backend
    from anabranch.testing.aot import compiling

    chosen = {case.name: case for case in CASES}
    with (
        mock.patch.object(dispatch, "probe", return_value=None),
        mock.patch.object(backend, "SMALL", 0),  # as many heads a program as large calls have
        compiling(arch) as found,
    ):
        for name in ("llama3_8b", "qwen2_vl_7b", "gpt_j_6b"):
            run({**chosen[name].arguments(1, 64), "backend": "triton"})
    assert len(found) == 3
    for kernel in found:
        assert kernel.spilled_bytes in (0, None), kernel
