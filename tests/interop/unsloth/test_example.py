"""The example runs: a Qwen3-MoE block on the drop-in agrees with a plain one while both train."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3_moe_block.py"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_agree_and_learn(device):
    main = runpy.run_path(str(EXAMPLE))["main"]
    losses = main(steps=6, device=device)
    assert losses[-1] < 0.9 * losses[0]
