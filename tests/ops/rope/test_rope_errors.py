"""What rope and mrope refuse, word for word."""

import pytest
import torch

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from anabranch.ops.rope.api import mrope, rope

B, H, S, D = 2, 3, 5, 8
GOOD = dict(
    q=torch.ones(B, H, S, D), k=torch.ones(B, 1, S, D), cos=torch.ones(B, S, D), sin=torch.ones(B, S, D)
)
ROWS = dict(GOOD, cos=torch.ones(3, B, S, D), sin=torch.ones(3, B, S, D), sections=[1, 2, 1])
PACKED = dict(q=torch.ones(S, H, D), k=None, cos=torch.ones(S, D), sin=torch.ones(S, D))


def both(*shape, **options):
    return {"cos": torch.ones(*shape, **options), "sin": torch.ones(*shape, **options)}


def index(*shape, dtype=torch.int64):
    return {**both(9, D), "positions": torch.zeros(shape, dtype=dtype)}


def test_good():
    rope(**GOOD)
    mrope(**ROWS)
    rope(**PACKED)


NO_GRADIENT = "a table that needs no gradient (rope has none for it; detach it)"
INDEX_FORMS = "shape (B or 1, S) or (S,) with B = 2, S = 5 of q"
FORMS = "shape (B or 1, S, W), (B or 1, 1, S, W) or (S, W) with B = 2, S = 5 of q"
ROPE_VALUES = [
    ({"q": torch.ones(S, D)}, "q: expected shape (B, H, S, D) or packed (S, H, D), got shape (5, 8)"),
    ({"q": torch.ones(1, B, H, S, D), "head_axis": 2},
     "q: expected shape (B, S, H, D) or packed (S, H, D), got shape (1, 2, 3, 5, 8)"),
    ({"k": torch.ones(B, S, D)}, "k: expected shape (B, H, S, D), got shape (2, 5, 8)"),
    ({"k": torch.ones(B, 1, S, 6)},
     "k: expected shape (B, H, S, D) with q's sizes but for H = (2, 1, 5, 8), got shape (2, 1, 5, 6)"),
    ({"k": torch.ones(B, 1, 4, D)},
     "k: expected shape (B, H, S, D) with q's sizes but for H = (2, 1, 5, 8), got shape (2, 1, 4, 8)"),
    ({"k": torch.ones(1, 1, S, D)},
     "k: expected shape (B, H, S, D) with q's sizes but for H = (2, 1, 5, 8), got shape (1, 1, 5, 8)"),
    (both(B, 4, D), f"cos: expected {FORMS}, got shape (2, 4, 8)"),
    (both(B, 6, D), f"cos: expected {FORMS}, got shape (2, 6, 8)"),
    (both(3, S, D), f"cos: expected {FORMS}, got shape (3, 5, 8)"),
    (both(B, H, S, D), f"cos: expected {FORMS}, got shape (2, 3, 5, 8)"),
    (both(4, D), f"cos: expected {FORMS}, got shape (4, 8)"),
    (both(D), "cos: expected shape (B or 1, S, W), (B or 1, 1, S, W) or (S, W), got shape (8,)"),
    (both(B, S, 6), "cos: expected a last dimension W of rotary_dim = 8, or half of it "
     "(to rotate a part of q's D channels, say rotary_dim), got shape (2, 5, 6)"),
    (both(B, S, 10),
     "cos: expected a last dimension W of rotary_dim = 8, or half of it, got shape (2, 5, 10)"),
    ({**both(B, S, 8), "rotary_dim": 6},
     "cos: expected a last dimension W of rotary_dim = 6, or half of it, got shape (2, 5, 8)"),
    ({"sin": torch.ones(S, D)}, "sin: expected shape of cos = (2, 5, 8), got shape (5, 8)"),
    ({"sin": torch.ones(B, S, 4)}, "sin: expected shape of cos = (2, 5, 8), got shape (2, 5, 4)"),
    ({"k": None, "head_axis": 2},
     "cos: expected shape (B or 1, S, W), (B or 1, S, 1, W) or (S, W) with B = 2, S = 3 of q, "
     "got shape (2, 5, 8), which fits head_axis=1"),
    ({"q": torch.ones(B, S, H, D), "k": None},
     "cos: expected shape (B or 1, S, W), (B or 1, 1, S, W) or (S, W) with B = 2, S = 3 of q, "
     "got shape (2, 5, 8), which fits head_axis=2"),
    ({"q": torch.ones(B, S, H, D), "k": torch.ones(B, S, 1, D)},
     "k: expected shape (B, H, S, D) with q's sizes but for H = (2, 5, 3, 8), got shape (2, 5, 1, 8), "
     "which fits head_axis=2"),
    ({"q": torch.ones(B, 4, H, D), "k": torch.ones(B, 4, 1, D)},
     "k: expected shape (B, H, S, D) with q's sizes but for H = (2, 4, 3, 8), got shape (2, 4, 1, 8)"),
    ({"q": torch.ones(B, S, H, D), "k": torch.ones(B, S, H, D), **index(B, S)},
     "positions: expected shape (B or 1, S) or (S,) with B = 2, S = 3 of q, got shape (2, 5), "
     "which fits head_axis=2"),
    ({"rotary_dim": 7}, "rotary_dim: expected an even number up to q's D = 8, got 7"),
    ({"rotary_dim": 10}, "rotary_dim: expected an even number up to q's D = 8, got 10"),
    ({"rotary_dim": 0}, "rotary_dim: expected at least 2, got 0"),
    ({"q": torch.ones(B, H, S, 7), "k": None}, "rotary_dim: expected an even number up to q's D = 7, got 7"),
    ({"pairing": "interleaved"}, "pairing: expected 'half' or 'adjacent', got 'interleaved'"),
    ({"head_axis": 3}, "head_axis: expected 1 or 2, got 3"),
    ({"head_axis": -2}, "head_axis: expected 1 or 2, got -2"),
    ({"head_axis": True}, "head_axis: expected 1 or 2, got True"),
    ({"backend": "cuda"}, "backend: expected None or one of hopper, triton, eager, reference, got 'cuda'"),
    ({"k": torch.ones(B, 1, S, D, device="meta")}, "k: expected q's device cpu, got meta"),
    (both(B, S, D, device="meta"), "cos: expected q's device cpu, got meta"),
    ({"sin": torch.ones(B, S, D, device="meta")}, "sin: expected q's device cpu, got meta"),
    ({**index(S), "positions": torch.zeros(S, dtype=torch.int64, device="meta")},
     "positions: expected q's device cpu, got meta"),
    ({"cos": torch.ones(B, S, D, requires_grad=True)},
     f"cos: expected {NO_GRADIENT}, got one that requires grad"),
    ({"sin": torch.ones(B, S, D, requires_grad=True)},
     f"sin: expected {NO_GRADIENT}, got one that requires grad"),
    ({"q": torch.ones(B, H, S, D, requires_grad=True), "inplace": True},
     "inplace: expected no tensor that requires grad (a mutating call has no gradient), "
     "got q, which does; use torch.no_grad()"),
    (index(B, 4), f"positions: expected {INDEX_FORMS}, got shape (2, 4)"),
    (index(4), f"positions: expected {INDEX_FORMS}, got shape (4,)"),
    (index(3, B, S), f"positions: expected {INDEX_FORMS}, got shape (3, 2, 5)"),
    ({**index(B, S), **both(B, S, D)}, "cos: expected shape (P, W) beside positions with B = 2, S = 5 of q, "
     "got shape (2, 5, 8)"),
]  # fmt: skip

