"""Arguments of kinds that no function takes: refused by name, before any work."""

import warnings
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy
import pytest
import torch

from anabranch import (
    ArgumentError,
    ArgumentTypeError,
    ExpertLayout,
    explain,
    grouped_gemm,
    moe_mlp,
    multi_gemm,
    permute,
    rope,
    rope_index,
    topk_router,
    unpermute,
    vision_rotary,
    window_index,
)
from anabranch.epilogues import Epilogue, GptOss, Swiglu
from anabranch.nn import MoE, Rotary, Router

T, H, E, K = 3, 4, 2, 2
IDS = torch.tensor([[0, 1], [1, 1], [1, 0]])
LAYOUT = ExpertLayout.from_topk(IDS, E)
X, ROWS, WEIGHTS = torch.ones(T, H), torch.ones(T * K, H), torch.ones(T, K)
GATE_UP, DOWN = torch.ones(E, 6, H), torch.ones(E, H, 3)
TABLE, Q = torch.ones(T, H), torch.ones(1, 1, T, H)
VIDEO = {
    "spatial_merge_size": 1,
    "image_token_id": 7,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "video_grid_thw": [[2, 1, 2]],
}
TOKENS = torch.tensor([[1, 9, 8, 8, 8, 8, 2]])


def refusal(kind, call):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def kinds(dense):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "a sparse_coo one": dense.to_sparse(),
            "a sparse_csr one": dense.to_sparse_csr(),
            "a nested one": torch.nested.nested_tensor([dense[0], dense[1]]),
        }


@pytest.mark.parametrize("got", ["a sparse_coo one", "a sparse_csr one", "a nested one"])
def test_only_dense_tensors(got):
    x, table = kinds(X)[got], kinds(TABLE)[got]
    calls = {
        "moe_mlp: x: expected a dense tensor (T, H)": lambda: moe_mlp(x, GATE_UP, DOWN, IDS, WEIGHTS),
        "permute: x: expected a dense tensor (T, H)": lambda: permute(x, LAYOUT),
        "multi_gemm: xs[0]: expected a dense tensor (m, k)": lambda: multi_gemm([x], [GATE_UP[0]]),
        "topk_router: logits: expected a dense tensor (T, E)": lambda: topk_router(x, 1),
        "rope: cos: expected a dense tensor (B or 1, S, W), (B or 1, 1, S, W) or (S, W)": lambda: rope(
            Q, None, table, TABLE
        ),
        "MoE: x: expected a dense tensor (..., H)": lambda: MoE(H, 3, E, 1)(x),
    }
    for start, call in calls.items():
        assert refusal(ArgumentTypeError, call) == f"{start}, got {got}"


@pytest.mark.parametrize("value", [None, 1, "no", [], numpy.ones(2), torch.tensor(True)], ids=repr)
def test_flags_are_bools(value):
    calls = {
        "grouped_gemm: gather": lambda: grouped_gemm(X, GATE_UP, LAYOUT, gather=value),
        "grouped_gemm: scatter": lambda: grouped_gemm(ROWS, GATE_UP, LAYOUT, scatter=value),
        "grouped_gemm: transpose_weight": lambda: grouped_gemm(ROWS, GATE_UP, LAYOUT, transpose_weight=value),
        "moe_mlp: transpose_weight": lambda: moe_mlp(X, GATE_UP, DOWN, IDS, WEIGHTS, transpose_weight=value),
        "multi_gemm: transpose_x": lambda: multi_gemm([X], [GATE_UP[0]], transpose_x=value),
        "multi_gemm: transpose_weight": lambda: multi_gemm([X], [GATE_UP[0]], transpose_weight=value),
        "topk_router: renormalize": lambda: topk_router(X, 1, renormalize=value),
        "rope: inplace": lambda: rope(Q.clone(), None, TABLE, TABLE, inplace=value),
    }
    for start, call in calls.items():
        assert refusal(ArgumentTypeError, call) == f"{start}: expected a bool, got {type(value).__name__}"


