"""Bad input raises a ValueError or a TypeError: of the interface's own argument, with what was expected and got."""

import re
from unittest.mock import ANY

import pytest
import torch

from anabranch.interop.unsloth import (
    GroupedGemm,
    grouped_gemm,
    grouped_gemm_dW,
    grouped_gemm_dX,
    grouped_gemm_forward,
)
from anabranch.testing import randn

T, E, N, K = 6, 3, 8, 16
GOOD = dict(
    X=randn(T, K),
    W=randn(E, N, K),
    m_sizes=torch.tensor([5, 0, 7]),
    topk=2,
    gather_indices=torch.randperm(12),
    permute_x=True,
)
FUSED = GOOD | dict(
    X=randn(12, K),
    permute_x=False,
    permute_y=True,
    fuse_mul_post=True,
    topk_weights=torch.rand(12),
    is_first_gemm=False,
)
DY = randn(12, N)

CASES = [
    (dict(X=None), TypeError, "X: expected a tensor (..., columns), got NoneType"),
    (dict(X=randn(K)), ValueError, "X: expected shape (rows, columns), got shape (16,)"),
    (dict(X=torch.ones(T, K, dtype=torch.int64)), TypeError, "X: expected dtype float16 or bfloat16 or"),
    (
        dict(X=randn(T, K - 1)),
        ValueError,
        "X: expected shape (num_tokens, W's K) = (6, 16), got shape (6, 15)",
    ),
    (
        dict(W=randn(E, K, N)),
        ValueError,
        "X: expected shape (num_tokens, W's K) = (6, 8), got shape (6, 16)",
    ),
    (
        dict(X=randn(T - 1, K)),
        ValueError,
        "gather_indices: expected shape (total_tokens,) = (10,), got shape (12,)",
    ),
    (dict(W=[1.0]), TypeError, "W: expected a tensor (E, N, K) or (E * N, K), got list"),
    (dict(W=randn(K)), ValueError, "W: expected shape (E, N, K), got shape (16,)"),
    (
        dict(W=randn(E * N + 1, K)),
        ValueError,
        "W: expected (E, N, K), or (E * N, K) for the E = 3 of m_sizes, got",
    ),
    (dict(W=randn(E, N, K).half()), TypeError, "W: expected X's dtype float32, got float16"),
    (
        dict(W=randn(E + 1, N, K)),
        ValueError,
        "m_sizes: expected the sizes of W's E = 4 experts, got 3 experts",
    ),
    (dict(m_sizes=[5, 0, 7]), TypeError, "m_sizes: expected a tensor (E,), got list"),
    (dict(m_sizes=torch.ones(E)), TypeError, "m_sizes: expected dtype int32 or int64 or"),
    (
        dict(m_sizes=torch.ones(E, 1, dtype=torch.int32)),
        ValueError,
        "m_sizes: expected shape (E,), got shape (3, 1)",
    ),
    (dict(m_sizes=torch.ones(E, dtype=torch.bool)), TypeError, "m_sizes: expected dtype int32"),
    (dict(topk=0), ValueError, "topk: expected at least 1, got 0"),
    (dict(topk=2.0), TypeError, "topk: expected an int, got float"),
    (dict(topk=3), ValueError, "gather_indices: expected shape (total_tokens,) = (18,), got shape (12,)"),
    (dict(gather_indices=None), TypeError, "gather_indices: expected a tensor (total_tokens,), got NoneType"),
    (dict(gather_indices=torch.rand(12)), TypeError, "gather_indices: expected dtype int32"),
    (
        dict(gather_indices=torch.randperm(11)),
        ValueError,
        "gather_indices: expected shape (total_tokens,) = (12,)",
    ),
    (dict(permute_x=1), TypeError, "permute_x: expected a bool, got int"),
    (dict(dX_only=True, dW_only=True), ValueError, "dW_only: expected False beside dX_only, got True"),
]
FUSED_CASES = [
    (
        dict(topk_weights=None),
        TypeError,
        "topk_weights: expected a tensor of total_tokens values, got NoneType",
    ),
    (
        dict(topk_weights=torch.rand(11)),
        ValueError,
        "topk_weights: expected total_tokens = 12 values in slot order",
    ),
    (dict(topk_weights=torch.ones(12).int()), TypeError, "topk_weights: expected dtype float16"),
    (dict(topk=5), ValueError, "gather_indices: expected a multiple of topk = 5 rows, got 12 rows"),
    (dict(X=randn(11, K)), ValueError, "gather_indices: expected shape (total_tokens,) = (11,)"),
]