ROPE_TYPES = [
    ({"q": [1.0]}, "q: expected a tensor (B, H, S, D) or packed (S, H, D), got list"),
    ({"k": 1}, "k: expected a tensor (B, H, S, D), got int"),
    ({"cos": None}, "cos: expected a tensor (B or 1, S, W), (B or 1, 1, S, W) or (S, W), got NoneType"),
    ({"q": GOOD["q"].long()}, "q: expected dtype float16 or bfloat16 or float32 or float64, got int64"),
    ({"k": GOOD["k"].half()}, "k: expected q's dtype float32, got float16"),
    ({"cos": GOOD["cos"].int()}, "cos: expected dtype float16 or bfloat16 or float32 or float64, got int32"),
    ({"sin": GOOD["sin"].double()}, "sin: expected cos's dtype float32, got float64"),
    ({"rotary_dim": 4.0}, "rotary_dim: expected an int, got float"),
    ({"rotary_dim": True}, "rotary_dim: expected an int, got bool"),
    (index(S, dtype=torch.bool), "positions: expected dtype int32 or int64, got bool"),
    (index(S, dtype=torch.float32), "positions: expected dtype int32 or int64, got float32"),
    ({**index(S), "positions": [0] * S}, "positions: expected a tensor (B or 1, S) or (S,), got list"),
]  # fmt: skip

PACKED_VALUES = [
    (both(B, S, D), "cos: expected shape (S, W) or (1, S, W) with S = 5 of q, got shape (2, 5, 8)"),
    (both(S, 1, D), "cos: expected shape (S, W) or (1, S, W) with S = 5 of q, got shape (5, 1, 8)"),
    (both(1, 1, S, D), "cos: expected shape (S, W) or (1, S, W) with S = 5 of q, got shape (1, 1, 5, 8)"),
    (index(1, S), "positions: expected shape (S,) with S = 5 of q, got shape (1, 5)"),
    ({"k": torch.ones(1, H, S, D)}, "k: expected shape (S, H, D), got shape (1, 3, 5, 8)"),
]