@pytest.mark.parametrize("value", [numpy.ones(2), torch.ones(2), ["eager"], 1], ids=repr)
def test_words_are_strings(value):
    assert "backend: expected None or one of" in refusal(
        ArgumentError, lambda: permute(X, LAYOUT, backend=value)
    )
    assert "score: expected 'softmax' or" in refusal(ArgumentError, lambda: topk_router(X, 1, score=value))


@pytest.mark.parametrize("value", [1.0, True, numpy.int64(1), torch.tensor(1)], ids=repr)
def test_head_axis_is_an_int(value):
    message = refusal(ArgumentError, lambda: rope(Q, None, TABLE, TABLE, head_axis=value))
    assert message == f"rope: head_axis: expected 1 or 2, got {value!r}"


def test_layouts_put_together_by_hand():
    def with_(**changed):
        return lambda: grouped_gemm(ROWS, GATE_UP, replace(LAYOUT, **changed))

    empty = ExpertLayout(None, None, None, None)
    assert refusal(ArgumentTypeError, lambda: permute(X, empty)).startswith("permute: layout.row_to_slot: ")
    flat = LAYOUT.slot_to_row.flatten()
    assert refusal(ArgumentError, with_(slot_to_row=flat)).endswith("expected shape (T, K), got shape (6,)")
    short = refusal(ArgumentError, with_(offsets=LAYOUT.offsets[:1]))
    assert short == "grouped_gemm: layout.offsets: expected shape (E + 1,) = (3,), got shape (1,)"
    away = refusal(ArgumentError, with_(offsets=LAYOUT.offsets.to("meta")))
    assert away == "grouped_gemm: layout.offsets: expected slot_to_row's device cpu, got meta"
    floats = refusal(ArgumentTypeError, with_(row_to_slot=LAYOUT.row_to_slot.float()))
    assert floats == "grouped_gemm: layout.row_to_slot: expected dtype int32 or int64, got float32"
    assert refusal(ArgumentTypeError, with_(counts=[3, 3])).startswith("grouped_gemm: layout.counts: ")


def negated(value):
    lazy = torch.complex(torch.zeros_like(value), -value).conj().imag
    assert lazy.is_neg()
    return lazy


def test_lazy_negation_is_refused_by_what_mutates_alone():
    torch.testing.assert_close(
        grouped_gemm(negated(ROWS), GATE_UP, LAYOUT), grouped_gemm(ROWS, GATE_UP, LAYOUT)
    )
    out = torch.zeros(T * K, 6)
    for call in (
        lambda: grouped_gemm(ROWS, GATE_UP, LAYOUT, out=negated(out)),
        lambda: grouped_gemm(negated(ROWS), GATE_UP, LAYOUT, out=out),
        lambda: multi_gemm([X], [GATE_UP[0]], out=[negated(torch.zeros(T, 6))]),
        lambda: rope(negated(Q), None, TABLE, TABLE, inplace=True),
    ):
        assert "expected no tensor whose sign is yet to be turned" in refusal(ArgumentError, call)


class Unregistered(Epilogue):
    """One that operators cannot find by its name."""

    name = "unregistered"


@dataclass(frozen=True)
class Impostor(Swiglu):
    """One that bears another's name."""


def test_epilogues_have_to_be_registered():
    for value in (Unregistered(), Impostor(), Epilogue()):
        message = refusal(ArgumentError, lambda v=value: grouped_gemm(ROWS, GATE_UP, LAYOUT, activation=v))
        expected = "an epilogue whose class is decorated with @anabranch.epilogues.register"
        assert message == f"grouped_gemm: activation: expected {expected}, got a {type(value).__name__}"