ONCE_MORE = [
    *CASES,
    (dict(topk=True, X=randn(12, K)), TypeError, "topk: expected an int, got bool"),
    (dict(kernel_config_fwd=ANY), TypeError, "kernel_config_fwd: expected a KernelConfigForward or None"),
]


def refuses(call, arguments, error, message, name):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call(**arguments)
    assert str(raised.value).startswith(f"{name}: ")


@pytest.mark.parametrize(("change", "error", "message"), CASES)
def test_grouped_gemm(change, error, message):
    refuses(grouped_gemm, GOOD | change, error, message, "grouped_gemm")
    if "dX_only" not in change:
        refuses(grouped_gemm_forward, GOOD | change, error, message, "grouped_gemm_forward")


@pytest.mark.parametrize(("change", "error", "message"), ONCE_MORE)
def test_calls_that_passed_let_no_other_through(change, error, message):
    grouped_gemm(**GOOD | dict(topk=1, X=randn(12, K)))  # which True looks like
    for _ in range(2):
        grouped_gemm(**GOOD)
        refuses(grouped_gemm, GOOD | change, error, message, "grouped_gemm")


def test_a_transposed_weight_is_found():
    """In this interface's words: anabranch.grouped_gemm would say transpose_weight=True."""
    swapped, rest = randn(E, K, N), {name: GOOD[name] for name in ("m_sizes", "gather_indices", "topk")}
    message = "X: expected shape (num_tokens, W's K) = (6, 8), got shape (6, 16) beside W of shape (3, 16, 8)"
    for call in (grouped_gemm, grouped_gemm_forward):
        with pytest.raises(ValueError, match=f"^{call.__name__}: {re.escape(message)}, which fits W.mT$"):
            call(**GOOD | dict(W=swapped))
    message = (
        "dY: expected shape (total_tokens, W's N) = (12, 16), got shape (12, 8) beside W of shape (3, 16, 8)"
    )
    with pytest.raises(ValueError, match=f"^grouped_gemm_dX: {re.escape(message)}, which fits W.mT$"):
        grouped_gemm_dX(DY, swapped, **rest)
    # Neither way, and a matrix, whose rows do not say which are which.
    with pytest.raises(ValueError, match=re.escape("got shape (6, 15) beside W of shape (3, 8, 16)") + "$"):
        grouped_gemm(**GOOD | dict(X=randn(T, K - 1)))
    with pytest.raises(ValueError, match=re.escape("got shape (6, 8) beside W of shape (24, 16)") + "$"):
        grouped_gemm(**GOOD | dict(X=randn(T, N), W=randn(E * N, K)))


@pytest.mark.parametrize("call", [grouped_gemm, grouped_gemm_forward, grouped_gemm_dX, grouped_gemm_dW])
def test_gather_indices_without_a_permutation_fit_the_rows(call):
    operand = {grouped_gemm_dX: dict(W=GOOD["W"]), grouped_gemm_dW: dict(X=randn(12, K))}
    own = dict(dY=DY) | operand[call] if call in operand else dict(X=randn(12, K), W=GOOD["W"])
    rest = own | dict(m_sizes=GOOD["m_sizes"], topk=2)
    call(**rest, gather_indices=torch.randperm(12))
    message = "gather_indices: expected shape (total_tokens,) = (12,), got shape (11,)"
    refuses(call, rest | dict(gather_indices=torch.randperm(11)), ValueError, message, call.__name__)
    message = "gather_indices: expected dtype int32"
    refuses(call, rest | dict(gather_indices=torch.rand(12)), TypeError, message, call.__name__)