ROW_FORMS = "shape (3, B or 1, S, W), (B or 1, S, W) or (S, W) with B = 2, S = 5 of q"
MROPE_VALUES = [
    (both(4, B, S, D), f"cos: expected {ROW_FORMS}, got shape (4, 2, 5, 8)"),
    (both(B, 1, S, D), f"cos: expected {ROW_FORMS}, got shape (2, 1, 5, 8)"),
    (both(3, S, D), f"cos: expected {ROW_FORMS}, got shape (3, 5, 8)"),
    (both(3, 3, S, D), f"cos: expected {ROW_FORMS}, got shape (3, 3, 5, 8)"),
    (both(3, B, 4, D), f"cos: expected {ROW_FORMS}, got shape (3, 2, 4, 8)"),
    ({"sections": [1, 2, 2]}, "sections: expected three sizes that add up to rotary_dim / 2 = 4, "
     "got [1, 2, 2], which add up to 5"),
    ({"sections": [2, 4, 2]}, "sections: expected three sizes that add up to rotary_dim / 2 = 4, "
     "got [2, 4, 2], which add up to 8"),
    ({"sections": [2, 2]}, "sections: expected three sizes that add up to rotary_dim / 2 = 4, "
     "got [2, 2], which add up to 4"),
    ({"q": torch.ones(B, S, H, D), "k": torch.ones(B, S, 1, D)},
     "k: expected shape (B, H, S, D) with q's sizes but for H = (2, 5, 3, 8), got shape (2, 5, 1, 8), "
     "which fits head_axis=2"),
    ({"q": torch.ones(B, S, H, D), "k": None},
     "cos: expected shape (3, B or 1, S, W), (B or 1, S, W) or (S, W) with B = 2, S = 3 of q, "
     "got shape (3, 2, 5, 8), which fits head_axis=2"),
    ({"sections": [-1, 3, 2]}, "sections[0]: expected at least 0, got -1"),
    ({"sections": [1, 2, 1], "order": "interleaved"},
     "sections: expected sizes that can be interleaved: section 1 ends at pair 4 of 4, got [1, 2, 1]"),
    ({"sections": [2, 0, 2], "order": "interleaved"},
     "sections: expected sizes that can be interleaved: section 2 ends at pair 5 of 4, got [2, 0, 2]"),
    ({"order": "chunked"}, "order: expected 'blocked' or 'interleaved' or 'channels', got 'chunked'"),
    (index(4, B, S), "positions: expected shape (3, B or 1, S), (B or 1, S) or (S,) with B = 2, S = 5 of q, "
     "got shape (4, 2, 5)"),
    (index(3, S), "positions: expected shape (3, B or 1, S), (B or 1, S) or (S,) with B = 2, S = 5 of q, "
     "got shape (3, 5)"),
    ({"cos": torch.ones(3, B, S, D, requires_grad=True)},
     f"cos: expected {NO_GRADIENT}, got one that requires grad"),
]  # fmt: skip

MROPE_TYPES = [
    ({"sections": [1, 2.0, 1]}, "sections[1]: expected an int, got float"),
    ({"sections": [True, 2, 1]}, "sections[0]: expected an int, got bool"),
    ({"sections": None}, "sections: expected a list of three ints, got NoneType"),
    ({"sections": torch.tensor([1, 2, 1])}, "sections: expected a list of three ints, got Tensor"),
]


def refused(kind, function, arguments, message):
    with pytest.raises(kind) as error:
        function(**arguments)
    assert str(error.value) == f"{function.__name__}: {message}"


@pytest.mark.parametrize(("change", "message"), ROPE_VALUES, ids=range(len(ROPE_VALUES)))
def test_rope_values(change, message):
    refused(ArgumentError, rope, {**GOOD, **change}, message)


@pytest.mark.parametrize(("change", "message"), ROPE_TYPES, ids=range(len(ROPE_TYPES)))
def test_rope_types(change, message):
    refused(ArgumentTypeError, rope, {**GOOD, **change}, message)


@pytest.mark.parametrize(("change", "message"), PACKED_VALUES, ids=range(len(PACKED_VALUES)))
def test_packed_values(change, message):
    refused(ArgumentError, rope, {**PACKED, **change}, message)


@pytest.mark.parametrize(("change", "message"), MROPE_VALUES, ids=range(len(MROPE_VALUES)))
def test_mrope_values(change, message):
    refused(ArgumentError, mrope, {**ROWS, **change}, message)


@pytest.mark.parametrize(("change", "message"), MROPE_TYPES, ids=range(len(MROPE_TYPES)))
def test_mrope_types(change, message):
    refused(ArgumentTypeError, mrope, {**ROWS, **change}, message)


def test_unsupported_backend():
    with pytest.raises(UnsupportedError, match="rope: backend: expected a backend that can serve this call"):
        rope(**GOOD, backend="hopper")


def test_tables_may_require_grad_where_none_flows():
    with torch.no_grad():
        rope(**{**GOOD, "cos": torch.ones(B, S, D, requires_grad=True)})
