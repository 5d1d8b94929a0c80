"""An oracle that shares nothing with the code under test: a pair of channels as one complex number."""

import pytest
import torch


def pair_index(pairing, rotary_dim):
    """First and second channel of every pair."""
    i = torch.arange(rotary_dim // 2)
    return (i, i + rotary_dim // 2) if pairing == "half" else (2 * i, 2 * i + 1)


def rotated(x, angles, *, pairing="half", head_axis=1):
    """x turned by angles (B or 1, S, pairs), in fp64; a packed x (S, H, D) has angles (1, S, pairs)."""
    angles = angles.double()
    angles = angles[0].unsqueeze(1) if x.dim() == 3 else angles.unsqueeze(head_axis)
    first, second = pair_index(pairing, 2 * angles.shape[-1])
    turned = torch.complex(x.double()[..., first], x.double()[..., second]) * torch.polar(
        torch.ones_like(angles), angles
    )
    out = x.double().clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def plain(x, cos, sin, *, pairing="half", head_axis=1):
    """x rotated in fp32 as models write it, then rounded; half-width tables (B or 1, S, pairs)."""
    cos, sin = ((t[0].unsqueeze(1) if x.dim() == 3 else t.unsqueeze(head_axis)) for t in (cos, sin))
    r = 2 * cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))[..., :r]
    if pairing == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        turned = torch.cat((-wide[..., r // 2 :], wide[..., : r // 2]), -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        turned = torch.stack((-wide[..., 1::2], wide[..., 0::2]), -1).flatten(-2)
    return torch.cat(((wide * cos + turned * sin).to(x.dtype), x[..., r:]), -1)


@pytest.fixture
def oracle():
    return rotated


@pytest.fixture
def baseline():
    return plain
