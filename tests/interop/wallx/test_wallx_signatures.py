"""Names, order of arguments and defaults are the interface."""

import inspect
import subprocess
import sys

import pytest

from anabranch.interop.wallx import backend, ops

CONTRACT = {
    backend: """
        asym_dual_gmm_separated(input_expert0, input_expert1, weight_expert0, weight_expert1, output_expert0=None,
            output_expert1=None, trans_a=False, trans_b=False)
        permute(input, indices, num_out_tokens, workspace, max_expanded_token_num)
        unpermute(input, row_id_map, prob, max_tokens, num_topK)
        unpermute_bwd(input_bwd, input_fwd, row_id_map, prob)
        rope(q, k, cos, sin, q_out, k_out, mrope_section_doubled)
        rope_bwd(grad_q_out, grad_k_out, q, k, cos, sin, grad_q, grad_k, mrope_section_doubled)
    """,
    ops: """
        asym_dual_gmm(input_expert0, input_expert1, weight_expert0, weight_expert1, trans_b=False)
        permute(input_act, indices, num_out_tokens=None, max_token_num=0)
        unpermute(input_act, row_id_map, probs=None)
        multimodal_rope(q, k, cos, sin, mrope_section)
        get_rope_index(input_ids, spatial_merge_size, image_token_id, video_token_id, vision_start_token_id,
            tokens_per_second, image_grid_thw=None, video_grid_thw=None, second_per_grid_ts=None, attention_mask=None)
        rot_pos_emb(inv_freq, grid_thw, spatial_merge_size)
        get_window_index(grid_thw, window_size, spatial_merge_size, patch_size, spatial_merge_unit=1)
    """,
}


def contract():
    for module, text in CONTRACT.items():
        for line in text.replace(")\n", ")\0").split("\0"):
            if line.strip():
                yield module, *line.strip().split("(", 1)


def shape(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("module", "name", "rest"),
    list(contract()),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_signature(module, name, rest):
    namespace = {}
    exec(f"def expected({rest}: ...", namespace)
    assert shape(getattr(module, name)) == shape(namespace["expected"])


def test_all_of_the_contract_is_public():
    for module in CONTRACT:
        named = {name for owner, name, _ in contract() if owner is module}
        assert named <= set(module.__all__)
        assert all(inspect.getdoc(getattr(module, name)) for name in module.__all__)
    assert len(list(contract())) == 13


def test_the_separated_product_is_in_both_levels():
    assert ops.asym_dual_gmm_separated is backend.asym_dual_gmm_separated


def test_importing_touches_no_device():
    code = (
        "import torch, anabranch.interop.wallx; from anabranch.interop.wallx import backend, ops\n"
        "import sys; assert not torch.cuda.is_initialized() and 'triton' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
