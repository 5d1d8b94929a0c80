"""moe_mlp's refusals, word by word."""

from __future__ import annotations

import pytest
import torch

from anabranch import moe_mlp
from anabranch.epilogues import Silu, base

NAMES = ", ".join(sorted(base.REGISTRY))
GOOD = {
    "x": torch.zeros(3, 4),
    "gate_up": torch.zeros(2, 6, 4),
    "down": torch.zeros(2, 4, 3),
    "expert_ids": torch.zeros(3, 2, dtype=torch.int64),
    "expert_weights": torch.zeros(3, 2),
}
BAD = {
    "x is no tensor": ({"x": [1.0]}, TypeError, "x: expected a tensor (T, H), got list"),
    "x's rank": ({"x": torch.zeros(3, 4, 1)}, ValueError, "x: expected shape (T, H), got shape (3, 4, 1)"),
    "x's dtype": (
        {"x": torch.zeros(3, 4, dtype=torch.int32)},
        TypeError,
        "x: expected dtype float16 or bfloat16 or float32 or float64, got int32",
    ),
    "gate_up's rank": (
        {"gate_up": torch.zeros(12, 4)},
        ValueError,
        "gate_up: expected shape (E, 2 * I, H), got shape (12, 4)",
    ),
    "gate_up's rank, no gate": (
        {"gate_up": torch.zeros(12, 4), "activation": "silu"},
        ValueError,
        "gate_up: expected shape (E, I, H), got shape (12, 4)",
    ),
    "gate_up's H": (
        {"gate_up": torch.zeros(2, 6, 5)},
        ValueError,
        "gate_up: expected shape (gate_up's E, gate_up's width, x's H) = (2, 6, 4), got shape (2, 6, 5)",
    ),
    "gate_up's dtype": (
        {"gate_up": torch.zeros(2, 6, 4, dtype=torch.bfloat16)},
        TypeError,
        "gate_up: expected x's dtype float32, got bfloat16",
    ),
    "an odd gate_up": (
        {"gate_up": torch.zeros(2, 5, 4)},
        ValueError,
        "gate_up: expected an even output width for the gated swiglu, got 5",
    ),
    "down's E": (
        {"down": torch.zeros(3, 4, 3)},
        ValueError,
        "down: expected shape (gate_up's E, x's H, gate_up's I) = (2, 4, 3), got shape (3, 4, 3)",
    ),
    "down, transposed": (
        {"gate_up": torch.zeros(2, 4, 6), "transpose_weight": True},
        ValueError,
        "down: expected shape (gate_up's E, gate_up's I, x's H) = (2, 3, 4), got shape (2, 4, 3)",
    ),
    "down's dtype": (
        {"down": torch.zeros(2, 4, 3, dtype=torch.float64)},
        TypeError,
        "down: expected x's dtype float32, got float64",
    ),
    "ids of floats": (
        {"expert_ids": torch.zeros(3, 2)},
        TypeError,
        "expert_ids: expected dtype int32 or int64, got float32",
    ),
    "ids' T": (
        {"expert_ids": torch.zeros(4, 2, dtype=torch.int64)},
        ValueError,
        "expert_ids: expected shape (x's T, K) = (3, 2), got shape (4, 2)",
    ),
    "weights of ints": (
        {"expert_weights": torch.zeros(3, 2, dtype=torch.int64)},
        TypeError,
        "expert_weights: expected dtype float16 or bfloat16 or float32 or float64, got int64",
    ),
    "weights' K": (
        {"expert_weights": torch.zeros(3, 1)},
        ValueError,
        "expert_weights: expected shape expert_ids' (T, K) = (3, 2), got shape (3, 1)",
    ),
    "gate_up_bias's shape": (
        {"gate_up_bias": torch.zeros(2, 3)},
        ValueError,
        "gate_up_bias: expected shape gate_up's (E, width) = (2, 6), got shape (2, 3)",
    ),
    "down_bias's rank": (
        {"down_bias": torch.zeros(4)},
        ValueError,
        "down_bias: expected shape (gate_up's E, x's H) = (2, 4), got shape (4,)",
    ),
    "gate_up_bias's rank": (
        {"gate_up_bias": torch.zeros(6)},
        ValueError,
        "gate_up_bias: expected shape gate_up's (E, width) = (2, 6), got shape (6,)",
    ),
    "weights' rank": (
        {"expert_weights": torch.zeros(6)},
        ValueError,
        "expert_weights: expected shape expert_ids' (T, K) = (3, 2), got shape (6,)",
    ),
    "transposed unsaid": (
        {"gate_up": torch.zeros(2, 4, 10), "down": torch.zeros(2, 5, 4)},
        ValueError,
        "gate_up: expected shape (gate_up's E, gate_up's width, x's H) = (2, 4, 4), got shape (2, 4, 10), "
        "which fits transpose_weight=True",
    ),
    "transposed unsaid, an odd H": (
        {"x": torch.zeros(3, 5), "gate_up": torch.zeros(2, 5, 6), "down": torch.zeros(2, 3, 5)},
        ValueError,
        "gate_up: expected shape (gate_up's E, gate_up's width, x's H) = (2, 5, 5), got shape (2, 5, 6), "
        "which fits transpose_weight=True",
    ),
    "said but not transposed": (
        {"gate_up": torch.zeros(2, 10, 4), "down": torch.zeros(2, 4, 5), "transpose_weight": True},
        ValueError,
        "gate_up: expected shape (gate_up's E, x's H, gate_up's width) = (2, 4, 4), got shape (2, 10, 4), "
        "which fits transpose_weight=False",
    ),
    "gate_up alone transposed": (
        {"gate_up": torch.zeros(2, 4, 10), "down": torch.zeros(2, 4, 5)},
        ValueError,
        "gate_up: expected shape (gate_up's E, gate_up's width, x's H) = (2, 4, 4), got shape (2, 4, 10)",
    ),
    "no gate": (
        {"activation": "silu"},
        ValueError,
        "down: expected shape (gate_up's E, x's H, gate_up's I) = (2, 4, 6), got shape (2, 4, 3), "
        "which fits a gated activation (silu has no gate)",
    ),
    "no gate, and no size fits": (
        {"activation": "silu", "down": torch.zeros(2, 4, 4)},
        ValueError,
        "down: expected shape (gate_up's E, x's H, gate_up's I) = (2, 4, 6), got shape (2, 4, 4)",
    ),
    "down_bias is no tensor": (
        {"down_bias": True},
        TypeError,
        "down_bias: expected a tensor (E, H), got bool",
    ),
    "activation": (
        {"activation": "swish"},
        ValueError,
        f"activation: expected one of {NAMES}, got 'swish'",
    ),
    "activation's type": (
        {"activation": torch.nn.SiLU()},
        TypeError,
        f"activation: expected an Epilogue, None or one of {NAMES}, got SiLU",
    ),
    "activation, a function": (
        {"activation": torch.nn.functional.silu},
        TypeError,
        f"activation: expected an Epilogue, None or one of {NAMES}, got function silu",
    ),
    "gate_layout": (
        {"gate_layout": "mixed"},
        ValueError,
        "gate_layout: expected 'concatenated' or 'interleaved', got 'mixed'",
    ),
    "gate_layout without a gate": (
        {"gate_layout": "interleaved", "activation": Silu(), "gate_up": torch.zeros(2, 3, 4)},
        ValueError,
        "gate_layout: expected 'concatenated' for silu, which has no gate, got 'interleaved'",
    ),
    "weight_on": ({"weight_on": "both"}, ValueError, "weight_on: expected 'output' or 'input', got 'both'"),
    "save": ({"save": "x"}, ValueError, "save: expected 'activations' or 'inputs', got 'x'"),
    "backend": (
        {"backend": "cuda"},
        ValueError,
        "backend: expected None or one of hopper, triton, eager, reference, got 'cuda'",
    ),
    "a backend that cannot": (
        {"backend": "triton"},
        NotImplementedError,
        "backend: expected a backend that can serve this call, got triton: it runs on CUDA tensors, not on cpu",
    ),
    "device": (
        {"down": torch.zeros(2, 4, 3, device="meta")},
        ValueError,
        "down: expected x's device cpu, got meta",
    ),
    "ids' device": (
        {"expert_ids": torch.zeros(3, 2, dtype=torch.int64, device="meta")},
        ValueError,
        "expert_ids: expected x's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusal(name: str) -> None:
    change, error, message = BAD[name]
    with pytest.raises(error) as caught:
        moe_mlp(**{**GOOD, **change})
    assert str(caught.value) == f"moe_mlp: {message}"
    moe_mlp(**GOOD)
