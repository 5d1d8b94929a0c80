"""A hostile environment for every test.

Memory that anabranch asks for uninitialised holds NaN (or a huge index), so that a result read before it is
written cannot look right. Warnings are errors (pyproject.toml). Seeds and thread counts are fixed.
"""

import functools
import os
import random
import sys
import zlib

# Read when torch is imported, so set before.
WORKER = "PYTEST_XDIST_WORKER" in os.environ
THREADS = 1 if WORKER else 2
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(THREADS)

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")

HUGE_INDEX = 2**30
ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def _poison(tensor):
    # Fake and functional tensors are subclasses; they have nothing to fill.
    if type(tensor) is not torch.Tensor or tensor.is_meta:
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(min(HUGE_INDEX, torch.iinfo(tensor.dtype).max))


def _poisoned(allocate):
    @functools.wraps(allocate)
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        # The compiler traces the plain allocation; its kernels are tested by what they return.
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] == "anabranch":
                _poison(tensor)
        return tensor

    return wrapper


POISONED = [(owner, name, _poisoned(getattr(owner, name))) for owner, name in ALLOCATORS]


@pytest.fixture(autouse=True)
def poison(request, monkeypatch):
    """Fills what anabranch allocates uninitialised, in operators and in backward threads too."""
    if request.node.get_closest_marker("no_poison") is None:
        for owner, name, wrapper in POISONED:
            monkeypatch.setattr(owner, name, wrapper)


@pytest.fixture(autouse=True)
def seed(request):
    """Random numbers depend on the test's name alone, not on the tests before it."""
    number = zlib.crc32(request.node.nodeid.encode())
    random.seed(number)
    torch.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
