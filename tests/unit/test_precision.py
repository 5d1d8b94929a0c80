"""What autocast asks for, and where it stops."""

import pytest
import torch

from anabranch.ops.precision import cast_like_matmul, without_autocast

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("enabled", [False, True])
def test_without_autocast(enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled), without_autocast(CPU):
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32


@pytest.mark.parametrize(("enabled", "expected"), [(False, torch.float32), (True, torch.bfloat16)])
def test_casts_as_matmul_does(enabled, expected):
    single, double, ids = (torch.ones(1, dtype=d) for d in (torch.float32, torch.float64, torch.int64))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        cast = cast_like_matmul(single, double, None, ids, single)
    assert [None if v is None else v.dtype for v in cast] == [
        expected,
        torch.float64,
        None,
        torch.int64,
        expected,
    ]


def test_the_meta_device_knows_no_autocast():
    value = torch.ones(1, device=META)
    with torch.autocast("cpu", torch.bfloat16), without_autocast(META):
        assert cast_like_matmul(value) == (value,)