@pytest.mark.parametrize("value", [None, "7", [7.0], True, torch.tensor(7.0)], ids=repr)
def test_parameters_of_epilogues_are_numbers(value):
    got = type(value).__name__
    assert (
        refusal(ArgumentTypeError, lambda: GptOss(limit=value))
        == f"gpt_oss: limit: expected a number, got {got}"
    )
    message = refusal(
        ArgumentTypeError, lambda: grouped_gemm(ROWS, GATE_UP, LAYOUT, activation=GptOss(alpha=value))
    )
    assert message == f"gpt_oss: alpha: expected a number, got {got}"
    ours, plain = (
        grouped_gemm(ROWS, GATE_UP, LAYOUT, activation=GptOss(limit=v)) for v in (numpy.float64(2), 2)
    )
    assert torch.equal(ours, plain)


def test_numbers_too_large():
    most = 2**31 - 1
    message = refusal(ArgumentError, lambda: ExpertLayout.from_topk(IDS, 2**70))
    assert message == f"ExpertLayout.from_topk: num_experts: expected fewer than {most}, got {2**70}"
    message = refusal(ArgumentError, lambda: topk_router(X, 1, scaling=10**400))
    assert message == "topk_router: scaling: expected a number that a float can hold, got a larger one"
    for argument in ("image_token_id", "video_token_id", "vision_start_token_id"):
        message = refusal(ArgumentError, lambda a=argument: rope_index(TOKENS, **{**VIDEO, a: 2**70}))
        assert message == f"rope_index: {argument}: expected an id that fits int64, got {2**70}"
    message = refusal(ArgumentError, lambda: rope_index(TOKENS, **VIDEO, tokens_per_second=2**70))
    assert message == f"rope_index: tokens_per_second: expected at most 2**53, got {2**70}"
    message = refusal(ArgumentError, lambda: rope_index(TOKENS, **VIDEO, second_per_grid_ts=[2**70]))
    assert message == f"rope_index: second_per_grid_ts: expected seconds that fit int64, got {2**70}"
    message = refusal(ArgumentError, lambda: vision_rotary(torch.ones(2), [[1, 2**70, 2]], 2))
    assert message == f"vision_rotary: grid_thw: expected [t, h, w] of at most {most}, got {[1, 2**70, 2]}"


def test_numbers_of_other_kinds():
    plain = rope_index(TOKENS, **VIDEO, tokens_per_second=2.5)
    for value in (Fraction(5, 2), numpy.float32(2.5)):
        assert torch.equal(rope_index(TOKENS, **VIDEO, tokens_per_second=value)[0], plain[0])
    all_in_one = window_index([[1, 4, 4]], 2**70, 2, 1)
    assert torch.equal(all_in_one[1], torch.tensor([0, 16], dtype=torch.int32))


def test_no_experts():
    message = refusal(ArgumentError, lambda: moe_mlp(X, GATE_UP[:0], DOWN[:0], IDS, WEIGHTS))
    assert message == "moe_mlp: gate_up: expected at least one expert, got E = 0"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_modules_cast_nothing_silently(dtype):
    message = refusal(ArgumentTypeError, lambda: Router(H, E, 1)(X.to(dtype)))
    expected = "dtype float16 or bfloat16 or float32 or float64"
    assert message == f"Router: x: expected {expected}, got {str(dtype).removeprefix('torch.')}"
    message = refusal(ArgumentTypeError, lambda: Rotary(H).tables(X))
    assert message == "Rotary: positions: expected dtype int32 or int64, got float32"


def test_modules_move_nothing():
    message = refusal(ArgumentError, lambda: Router(H, E, 1)(X.to("meta")))
    assert message == "Router: weight: expected x's device meta, got cpu"


def test_explain_of_the_reference():
    x = X.clone().requires_grad_()
    found = explain(moe_mlp, x, GATE_UP, DOWN, IDS, WEIGHTS, backend="reference")
    assert found.backend == "reference"
    assert found.saved_bytes > 0
    assert explain(permute, X, LAYOUT, backend="reference").saved_bytes == 0
    assert (
        explain(unpermute, ROWS.clone().requires_grad_(), LAYOUT, backend="reference").backend == "reference"
    )
    for fn in ([].append, None, numpy.add, torch.add):
        assert refusal(ArgumentError, lambda f=fn: explain(f)).startswith(
            "explain: fn: expected an operation"
        )
