"""What `make sanitize` takes for granted of the code by which warp_specialize starts its partitions."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import triton

from anabranch import dispatch, moe_mlp
from anabranch.testing.aot import compiling

pytestmark = pytest.mark.no_poison

PATH = Path(__file__).parents[1] / "gpu" / "findings.py"
spec = importlib.util.spec_from_file_location("findings", PATH)
findings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(findings)

STARTERS = 4
KERNELS = {
    "product_kernel": "product.py",
    "weight_gradient_kernel": "weight_gradient.py",
    "gate_gradient_kernel": "gate_gradient.py",
}


def test_waiting_warps_are_told_in_the_last_bytes_behind_a_barrier(monkeypatch):
    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    made, compile_it = [], triton.compile

    def keep(*args, **options):
        made.append(compile_it(*args, **options))
        return made[-1]

    monkeypatch.setattr(triton, "compile", keep)
    x, gate_up, down, weights = (
        torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((64, 128), (4, 256, 128), (4, 128, 128), (64, 2))
    )
    with compiling(90):
        out = moe_mlp(
            x,
            gate_up,
            down,
            torch.arange(128).view(64, 2) % 4,
            weights,
            activation="swiglu",
            backend="hopper",
        )
        out.backward(torch.zeros_like(out))
    specialized = [kernel for kernel in made if kernel.metadata.num_warps > STARTERS]
    assert {kernel.metadata.name for kernel in specialized} == set(KERNELS)
    for kernel in specialized:
        over = findings.HandOver(kernel.metadata.shared, kernel.metadata.num_warps, STARTERS)
        first = over.byte(STARTERS) - findings.RESERVED
        code, place = [], None
        for line in kernel.asm["ptx"].splitlines():
            if at := re.match(r"\s*\.loc\s+1 (\d+) ", line):
                place = int(at[1])
            elif of_another_file := re.match(r"\s*\.loc\s", line):
                place = of_another_file[0]
            elif said := re.match(r"\s*((?:st|ld)\.shared\S*|barrier\.sync)\s+(.*);", line):
                code.append((said[1], said[2], place))
        # Told to run and, in the end, to stop, by a store of all bytes; each waiting warp reads its own.
        told = [i for i, (_, rest, _) in enumerate(code) if f"[global_smem+{first}]" in rest]
        heard = [i for i, (_, rest, _) in enumerate(code) if rest.endswith(f"+{first - STARTERS}]")]
        assert [code[i][0] for i in told] == ["st.shared.v2.b32"] * 2
        assert [code[i][0] for i in heard] == ["ld.shared.b8"]
        # Between the two is a barrier of all warps, as no number of threads says otherwise.
        assert all(code[i + 1][:2] == ("barrier.sync", "1") for i in told)
        assert code[heard[0] - 1][:2] == ("barrier.sync", "1")
        places = {code[i][2] for i in (*told, *heard)}
        assert places <= findings.specializing(KERNELS[kernel.metadata.name], kernel.metadata.name)
