"""Every epilogue's functions for Triton kernels against its maths in fp64, whatever the operands.

The names are the registry's. TRITON_INTERPRET=1 pytest tests/unit/test_epilogues_device.py interprets them.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anabranch import epilogues
from anabranch.epilogues import base

pytestmark = [
    pytest.mark.op("grouped_gemm", "triton"),
    # NumPy, which interprets, warns where a GPU does not, and of how the interpreter reads a scalar.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
NAMES = sorted(base.REGISTRY)
DTYPES = [torch.float32, torch.float16]
if os.environ.get("TRITON_INTERPRET") != "1":  # the interpreter truncates where it makes bf16
    DTYPES.append(torch.bfloat16)


def code_of(name):
    from anabranch.ops.grouped_gemm.backends.triton.plan import device_code

    code = device_code(base.REGISTRY[name]())
    assert code is not None, f"epilogues/device/{name}.py is missing"
    return code


@pytest.mark.cpu
def test_every_file_is_an_epilogues():
    folder = Path(epilogues.__file__).parent / "device"
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(NAMES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_maths(name, dtype, device):
    from anabranch.testing.device_functions import check, operands, results, variants

    for epilogue in variants(base.REGISTRY[name]):
        given = operands(epilogue, dtype, device)
        check(results(code_of(name), epilogue, *given), epilogue, *given)


@pytest.mark.parametrize("name", NAMES)
def test_each_wrong_result_fails(name, device):
    from anabranch.testing.device_functions import check, operands, results, variants

    for epilogue in variants(base.REGISTRY[name]):
        given = operands(epilogue, torch.float32, device)
        right = results(code_of(name), epilogue, *given)
        for key, value in right.items():
            for wrong in (value * 1.001, 3 * value, torch.zeros_like(value)):
                with pytest.raises(AssertionError, match=key):
                    check({**right, key: wrong}, epilogue, *given)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "other"),
    [("silu", "gelu"), ("gelu_tanh", "gelu"), ("reglu", "swiglu"), ("gpt_oss", "clamped_swiglu")],
)
def test_another_epilogues_function_fails(name, other, which, device):
    from anabranch.testing.device_functions import check, operands, results

    epilogue = base.REGISTRY[name]()
    given = operands(epilogue, torch.float32, device)
    both = {key: getattr(code_of(name), key) for key in ("forward", "backward")}
    found = results(SimpleNamespace(**{**both, which: getattr(code_of(other), which)}), epilogue, *given)
    with pytest.raises(AssertionError, match="out of bounds"):
        check(found, epilogue, *given)


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_not_lost(name, device):
    """In any operand, the result is NaN: a clamp must not make a number of it."""
    from anabranch.testing.device_functions import results

    epilogue = base.REGISTRY[name]()
    for column in range(epilogue.columns):
        z = torch.ones(epilogue.columns, 1, device=device)
        z[column] = torch.nan
        found = results(code_of(name), epilogue, torch.ones(1, device=device), z)
        assert all(bool(value.isnan().all()) for key, value in found.items() if not key.startswith("d_"))
