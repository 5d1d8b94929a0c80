"""Errors are a ValueError or a TypeError and name the function called, the argument, what was expected, what came."""

import pytest
import torch

from anabranch.interop.wallx import backend, ops

X, WIDE, MAP = torch.ones(4, 6), torch.ones(6, 3), torch.arange(4, dtype=torch.int32)
IDS, PROB = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
Q, K = torch.ones(2, 3, 5, 8), torch.ones(2, 1, 5, 8)
SPACE = torch.ones(2, 3, 5, 8)
ROWS, ROW = torch.ones(3, 2, 5, 8), torch.ones(2, 5, 8)
SECTIONS = [2, 4, 2]
LEAF = torch.ones(4, 6, requires_grad=True)
GRID = torch.tensor([[1, 4, 4]])


def rope(q=Q, k=K, cos=ROWS, sin=ROWS, q_out=None, k_out=None, sections=SECTIONS):
    outs = (q.clone() if q_out is None else q_out, k.clone() if k_out is None else k_out)
    return backend.rope(q, k, cos, sin, *outs, sections)


def rope_bwd(q=Q, k=K, cos=ROWS, sin=ROWS, q_out=None, k_out=None, sections=SECTIONS):
    outs = (q.clone() if q_out is None else q_out, k.clone() if k_out is None else k_out)
    return backend.rope_bwd(q, k, None, None, cos, sin, *outs, sections)


