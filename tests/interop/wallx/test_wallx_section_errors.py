"""Errors over the sections of multimodal RoPE, and the tables that go with them, in the caller's own numbers."""

import pytest
import torch

from anabranch.interop.wallx import backend, ops

Q, K = torch.ones(2, 3, 5, 8), torch.ones(2, 1, 5, 8)
ROWS, ROW = torch.ones(3, 2, 5, 8), torch.ones(2, 5, 8)


def rope(q=Q, k=K, cos=ROWS, sin=ROWS):
    return backend.rope(q, k, cos, sin, q.clone(), k.clone(), [2, 4, 2])


def rope_bwd(q=Q, k=K, cos=ROWS, sin=ROWS):
    return backend.rope_bwd(q, k, None, None, cos, sin, q.clone(), k.clone(), [2, 4, 2])


CASES = {
    "section_two": (
        lambda: ops.multimodal_rope(Q, K, ROWS, ROWS, (2, 2)),
        ValueError,
        r"^multimodal_rope: mrope_section: expected three ints .* D / 2 = 4, got \[2, 2\], which add up to 4$",
    ),
    "section_negative": (
        lambda: ops.multimodal_rope(Q, K, ROWS, ROWS, [-1, 2, 3]),
        ValueError,
        r"^multimodal_rope: mrope_section\[0\]: expected at least 0, got -1$",
    ),
    "section_one_row": (
        lambda: ops.multimodal_rope(Q, K, ROW, ROW, [1, 2, 1]),
        ValueError,
        r"^multimodal_rope: cos: expected shape \(3, B, S, D\), got shape \(2, 5, 8\)$",
    ),
    "section_two_rows": (
        lambda: ops.multimodal_rope(Q, K, ROWS[:2], ROWS[:2], [1, 2, 1]),
        ValueError,
        r"^multimodal_rope: cos: expected shape .* = \(3, 2, 5, 8\), got shape \(2, 2, 5, 8\)$",
    ),
    "section_tokens": (
        lambda: ops.multimodal_rope(Q, K, ROWS[:, :, :4], ROWS[:, :, :4], [1, 2, 1]),
        ValueError,
        r"^multimodal_rope: cos: expected shape .* = \(3, 2, 5, 8\), got shape \(3, 2, 4, 8\)$",
    ),
    "section_sin": (
        lambda: ops.multimodal_rope(Q, K, ROWS, ROW, [1, 2, 1]),
        ValueError,
        r"^multimodal_rope: sin: expected shape of cos = \(3, 2, 5, 8\), got shape \(2, 5, 8\)$",
    ),
    "sections_one_row": (
        lambda: rope(cos=ROW, sin=ROW),
        ValueError,
        r"^rope: cos: expected shape \(3, B, S, D\), got shape \(2, 5, 8\)$",
    ),
    "bwd_one_row": (
        lambda: rope_bwd(cos=ROW, sin=ROW),
        ValueError,
        r"^rope_bwd: cos: expected shape \(3, B, S, D\), got shape \(2, 5, 8\)$",
    ),
    "bwd_packed": (
        lambda: rope_bwd(q=Q[0], k=K[0]),
        ValueError,
        r"^rope_bwd: grad_q_out: expected shape \(B, H, S, D\), got shape \(3, 5, 8\)$",
    ),
    "undoubled": (
        lambda: ops.multimodal_rope(Q, K, ROWS, ROWS, [2, 4, 2]),
        ValueError,
        r"^multimodal_rope: mrope_section: expected three ints that add up to D / 2 = 4, got \[2, 4, 2\], "
        "which add up to 8$",
    ),
    "no_sections": (
        lambda: ops.multimodal_rope(Q, K, ROWS, ROWS, 8),
        TypeError,
        "^multimodal_rope: mrope_section: expected a list of three ints, got int$",
    ),
    "section_half_width": (
        lambda: ops.multimodal_rope(Q, K, ROWS[..., :4], ROWS[..., :4], [1, 2, 1]),
        ValueError,
        r"^multimodal_rope: cos: expected shape \(3, B, S, D\) = \(3, 2, 5, 8\), got shape \(3, 2, 5, 4\)$",
    ),
    "section_alone": (
        lambda: ops.multimodal_rope(Q, K, ROWS, ROWS, [1, 2.0, 1]),
        TypeError,
        r"^multimodal_rope: mrope_section\[1\]: expected an int, got float$",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_message(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message):
        call()
