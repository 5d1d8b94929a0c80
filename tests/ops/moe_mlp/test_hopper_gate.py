"""The gate's gradient on Hopper: however rows and the pre-activation are read, the bits are the same."""

from dataclasses import replace

import pytest
import torch

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.testing import assert_same, randn, routing

pytestmark = [pytest.mark.op("moe_mlp", "hopper"), pytest.mark.no_poison]

CASES = {
    # T, H, I, E, K, routing, activation
    "gated": (700, 512, 512, 7, 2, "zipf", "swiglu"),
    "columns": (333, 256, 328, 5, 3, "random", "swiglu"),
    "few_columns": (333, 192, 72, 5, 3, "random", "geglu"),
    "shallow": (300, 64, 256, 6, 2, "every_other", "swiglu"),
    "interleaved": (333, 256, 512, 5, 2, "random", "gpt_oss"),
    "plain": (333, 320, 256, 5, 2, "one_expert", "gelu"),
    # More tiles than an H200 has multiprocessors: 132.
    "many": (1100, 512, 512, 80, 4, "random", "swiglu"),
}  # fmt: skip


def make(case):
    """The arguments of a launch whose rows are copied, and the gradient in token order."""
    from anabranch._backends.triton.gather import gather_rows
    from anabranch.ops.grouped_gemm.backends.hopper.launch import rows_of

    T, H, I, E, K, kind, activation = CASES[case]  # noqa: E741
    g = torch.Generator().manual_seed(0)
    epilogue = resolve("test", activation)
    ids = routing(T, E, K, kind, dropped=0.1, generator=g)
    ids[3] = -1
    layout = ExpertLayout.from_topk(ids, E)
    # Some of the experts' rows lose their slots.
    slots, places = layout.row_to_slot.clone(), layout.slot_to_row.clone()
    lost = torch.arange(5, int(layout.offsets[-1]), 37, device=slots.device)
    places.view(-1)[slots[lost].long()] = -1
    slots[lost] = -1
    layout = replace(layout, row_to_slot=slots, slot_to_row=places)
    grad = randn(T, H, generator=g).bfloat16()
    grad[3] = torch.nan  # nobody's
    rest = dict(
        weight=randn(E, I, H, scale=H**-0.5, generator=g).bfloat16(),
        h=randn(layout.num_rows, I * epilogue.columns, generator=g).bfloat16(),
        scale=torch.rand(T, K, device=grad.device) + 0.1,
        rows=rows_of(layout),
        epilogue=epilogue,
    )
    return grad, gather_rows(grad, layout), rest, activation == "gpt_oss"


@pytest.mark.parametrize("case", CASES)
def test_every_way_gives_the_same_bits(case, monkeypatch):
    from anabranch.ops.moe_mlp.backends.hopper import launch

    grad, copied, rest, interleaved = make(case)
    h, scale = rest["h"], rest["scale"]
    last = int(rest["rows"].offsets[-1])
    found = {}
    for deep in (False, True):
        monkeypatch.setattr(launch, "DEEP", 0 if deep else 1 << 31)
        launch._plan.cache_clear()
        for gathered in (False, True):
            d_h, a = torch.full_like(h, 7.0), h.new_full((h.shape[0], rest["weight"].shape[1]), 7.0)
            d_scale = torch.full_like(scale, 7.0)
            launch.pre_activation_gradient(
                grad if gathered else copied,
                **rest,
                interleaved=interleaved,
                d_h=d_h,
                a_out=a,
                d_scale=d_scale,
                gathered=gathered,
            )
            found[deep, gathered] = d_h[:last], a[:last], d_scale
    launch._plan.cache_clear()
    expected = found.pop((False, False))
    assert expected[0].any()
    assert expected[2].any()
    for values in found.values():
        for value, right in zip(values, expected, strict=True):
            assert_same(value, right)