GMM = backend.asym_dual_gmm_separated
CASES = {
    "no_tensor": (
        lambda: GMM([1], X, WIDE, WIDE),
        TypeError,
        "input_expert0: expected a tensor .*, got list",
    ),
    "rank": (
        lambda: GMM(X, X[0], WIDE, WIDE),
        ValueError,
        r"input_expert1: expected shape \(m, k\), got shape \(6,\)",
    ),
    "width": (
        lambda: GMM(X, X, WIDE, WIDE.T),
        ValueError,
        r"weight_expert1: expected shape \(input_expert1's k, n\) = \(6, 6\), got shape \(3, 6\)",
    ),
    "width_transposed": (
        lambda: GMM(X, X, WIDE, WIDE, trans_b=True),
        ValueError,
        r"weight_expert0: expected shape \(n, input_expert0's k\) = \(6, 6\), got shape \(6, 3\)",
    ),
    "all_transposed": (
        lambda: GMM(X, X, WIDE.T, WIDE.T),
        ValueError,
        r"= \(6, 6\), got shape \(3, 6\), which fits trans_b=True$",
    ),
    "none_transposed": (
        lambda: ops.asym_dual_gmm(X, X, WIDE, WIDE, trans_b=True),
        ValueError,
        r"= \(6, 6\), got shape \(6, 3\), which fits trans_b=False$",
    ),
    "dtype": (
        lambda: GMM(X, X.half(), WIDE, WIDE),
        TypeError,
        "input_expert1: expected input_expert0's dtype float32, got float16",
    ),
    "integers": (
        lambda: GMM(X.int(), X, WIDE, WIDE),
        TypeError,
        "input_expert0: expected dtype float16 or .*, got int32",
    ),
    "trans_a": (lambda: GMM(X, X, WIDE, WIDE, trans_a=1), TypeError, "trans_a: expected a bool, got int"),
    "trans_b": (lambda: GMM(X, X, WIDE, WIDE, trans_b="n"), TypeError, "trans_b: expected a bool, got str"),
    "output_shape": (
        lambda: GMM(X, X, WIDE, WIDE, None, X),
        ValueError,
        r"output_expert1: expected shape of the result = \(4, 3\), got shape \(4, 6\)",
    ),
    "output_dtype": (
        lambda: GMM(X, X, WIDE, WIDE, X[:, :3].clone().half()),
        TypeError,
        "output_expert0: expected input_expert0's dtype float32, got float16",
    ),
    "output_no_tensor": (
        lambda: GMM(X, X, WIDE, WIDE, 3),
        TypeError,
        "output_expert0: expected a tensor .*, got int",
    ),
    "output_bad_operand": (
        lambda: GMM(X[0], X, WIDE, WIDE, None, X),
        ValueError,
        r"input_expert0: expected shape \(m, k\), got shape \(6,\)",
    ),
    "output_overlaps": (
        lambda: GMM(X, X, WIDE, WIDE, X[:, :3]),
        ValueError,
        "output_expert0: expected memory apart from input_expert0, got overlapping memory",
    ),
    "output_and_gradient": (
        lambda: GMM(LEAF, X, WIDE, WIDE, X[:, :3].clone()),
        ValueError,
        "output_expert0 and output_expert1: expected no tensor that requires grad",
    ),
    "upper_gmm": (
        lambda: ops.asym_dual_gmm(X, X, WIDE, X),
        ValueError,
        r"asym_dual_gmm: weight_expert1: expected .* = \(6, 6\), got shape \(4, 6\)",
    ),
    "upper_trans_b": (
        lambda: ops.asym_dual_gmm(X, X, WIDE, WIDE, 0),
        TypeError,
        "trans_b: expected a bool, got int",
    ),
    "ids_float": (
        lambda: ops.permute(X, PROB),
        TypeError,
        "permute: indices: expected dtype int32 or .*, got float32",
    ),
    "ids_rank": (lambda: ops.permute(X, IDS[None]), ValueError, "indices: expected shape .*, got shape"),
    "ids_none": (lambda: ops.permute(X, IDS[:, :0]), ValueError, r"indices: expected .*, got shape \(T, 0\)"),
    "ids_list": (lambda: ops.permute(X, [0, 1, 2, 3]), TypeError, "indices: expected a tensor .*, got list"),
    "tokens": (
        lambda: ops.permute(X, IDS[:3]),
        ValueError,
        r"permute: input_act: expected shape \(indices's T, H\) = \(3, 6\), got shape \(4, 6\)",
    ),
    "lower_tokens": (
        lambda: backend.permute(X, IDS[:3], 0, None, 0),
        ValueError,
        "permute: input: expected shape",
    ),
    "negative_out": (
        lambda: ops.permute(X, IDS, -1),
        ValueError,
        "num_out_tokens: expected at least 0, got -1",
    ),
    "float_out": (
        lambda: backend.permute(X, IDS, 2.0, [], 0),
        TypeError,
        "num_out_tokens: expected an int, got float",
    ),
    "input_rank": (lambda: ops.permute(X[None], IDS), ValueError, r"input_act: expected shape \(T, H\)"),
    "map_length": (
        lambda: backend.unpermute(X, MAP, None, 4, 2),
        ValueError,
        r"unpermute: row_id_map: expected shape \(topK \* T,\) = \(8,\), got shape \(4,\)",
    ),
    "map_dtype": (
        lambda: ops.unpermute(X, PROB[:, 0]),
        TypeError,
        "row_id_map: expected dtype int32 or int64, got float32",
    ),
    "map_list": (
        lambda: ops.unpermute(X, [0, 1], PROB),
        TypeError,
        "row_id_map: expected a tensor .*, got list",
    ),
    "prob_shape": (
        lambda: backend.unpermute(X, MAP, PROB[:3], 4, 1),
        ValueError,
        r"prob: expected shape row_id_map's \(T, K\) = \(4, 1\), got shape \(3, 1\)",
    ),
    "probs_length": (
        lambda: ops.unpermute(X, MAP, PROB[:3]),
        ValueError,
        r"row_id_map: expected .* = \(3,\), got",
    ),
    "probs_rank": (
        lambda: ops.unpermute(X, MAP, PROB[:, 0]),
        ValueError,
        r"probs: expected shape \(T, topK\)",
    ),
    "probs_int": (
        lambda: ops.unpermute(X, MAP, IDS),
        TypeError,
        "probs: expected dtype float16 or .*, got int64",
    ),
    "tokens_type": (
        lambda: backend.unpermute(X, MAP, None, 4.0, 1),
        TypeError,
        "max_tokens: expected an int, got float",
    ),
    "top_k": (
        lambda: backend.unpermute(X, MAP, None, 4, 0),
        ValueError,
        "num_topK: expected at least 1, got 0",
    ),
    "rows_rank": (lambda: ops.unpermute(X[0], MAP), ValueError, "input_act: expected shape"),
    "bwd_rank": (
        lambda: backend.unpermute_bwd(X[0], X, MAP, None),
        ValueError,
        r"input_bwd: expected shape \(T, H\)",
    ),
    "bwd_width": (
        lambda: backend.unpermute_bwd(X[:, :5], X, MAP, None),
        ValueError,
        r"unpermute_bwd: input_bwd: expected shape \(T, input_fwd's H\) = \(4, 6\), got shape \(4, 5\)",
    ),
    "bwd_dtype": (
        lambda: backend.unpermute_bwd(X.half(), X, MAP, None),
        TypeError,
        "input_bwd: expected input_fwd's dtype float32, got float16",
    ),
    "bwd_prob": (
        lambda: backend.unpermute_bwd(X, X, MAP, PROB[:3]),
        ValueError,
        r"prob: expected .* = \(4, 1\), got",
    ),
    "bwd_rows": (lambda: backend.unpermute_bwd(X, X[0], MAP, None), ValueError, "input_fwd: expected shape"),
    "sections_sum": (
        lambda: rope(sections=[1, 2, 1]),
        ValueError,
        r"rope: mrope_section_doubled: expected .* add up to D = 8, got \[1, 2, 1\], which add up to 4",
    ),
    "sections_bool": (
        lambda: rope(sections=True),
        TypeError,
        "mrope_section_doubled: expected a list of three ints, got bool",
    ),
    "sections_two": (
        lambda: rope(sections=[4, 4]),
        ValueError,
        "mrope_section_doubled: expected three sizes",
    ),
    "sections_negative": (
        lambda: rope(sections=[-2, 4, 6]),
        ValueError,
        r"mrope_section_doubled\[0\]: expected at least 0",
    ),
    "sections_float": (
        lambda: rope(sections=[2.0, 4, 2]),
        TypeError,
        r"mrope_section_doubled\[0\]: expected an int, got float",
    ),
    "sections_half_width": (
        lambda: rope(cos=ROWS[..., :4], sin=ROWS[..., :4]),
        ValueError,
        r"^rope: cos: expected shape \(3, B, S, D\) = \(3, 2, 5, 8\), got shape \(3, 2, 5, 4\)$",
    ),
    "heads_after_tokens": (
        lambda: rope(q=Q.transpose(1, 2), k=K.transpose(1, 2)),
        ValueError,
        r"k: expected .* = \(2, 5, 3, 8\), got shape \(2, 5, 1, 8\)$",
    ),
    "rows": (
        lambda: rope(cos=ROWS[:2], sin=ROWS[:2]),
        ValueError,
        r"cos: expected shape \(3, .*, got shape \(2, 2, 5, 8\)",
    ),
    "rows_missing": (
        lambda: rope(sin=ROW),
        ValueError,
        r"sin: expected shape of cos = \(3, 2, 5, 8\), got shape \(2, 5, 8\)",
    ),
    "one_row_half_width": (
        lambda: rope(cos=ROW[..., :3], sin=ROW[..., :3], sections=None),
        ValueError,
        "cos: expected a last dimension W of D = 8, or half of it",
    ),
    "rows_too_many": (
        lambda: rope(sections=None),
        ValueError,
        r"cos: expected shape .*, got shape \(3, 2, 5, 8\)",
    ),
    "batch": (
        lambda: rope(cos=ROWS.repeat(1, 2, 1, 1)),
        ValueError,
        r"cos: expected shape .* = \(3, 2, 5, 8\), got shape \(3, 4, 5, 8\)",
    ),
    "heads": (lambda: rope(k=K[:, :, :4]), ValueError, "k: expected shape"),
    "q_out_shape": (lambda: rope(q_out=K), ValueError, r"q_out: expected shape of q = \(2, 3, 5, 8\), got"),
    "k_out_dtype": (
        lambda: rope(k_out=K.half()),
        TypeError,
        "k_out: expected k's dtype float32, got float16",
    ),
    "k_out_none": (
        lambda: backend.rope(Q, K, ROWS, ROWS, Q, None, SECTIONS),
        TypeError,
        "q_out, k_out: expected a pair",
    ),
    "k_out_overlaps": (
        lambda: backend.rope(Q, K, ROWS, ROWS, SPACE, SPACE[:, :1], SECTIONS),
        ValueError,
        "k_out: expected memory apart from q_out, got overlapping memory",
    ),
    "q_out_overlaps": (
        lambda: backend.rope(SPACE[:, :2], SPACE[:, 2:], ROWS, ROWS, SPACE[:, 1:], K.clone(), SECTIONS),
        ValueError,
        "q_out: expected memory apart from q, got overlapping memory",
    ),
    "q_grad": (
        lambda: rope(q=Q.clone().requires_grad_(), q_out=Q.clone()),
        ValueError,
        "q_out, k_out: expected no tensor that requires grad",
    ),
    "bwd_sections": (
        lambda: rope_bwd(sections=[1, 1, 1]),
        ValueError,
        r"rope_bwd: mrope_section_doubled: expected three sizes that add up to D = 8, got \[1, 1, 1\]",
    ),
    "bwd_k": (
        lambda: rope_bwd(k=K.half(), k_out=K),
        TypeError,
        "grad_k_out: expected grad_q_out's dtype float32",
    ),
    "bwd_out": (
        lambda: rope_bwd(q_out=K),
        ValueError,
        r"grad_q: expected shape of grad_q_out = \(2, 3, 5, 8\)",
    ),
    "bwd_out_dtype": (lambda: rope_bwd(k_out=K.half()), TypeError, "grad_k: expected grad_k_out's dtype"),
    "tables_grad": (
        lambda: ops.multimodal_rope(Q, K, ROWS.clone().requires_grad_(), ROWS, [1, 2, 1]),
        ValueError,
        "cos: expected a table that needs no gradient",
    ),
    "rope_index": (
        lambda: ops.get_rope_index(IDS, 0, 1, 2, 3, 1.0),
        ValueError,
        "get_rope_index: spatial_merge_size: expected at least 1, got 0",
    ),
    "rope_index_ids": (
        lambda: ops.get_rope_index(PROB, 2, 1, 2, 3, 1.0),
        TypeError,
        "input_ids: expected dtype",
    ),
    "rot_pos_emb": (
        lambda: ops.rot_pos_emb(torch.ones(4), GRID, 3),
        ValueError,
        r"rot_pos_emb: grid_thw: expected .* multiples of spatial_merge_size = 3, got \[1, 4, 4\]",
    ),
    "window_index": (
        lambda: ops.get_window_index(GRID, 1, 2, 14),
        ValueError,
        "get_window_index: window_size: expected at least .* = 28, got 1",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_message(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, (ValueError, TypeError))
    assert "expected" in str(raised.value)
    assert "got" in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ops.permute(X.cuda(), IDS), "indices"),
        (lambda: ops.unpermute(X.cuda(), MAP), "row_id_map"),
        (lambda: ops.unpermute(X, MAP, PROB.cuda()), "probs"),
        (lambda: ops.asym_dual_gmm(X, X, WIDE, WIDE.cuda()), "weight_expert1"),
        (lambda: rope(k=K.cuda()), "k"),
        (lambda: rope(q_out=Q.cuda()), "q_out"),
        (lambda: backend.unpermute_bwd(X.cuda(), X, MAP, None), "input_bwd"),
    ],
)
def test_devices(call, name):
    with pytest.raises(ValueError, match=rf": {name}: expected .*device (cpu|cuda:0), got"):
        call()
