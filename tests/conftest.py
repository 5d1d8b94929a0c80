"""A hostile environment for every test, and the devices that a test runs on.

Memory that anabranch asks for uninitialised holds NaN (or a huge index), so that a result read before it is
written cannot look right. Warnings are errors (pyproject.toml). Seeds and thread counts are fixed.

A test marked ``op(name)`` runs on the CPU and, where there is one, on a GPU; with an argument ``backend``, once with
each backend of the operation there. On a GPU everything that the test makes is made there: what its own code asks
of :data:`FACTORIES` and of :mod:`anabranch.testing`, its parameters, and its module's constants. What anabranch makes
is not touched, so a device that it forgets is found.
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
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms ask of cuBLAS

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from anabranch.errors import UnsupportedError
from anabranch.testing import on, usable_backends
from anabranch.testing import poison as dirty

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
    # Who watches operations, as a recording of a call does, shall not see these.
    with torch.no_grad(), _disable_current_modes():
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
        if "gpu" in request.node.keywords and torch.cuda.is_available():
            dirty("cuda")
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


FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "full",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
)
"""What makes a tensor in a test; ``empty`` is poisoned, and has to name its device."""
TESTS = os.path.dirname(__file__)
NARROW = ("hopper", "triton")
"""Backends that refuse fp64."""


def _made_on(device, make):
    """A factory whose results, asked for by a test without a device, are there. Drawn on the CPU: the same anywhere."""

    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        if kwargs.get("device") is not None:
            return make(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # traced code has no frames to look at
            return make(*args, **{**kwargs, "device": device})
        if not sys._getframe(1).f_globals.get("__file__", "").startswith(TESTS):
            return make(*args, **kwargs)
        needs = kwargs.pop("requires_grad", False)
        return make(*args, **kwargs).to(device).requires_grad_(needs)

    return wrapper


def _moved(value, device):
    """A value with every tensor in it on a device; itself where there is none."""
    if type(value) is torch.Tensor and not value.is_meta:
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if type(value) not in (list, tuple, dict):
        return value
    parts = list(value.values()) if type(value) is dict else list(value)
    moved = [_moved(part, device) for part in parts]
    if all(a is b for a, b in zip(moved, parts, strict=True)):
        return value
    return dict(zip(value, moved, strict=True)) if type(value) is dict else type(value)(moved)


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """The type of the device that the test runs on; see above."""
    place = getattr(request, "param", "cpu")
    if place == "cpu":
        yield place
        return
    for name in FACTORIES:
        monkeypatch.setattr(torch, name, _made_on(place, getattr(torch, name)))
    for name, value in list(vars(request.module).items()):
        if (moved := _moved(value, place)) is not value:
            monkeypatch.setattr(request.module, name, moved)
    with on(place):
        yield place


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    place = pyfuncitem.funcargs.get("device", "cpu")
    if place != "cpu":
        pyfuncitem.funcargs.update({n: _moved(v, place) for n, v in pyfuncitem.funcargs.items()})
    try:
        return (yield)
    except UnsupportedError as error:
        # What takes some calls only says so; that it serves those which it should is tested where it is.
        if pyfuncitem.funcargs.get("backend") != "hopper":
            raise
        pytest.skip(str(error))


def _places(op, only):
    """(device, marks) pairs for a test of an op; of one backend, which the CPU may only interpret, if ``only``."""
    there = [("cuda", [pytest.mark.gpu])] if torch.cuda.is_available() else []
    if only is None:
        return [("cpu", []), *there]
    if only in usable_backends(op):
        return [("cpu", [])]
    reason = f"needs a GPU, or TRITON_INTERPRET=1 with Triton, for {only}"
    return there or [("cpu", [pytest.mark.skip(reason=reason)])]


def _names(given):
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else given


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("op")
    if marker is None or metafunc.definition.get_closest_marker("cpu"):
        return
    op, only = (*marker.args, None)[:2]
    places = _places(op, only)
    given = [
        name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])
    ]
    if only is None and "backend" in metafunc.fixturenames and "backend" not in given:
        cases = [
            pytest.param(backend, place, marks=marks, id=backend if place == "cpu" else f"{backend}-{place}")
            for place, marks in places
            for backend in usable_backends(op, place)
        ]
        metafunc.parametrize(("backend", "device"), cases, indirect=["device"])
    else:
        cases = [
            pytest.param(place, marks=marks, id=pytest.HIDDEN_PARAM if place == "cpu" else place)
            for place, marks in places
        ]
        metafunc.parametrize("device", cases, indirect=True)


def _is_served(item):
    """Whether the test's backend computes in its precision; another's refusal has a test of its own."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    wide = given.get("dtype") in (torch.float64, "float64")
    return not (given.get("backend") in NARROW and (wide or item.get_closest_marker("fp64")))


def pytest_collection_modifyitems(config, items):
    refused = [item for item in items if not _is_served(item)]
    if refused:
        config.hook.pytest_deselected(items=refused)
        items[:] = [item for item in items if _is_served(item)]
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