def test_a_forgotten_permute_x_is_found():
    message = "expected shape (total_tokens,) = (6,), got shape (12,), which fits permute_x=True"
    changed = GOOD | dict(permute_x=False)
    refuses(grouped_gemm, changed, ValueError, f"gather_indices: {message}", "grouped_gemm")
    refuses(grouped_gemm_forward, changed, ValueError, f"gather_indices: {message}", "grouped_gemm_forward")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(permute_x=True, is_first_gemm=False),
            "permute_x: {}second GEMM, or is_first_gemm=True, got True",
        ),
        (dict(permute_y=True), "permute_y: {}first GEMM, or is_first_gemm=False, got True"),
        (dict(fuse_mul_post=True), "fuse_mul_post: {}first GEMM, or is_first_gemm=False, got True"),
    ],
)
def test_rules_say_how_the_other_product_is_asked_for(change, message):
    given = GOOD | dict(permute_x=False) | change
    refuses(grouped_gemm, given, ValueError, message.format("expected False for the "), "grouped_gemm")


@pytest.mark.parametrize(("change", "error", "message"), FUSED_CASES)
def test_fused(change, error, message):
    refuses(grouped_gemm, FUSED | change, error, message, "grouped_gemm")
    arguments = {name: value for name, value in (FUSED | change).items() if name != "is_first_gemm"}
    refuses(grouped_gemm_forward, arguments, error, message, "grouped_gemm_forward")


@pytest.mark.parametrize("autotune", [False, True])
def test_what_excludes_each_other(autotune):
    for change, message in (
        (dict(permute_y=True), "permute_y: expected False beside permute_x, got True"),
        (dict(fuse_mul_post=True, topk_weights=torch.rand(12)), "fuse_mul_post: expected False"),
    ):
        for call in (grouped_gemm, grouped_gemm_forward):
            with pytest.raises(ValueError, match=message):
                call(**GOOD, autotune=autotune, **change)
    for call in (grouped_gemm_dX, grouped_gemm_dW):
        operand = dict(W=GOOD["W"]) if call is grouped_gemm_dX else dict(X=GOOD["X"])
        rest = {name: GOOD[name] for name in ("m_sizes", "gather_indices", "topk")}
        both = dict(permute_x=True, permute_y=True)
        with pytest.raises(ValueError, match="permute_y: expected False beside permute_x"):
            call(dY=DY, **operand, **rest, **both, autotune=autotune)


@pytest.mark.parametrize("fused", ["fuse_mul_pre", "fuse_mul_post"])
def test_gradients_take_no_routing_weights(fused):
    rest = dict(m_sizes=GOOD["m_sizes"], gather_indices=GOOD["gather_indices"], topk=2, **{fused: True})
    message = f"{fused}: expected False, for this product takes no topk_weights, got True"
    refuses(grouped_gemm_dX, dict(dY=DY, W=GOOD["W"], **rest), ValueError, message, "grouped_gemm_dX")
    refuses(grouped_gemm_dW, dict(dY=DY, X=randn(12, K), **rest), ValueError, message, "grouped_gemm_dW")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(dY=None), TypeError, "dY: expected a tensor (..., columns), got NoneType"),
        (
            dict(dY=randn(12, N + 1)),
            ValueError,
            "dY: expected shape (total_tokens, W's N) = (12, 8), got shape (12, 9)",
        ),
        (dict(dY=DY.half()), TypeError, "W: expected dY's dtype float16, got float32"),
        (dict(dY=DY[:11]), ValueError, "gather_indices: expected shape (total_tokens,) = (11,)"),
        (
            dict(gather_indices=None),
            TypeError,
            "gather_indices: expected a tensor (total_tokens,), got NoneType",
        ),
        (dict(topk=-1), ValueError, "topk: expected at least 1, got -1"),
        (dict(permute_x=0), TypeError, "permute_x: expected a bool, got int"),
        (
            dict(m_sizes=torch.ones(2).int()),
            ValueError,
            "m_sizes: expected the sizes of W's E = 3 experts, got 2",
        ),
    ],
)
def test_gradient_of_rows(change, error, message):
    good = {name: GOOD[name] for name in ("W", "m_sizes", "gather_indices", "topk")}
    refuses(grouped_gemm_dX, good | dict(dY=DY, permute_x=True) | change, error, message, "grouped_gemm_dX")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(dY=None), TypeError, "dY: expected a tensor (..., columns), got NoneType"),
        (dict(dY=DY[:11]), ValueError, "dY: expected shape (total_tokens, N) = (12, 8), got shape (11, 8)"),
        (dict(dY=DY.half()), TypeError, "dY: expected X's dtype float32, got float16"),
        (dict(X=randn(5, K)), ValueError, "gather_indices: expected shape (total_tokens,) = (10,)"),
        (
            dict(gather_indices=None),
            TypeError,
            "gather_indices: expected a tensor (total_tokens,), got NoneType",
        ),
    ],
)
def test_gradient_of_weights(change, error, message):
    good = {name: GOOD[name] for name in ("X", "m_sizes", "gather_indices", "topk")}
    refuses(grouped_gemm_dW, good | dict(dY=DY, permute_x=True) | change, error, message, "grouped_gemm_dW")


