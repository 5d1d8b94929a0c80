"""The three errors: what they are caught as, and how they read."""

import pickle
from copy import deepcopy

import pytest
import torch

from anabranch import ExpertLayout, grouped_gemm, moe_mlp, rope
from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.nn import MoE


@pytest.mark.parametrize(
    ("error", "caught_as"),
    [(ArgumentError, ValueError), (ArgumentTypeError, TypeError), (UnsupportedError, NotImplementedError)],
)
def test_wording(error, caught_as):
    raised = error("rope", "q", expected="rank 4", got=(1, 2))
    assert isinstance(raised, caught_as)
    assert str(raised) == "rope: q: expected rank 4, got (1, 2)"


@pytest.mark.parametrize("error", [ArgumentError, ArgumentTypeError, UnsupportedError])
def test_errors_cross_processes(error):
    raised = error("rope", "q", expected="rank 4", got=3)
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert str(copy) == str(raised)
    assert str(deepcopy(raised)) == str(raised)


X, GATE_UP, DOWN = torch.ones(6, 8), torch.ones(3, 4, 8), torch.ones(3, 8, 2)
IDS, WEIGHTS = torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2)
TABLE = torch.ones(7, 8)
LAYER = MoE(8, 2, 3, 2, dtype=torch.bfloat16)
TRACED = {
    "moe_mlp": (
        lambda x: moe_mlp(x, GATE_UP, DOWN, IDS.float(), WEIGHTS),
        "ArgumentTypeError",
        "moe_mlp: expert_ids: expected dtype int32 or int64, got float32",
    ),
    "MoE": (
        LAYER,
        "ArgumentTypeError",
        "MoE: x: expected the experts' dtype bfloat16, got float32",
    ),
    "rope": (
        lambda x: rope(x.view(1, 2, 3, 8), None, TABLE, TABLE),
        "ArgumentError",
        # With dynamic sizes some releases keep what follows apart.
        "shape (B or 1, S, W), (B or 1, 1, S, W) or (S, W) with B = 1, S = 3 of q",
    ),
    "grouped_gemm": (
        lambda x: grouped_gemm(x, GATE_UP, ExpertLayout.from_topk(IDS, 4), gather=True),
        "ArgumentError",
        "grouped_gemm: layout: expected a layout of weight's E = 3 experts, got 4 experts",
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", TRACED)
def test_a_compiler_reports_the_text(name, dynamic):
    function, error, message = TRACED[name]
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(function, fullgraph=True, dynamic=dynamic, backend="eager")(X)
    assert f"raised exception {error}(" in str(caught.value)
    assert message in str(caught.value)


def test_traced_code_may_catch_an_error():
    def one_or_two(x):
        try:
            return moe_mlp(x, GATE_UP, DOWN, IDS.float(), WEIGHTS)
        except ArgumentTypeError:
            return x + 1

    torch.compiler.reset()
    assert torch.compile(one_or_two, fullgraph=True, backend="eager")(X).eq(2).all()
