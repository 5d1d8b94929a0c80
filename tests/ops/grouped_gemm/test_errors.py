"""Bad arguments of grouped_gemm, word for word; and what is refused for another reason."""

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm
from anabranch.epilogues import base
from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.testing import usable_backends

T, E, K, N, K_DIM = 3, 4, 2, 6, 5
LAYOUT = ExpertLayout.from_topk(torch.tensor([[0, 1], [2, 3], [0, 3]]), E)
META = ExpertLayout(
    *(getattr(LAYOUT, f).to("meta") for f in ("counts", "offsets", "row_to_slot", "slot_to_row"))
)


def arguments(**changed) -> dict:
    given = {"x": torch.ones(T, K_DIM), "weight": torch.ones(E, N, K_DIM), "layout": LAYOUT, "gather": True}
    return {**given, **changed}


WRONG = {
    "x a list": ({"x": [1.0]}, ArgumentTypeError, "x: expected a tensor (T, K_dim), got list"),
    "x integral": (
        {"x": torch.ones(T, K_DIM, dtype=torch.int64)},
        ArgumentTypeError,
        "x: expected dtype float16 or bfloat16 or float32 or float64, got int64",
    ),
    "x of rank 3": (
        {"x": torch.ones(1, T, K_DIM)},
        ArgumentError,
        "x: expected shape (T, K_dim), got shape (1, 3, 5)",
    ),
    "x of rank 1, no gather": (
        {"x": torch.ones(K_DIM), "gather": False},
        ArgumentError,
        "x: expected shape (R, K_dim), got shape (5,)",
    ),
    "x in token order, no gather": (
        {"gather": False},
        ArgumentError,
        "x: expected shape (layout's R, weight's K_dim) = (6, 5), got shape (3, 5), which fits gather=True",
    ),
    "x in expert order, gather": (
        {"x": torch.ones(T * K, K_DIM)},
        ArgumentError,
        "x: expected shape (layout's T, weight's K_dim) = (3, 5), got shape (6, 5), which fits gather=False",
    ),
    "K_dim differs": (
        {"x": torch.ones(T, 4)},
        ArgumentError,
        "x: expected shape (layout's T, weight's K_dim) = (3, 5), got shape (3, 4)",
    ),
    "weight of rank 2": (
        {"weight": torch.ones(N, K_DIM)},
        ArgumentError,
        "weight: expected shape (E, N, K_dim), got shape (6, 5)",
    ),
    "weight of rank 2, transposed": (
        {"weight": torch.ones(N, K_DIM), "transpose_weight": True},
        ArgumentError,
        "weight: expected shape (E, K_dim, N), got shape (6, 5)",
    ),
    "weight transposed unsaid": (
        {"weight": torch.ones(E, K_DIM, N)},
        ArgumentError,
        "x: expected shape (layout's T, weight's K_dim) = (3, 6), got shape (3, 5), "
        "which fits transpose_weight=True",
    ),
    "weight transposed and no gather": (
        {"weight": torch.ones(E, N, K_DIM), "transpose_weight": True, "gather": False},
        ArgumentError,
        "x: expected shape (layout's R, weight's K_dim) = (6, 6), got shape (3, 5), "
        "which fits gather=True and transpose_weight=False",
    ),
    "weight transposed that no gate fits": (
        {"weight": torch.ones(E, K_DIM, 7), "activation": "swiglu"},
        ArgumentError,
        "x: expected shape (layout's T, weight's K_dim) = (3, 7), got shape (3, 5)",
    ),
    "weight of another dtype": (
        {"weight": torch.ones(E, N, K_DIM, dtype=torch.float16)},
        ArgumentTypeError,
        "weight: expected x's dtype float32, got float16",
    ),
    "weight elsewhere": (
        {"weight": torch.ones(E, N, K_DIM, device="meta")},
        ArgumentError,
        "weight: expected x's device cpu, got meta",
    ),
    "weight of other experts": (
        {"weight": torch.ones(5, N, K_DIM)},
        ArgumentError,
        "layout: expected a layout of weight's E = 5 experts, got 4 experts",
    ),
    "layout a tuple": (
        {"layout": (1, 2)},
        ArgumentTypeError,
        "layout: expected an ExpertLayout, got tuple",
    ),
    "layout of maps alone": (
        {"layout": ExpertLayout.from_slot_to_row(LAYOUT.slot_to_row, 6)},
        ArgumentError,
        "layout: expected a layout with counts and offsets, got maps alone",
    ),
    "layout of numbers": (
        {"layout": ExpertLayout(1, 2, LAYOUT.row_to_slot, LAYOUT.slot_to_row)},
        ArgumentTypeError,
        "layout.counts: expected a tensor (E,), got int",
    ),
    "layout of floats": (
        {
            "layout": ExpertLayout(
                LAYOUT.counts, LAYOUT.offsets.float(), LAYOUT.row_to_slot, LAYOUT.slot_to_row
            )
        },
        ArgumentTypeError,
        "layout.offsets: expected dtype int32 or int64, got float32",
    ),
    "layout of ids alone": (
        {"layout": ExpertLayout(*[LAYOUT.slot_to_row] * 4)},
        ArgumentError,
        "layout.row_to_slot: expected shape (R,), got shape (3, 2)",
    ),
    "layout elsewhere": ({"layout": META}, ArgumentError, "layout: expected x's device cpu, got meta"),
    "bias of rank 1": (
        {"bias": torch.ones(N)},
        ArgumentError,
        "bias: expected shape (E, N) of weight = (4, 6), got shape (6,)",
    ),
    "bias of half the columns": (
        {"bias": torch.ones(E, N // 2), "activation": "swiglu"},
        ArgumentError,
        "bias: expected shape (E, N) of weight = (4, 6), got shape (4, 3)",
    ),
    "bias of another dtype": (
        {"bias": torch.ones(E, N, dtype=torch.float64)},
        ArgumentTypeError,
        "bias: expected x's dtype float32, got float64",
    ),
    "bias elsewhere": (
        {"bias": torch.ones(E, N, device="meta")},
        ArgumentError,
        "bias: expected x's device cpu, got meta",
    ),
    "scale flat": (
        {"scale": torch.ones(T * K)},
        ArgumentError,
        "scale: expected shape layout's (T, K) = (3, 2), got shape (6,)",
    ),
    "scale of another K": (
        {"scale": torch.ones(T, 3)},
        ArgumentError,
        "scale: expected shape layout's (T, K) = (3, 2), got shape (3, 3)",
    ),
    "scale a number": ({"scale": 2.0}, ArgumentTypeError, "scale: expected a tensor (T, K), got float"),
    "scale elsewhere": (
        {"scale": torch.ones(T, K, device="meta")},
        ArgumentError,
        "scale: expected x's device cpu, got meta",
    ),
    "gate of odd columns": (
        {"weight": torch.ones(E, 7, K_DIM), "activation": "swiglu"},
        ArgumentError,
        "weight: expected an even N for the gated swiglu, got N = 7",
    ),
    "activation a function": (
        {"activation": torch.relu},
        ArgumentTypeError,
        f"activation: expected an Epilogue, None or one of {', '.join(sorted(base.REGISTRY))}, got function relu",
    ),
    "activation's parameter": (
        {"activation": "gpt_oss(limit=x)"},
        ArgumentError,
        "activation: expected a number for gpt_oss's limit, got 'x'",
    ),
    "out of another dtype": (
        {"out": torch.ones(T * K, N, dtype=torch.bfloat16)},
        ArgumentTypeError,
        "out: expected x's dtype float32, got bfloat16",
    ),
    "out without the gate": (
        {"out": torch.ones(T * K, N), "activation": "swiglu"},
        ArgumentError,
        "out: expected shape of the result = (6, 3), got shape (6, 6)",
    ),
    "out that needs a gradient": (
        {"out": torch.ones(T * K, N, requires_grad=True)},
        ArgumentError,
        "out: expected no tensor that requires grad (a mutating call has no gradient), "
        "got out, which does; use torch.no_grad()",
    ),
    "out when x needs a gradient": (
        {"out": torch.ones(T * K, N), "x": torch.ones(T, K_DIM, requires_grad=True)},
        ArgumentError,
        "out: expected no tensor that requires grad (a mutating call has no gradient), "
        "got x, which does; use torch.no_grad()",
    ),
    "backend unknown": (
        {"backend": "cuda"},
        ArgumentError,
        "backend: expected None or one of hopper, triton, eager, reference, got 'cuda'",
    ),
}


@pytest.mark.parametrize("backend", usable_backends("grouped_gemm"))
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_arguments(wrong, backend):
    changed, error, message = WRONG[wrong]
    with pytest.raises(error) as raised:
        grouped_gemm(**arguments(**{"backend": backend, **changed}))
    assert str(raised.value) == f"grouped_gemm: {message}"


@pytest.mark.parametrize("backend", usable_backends("grouped_gemm"))
@pytest.mark.parametrize("name", ["x", "weight", "bias", "scale"])
def test_out_that_shares_memory_with_an_input(name, backend):
    given = arguments(bias=torch.ones(E, N), scale=torch.ones(T, K))
    buffer = torch.ones(1000)
    shape = given[name].shape
    given[name] = buffer[10 : 10 + shape.numel()].view(shape)
    given["out"] = buffer[10 + shape.numel() - 1 :][: T * K * N].view(T * K, N)
    with pytest.raises(ArgumentError) as raised:
        grouped_gemm(**given, backend=backend)
    message = f"grouped_gemm: out: expected memory apart from {name}, got overlapping memory"
    assert str(raised.value) == message
    assert buffer.eq(1).all()
    given["out"] = buffer[10 + shape.numel() :][: T * K * N].view(T * K, N)
    assert grouped_gemm(**given, backend=backend) is given["out"]


def test_out_is_refused_only_while_a_gradient_is_recorded():
    given = arguments(x=torch.ones(T, K_DIM, requires_grad=True), out=torch.zeros(T * K, N))
    with torch.no_grad():
        assert grouped_gemm(**given).tolist() == [[5.0] * N] * (T * K)


def test_values_out_of_range_are_dropped_not_followed():
    """A layout made by hand may hold anything; its rows are checked by its constructors."""
    layout = ExpertLayout.from_sorted(torch.tensor([3, 9]), torch.tensor([0, 99, -5, 2]), 2)
    out = grouped_gemm(torch.ones(2, 3), torch.ones(2, 4, 3), layout, gather=True)
    assert out.tolist() == [[3.0] * 4, [0.0] * 4, [0.0] * 4, [3.0] * 4]