def test_by_position():
    with pytest.raises(ValueError, match="grouped_gemm: topk: expected at least 1, got 0"):
        GroupedGemm.apply(GOOD["X"], GOOD["W"], GOOD["m_sizes"], 0, None, False, False, None, False)


@pytest.mark.parametrize("flag", ["permute_x", "permute_y", "fuse_mul_post", "autotune"])
@pytest.mark.parametrize("value", ["yes", torch.ones(2)], ids=["str", "Tensor"])
def test_flags_are_bools(flag, value):
    message = f"{flag}: expected a bool, got {type(value).__name__}"
    changed = GOOD | {flag: value}
    refuses(grouped_gemm, changed, TypeError, message, "grouped_gemm")
    refuses(grouped_gemm_forward, changed, TypeError, message, "grouped_gemm_forward")
    by_position = dict(fuse_mul_post=False, permute_y=False, autotune=False, topk_weights=None) | changed
    order = (
        "X",
        "W",
        "m_sizes",
        "topk",
        "gather_indices",
        "permute_x",
        "permute_y",
        "topk_weights",
        "fuse_mul_post",
    )
    arguments = [by_position[name] for name in order]
    with pytest.raises(TypeError, match=f"^grouped_gemm: {message}"):
        GroupedGemm.apply(*arguments, None, None, None, by_position["autotune"])
    rest = {name: GOOD[name] for name in ("m_sizes", "gather_indices", "topk")} | {flag: value}
    refuses(grouped_gemm_dX, dict(dY=DY, W=GOOD["W"], **rest), TypeError, message, "grouped_gemm_dX")
    refuses(grouped_gemm_dW, dict(dY=DY, X=randn(12, K), **rest), TypeError, message, "grouped_gemm_dW")


@pytest.mark.parametrize("flag", ["is_first_gemm", "dX_only", "dW_only"])
def test_flags_of_the_whole_are_bools(flag):
    refuses(grouped_gemm, GOOD | {flag: "no"}, TypeError, f"{flag}: expected a bool, got str", "grouped_gemm")


def test_rules_name_the_option_that_was_given():
    rest = {name: GOOD[name] for name in ("m_sizes", "gather_indices", "topk")}
    tma = dict(permute_y=True, use_tma_load_dy=True)
    message = "use_tma_load_dy: expected False with permute_y"
    refuses(grouped_gemm_dX, dict(dY=DY, W=GOOD["W"], **rest, **tma), ValueError, message, "grouped_gemm_dX")


def test_a_sparse_operand_is_called_sparse():
    message = "X: expected a dense tensor (..., columns), got a sparse_coo one"
    refuses(grouped_gemm, GOOD | dict(X=GOOD["X"].to_sparse()), TypeError, message, "grouped_gemm")


def test_another_device():
    elsewhere = {name: GOOD[name].to("meta") for name in ("m_sizes", "gather_indices")}
    refuses(
        grouped_gemm,
        GOOD | elsewhere,
        ValueError,
        "m_sizes: expected X's device cpu, got meta",
        "grouped_gemm",
    )
    one = dict(gather_indices=GOOD["gather_indices"].to("meta"))
    refuses(
        grouped_gemm, GOOD | one, ValueError, "gather_indices: expected m_sizes's device cpu", "grouped_gemm"
    )
