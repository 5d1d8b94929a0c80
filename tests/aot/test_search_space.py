"""A sample of what a tuner may try, compiled: nothing takes more shared memory than config.shared_memory says.

That is every so many of the configurations, for the epilogue that takes most. They may spill; that is for the
tuner to find slow. The count of those that do is in the table.
"""

import json
from unittest import mock

import pytest
import torch

from anabranch import ExpertLayout
from anabranch.epilogues import resolve
from anabranch.ops.grouped_gemm import config as tiles
from anabranch.testing.aot import SHARED_MEMORY, compiling

pytestmark = [pytest.mark.no_poison, pytest.mark.slow]

SAMPLE = 8
KINDS = {
    tiles.FORWARD: "gelu",
    tiles.GATED: "swiglu",
    tiles.INTERLEAVED: "gpt_oss",
    tiles.WEIGHT_GRADIENT: None,
}
RUNS = [
    (kind, dtype, arch)
    for arch in (80, 86, 90, 100, "gfx942")
    for kind in KINDS
    for dtype in ("bf16", "fp32", "tf32")
    if dtype == "bf16" or arch in (80, 90)
]


def launch_one(kind, dtype, config):
    from anabranch.ops.grouped_gemm.backends.triton import launch
    from anabranch.ops.grouped_gemm.backends.triton.kernels import ROW, TOKEN

    T, K, E, N, K_dim = 256, 4, 4, 512, 512
    layout = ExpertLayout.from_topk(torch.zeros(T, K, dtype=torch.int64), E)
    x, rows = torch.empty(T, K_dim, dtype=dtype), torch.empty(T * K, K_dim, dtype=dtype)
    weight = torch.empty(E, N, K_dim, dtype=dtype)
    if kind == tiles.WEIGHT_GRADIENT:
        launch.weight_gradient(rows, rows, layout, weight, z_rows=ROW, x_rows=ROW, config=config)
        launch.weight_gradient(rows, x, layout, weight, z_rows=ROW, x_rows=TOKEN, config=config)
        return
    epilogue = resolve("test", KINDS[kind])
    for gather in (False, True):
        launch.gemm(
            x if gather else rows,
            weight,
            layout,
            torch.empty(T * K, N // epilogue.columns, dtype=dtype),
            h=torch.empty(T * K, N, dtype=dtype),
            bias=torch.empty(E, N, dtype=dtype),
            epilogue=epilogue,
            interleaved=kind == tiles.INTERLEAVED,
            x_rows=TOKEN if gather else ROW,
            config=config,
        )


@pytest.mark.parametrize(("kind", "dtype", "arch"), RUNS, ids=[f"{k}-{d}-{a}" for k, d, a in RUNS])
def test_sample(kind, dtype, arch, record_property):
    capability = divmod(arch, 10) if isinstance(arch, int) else (0, 0)
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    precision = "tf32" if dtype == "tf32" else "ieee"
    limit = SHARED_MEMORY[arch]
    space = tiles.search_space(torch_dtype, limit, kind, capability=capability, precision=precision)
    assert space
    rows = []
    for config in space[:: -(-len(space) // SAMPLE)]:
        precisely = mock.patch("anabranch._backends.triton.device.input_precision", return_value=precision)
        with precisely, compiling(arch) as found:
            launch_one(kind, torch_dtype, config)
        most = tiles.shared_memory(config, torch_dtype, kind, capability)
        assert most <= limit
        for kernel in found:
            assert kernel.shared_bytes <= most, f"{config}: {kernel.shared_bytes} bytes, {most} expected"
            rows.append(kernel.row(constants=vars(config)))
    record_property("kernels", json.dumps(rows))
