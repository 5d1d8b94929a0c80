"""The functions of transformers that rope and mrope stand for, as witnesses: values and gradients."""

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from anabranch.ops.rope.api import mrope, rope
from anabranch.testing import randn, usable_backends

B, S, D = 2, 6, 128
PARAMETERS = {"rope_type": "default", "rope_theta": 10_000.0}

pytestmark = pytest.mark.parametrize("backend", usable_backends("rope"))


def heads(*shapes):
    return [randn(*shape).requires_grad_() for shape in shapes]


def agree(ours, theirs, leaves):
    """Demands results, and gradients of leaves, within a few fp32 roundings of one another."""
    given = [randn(*y.shape) for y in theirs]
    first, second = ([*ys, *torch.autograd.grad(ys, leaves, given)] for ys in (ours, theirs))
    for a, b in zip(first, second, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def text_tables(width=D):
    angles = torch.arange(S).unsqueeze(-1) * 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.cat((angles, angles), -1).expand(B, -1, -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("head_axis", [1, 2])
def test_llama(backend, head_axis):
    q, k = heads((B, 4, S, D), (B, 2, S, D)) if head_axis == 1 else heads((B, S, 4, D), (B, S, 2, D))
    cos, sin = text_tables()
    theirs = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=head_axis)
    agree(rope(q, k, cos, sin, head_axis=head_axis, backend=backend), theirs, (q, k))


def test_gpt_neox_partial(backend):
    q, k = heads((B, 4, S, 96), (B, 4, S, 96))
    cos, sin = text_tables(24)
    agree(
        rope(q, k, cos, sin, rotary_dim=24, backend=backend),
        gpt_neox.apply_rotary_pos_emb(q, k, cos, sin),
        (q, k),
    )


def test_gpt_oss_half_width(backend):
    q, k = heads((B, 4, S, 64), (B, 2, S, 64))
    cos, sin = (t[..., :32] for t in text_tables(64))
    agree(rope(q, k, cos, sin, backend=backend), gpt_oss.apply_rotary_pos_emb(q, k, cos, sin), (q, k))


@pytest.mark.parametrize("full_width", [True, False])
def test_gpt_j_adjacent(backend, full_width):
    q, k = heads((B, S, 4, 64), (B, S, 4, 64))
    sin, cos = gptj.create_sinusoidal_positions(S, 64).chunk(2, dim=-1)
    theirs = [gptj.apply_rotary_pos_emb(x, sin[None], cos[None]) for x in (q, k)]
    if full_width:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    agree(rope(q, k, cos, sin, pairing="adjacent", head_axis=2, backend=backend), theirs, (q, k))


def test_deepseek_v3_but_for_its_order_of_channels(backend):
    q, k = heads((B, 4, S, 64), (B, 1, S, 64))
    cos, sin = text_tables(64)
    theirs = deepseek.apply_rotary_pos_emb_interleave(q, k, cos, sin)
    ours = rope(q, k, cos[..., :32], sin[..., :32], pairing="adjacent", backend=backend)
    agree([torch.cat((y[..., 0::2], y[..., 1::2]), -1) for y in ours], theirs, (q, k))
    scores = [a @ b.mT for a, b in (ours, theirs)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-4)


def positions():
    """Text, an image of 2 x 2, text: (3, B, S)."""
    rows = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    return torch.stack((rows, rows * 37), 1)


def row_tables(embedding, ids):
    angles = ids.unsqueeze(-1).float() * embedding.inv_freq
    return angles.cos(), angles.sin()


MULTIMODAL = {
    "qwen2_vl": (qwen2_vl, "Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", [16, 24, 24], "blocked"),
    "qwen2_5_vl": (qwen2_5_vl, "Qwen2_5_VLTextConfig", "Qwen2_5_VLRotaryEmbedding", [16, 24, 24], "blocked"),
    "qwen3_vl": (qwen3_vl, "Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", [24, 20, 20], "interleaved"),
}


def multimodal(name):
    module, config, embedding, sections, order = MULTIMODAL[name]
    parameters = {**PARAMETERS, "mrope_section": sections}
    config = getattr(module, config)(hidden_size=2 * D, num_attention_heads=2, rope_parameters=parameters)
    return module, getattr(module, embedding)(config), sections, order


@pytest.mark.parametrize("full_width", [True, False])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_multimodal(backend, name, full_width):
    module, rotary, sections, order = multimodal(name)
    q, k = heads((B, 4, S, D), (B, 2, S, D))
    cos, sin = row_tables(rotary, positions())
    if full_width:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    theirs = module.apply_rotary_pos_emb(q, k, *rotary(q, positions()))
    agree(mrope(q, k, cos, sin, sections, order=order, backend=backend), theirs, (q, k))


@pytest.mark.parametrize("name", MULTIMODAL)
def test_multimodal_positions(backend, name):
    """Positions into a table, as an engine with a cache of angles has them."""
    module, rotary, sections, order = multimodal(name)
    q, k = heads((B, 4, S, D), (B, 2, S, D))
    theirs = module.apply_rotary_pos_emb(q, k, *rotary(q, positions()))
    cos, sin = row_tables(rotary, torch.arange(200))
    options = dict(order=order, positions=positions(), backend=backend)
    agree(mrope(q, k, cos, sin, sections, **options), theirs, (q, k))


@pytest.mark.parametrize("module", [qwen2_vl, qwen3_vl], ids=["qwen2_vl", "qwen3_vl"])
def test_vision(backend, module):
    q, k = heads((S, 4, 80), (S, 4, 80))
    cos, sin = (t[0] for t in text_tables(80))
    agree(rope(q, k, cos, sin, backend=backend), module.apply_rotary_pos_emb_vision(q, k, cos, sin), (q, k))
