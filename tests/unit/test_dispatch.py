"""Which backend serves a call, and what is said when none does."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from anabranch import ExpertLayout, dispatch, grouped_gemm
from anabranch.errors import ArgumentError, UnsupportedError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Call:
    device: torch.device = CUDA
    dtype: torch.dtype = torch.float32
    backend: str | None = None


@pytest.fixture
def backends(monkeypatch):
    """Backends of an imaginary op: what each refuses. Those left out do not exist."""
    table: dict[str, str | None] = {}

    def module(op, backend):
        return SimpleNamespace(supports=lambda call: table[backend]) if backend in table else None

    monkeypatch.setattr(dispatch, "_module", module)
    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    return table


def test_the_first_that_can_serves(backends):
    backends.update(hopper="no", triton=None, eager=None)
    choice = dispatch.choose("op", Call())
    assert (choice.op, choice.backend, choice.refusals) == ("op", "triton", {"hopper": "no"})


def test_an_interpreter_serves_only_by_name(backends):
    backends.update(hopper="no", triton=None, eager=None)
    choice = dispatch.choose("op", Call(CPU))
    assert choice.backend == "eager"
    expected = "on the CPU its kernels are interpreted, which has to be asked for by name"
    assert choice.refusals == {"hopper": "no", "triton": expected}
    assert dispatch.choose("op", Call(CPU, backend="triton")).backend == "triton"


def test_every_refusal_is_kept(backends):
    backends.update(triton="fp64 is not its business", eager=None)
    choice = dispatch.choose("op", Call())
    assert choice.backend == "eager"
    assert choice.refusals == {
        "hopper": "it has no kernel for this operation",
        "triton": "fp64 is not its business",
    }


def test_when_none_can_all_reasons_are_given(backends):
    backends.update(hopper="a", triton="b", eager="c")
    with pytest.raises(UnsupportedError) as raised:
        dispatch.choose("op", Call())
    expected = "op: backend: expected a backend that can serve this call, got hopper: a; triton: b; eager: c"
    assert str(raised.value) == expected


@pytest.mark.parametrize("backend", dispatch.ORDER)
def test_an_explicit_backend_never_falls_back(backends, backend):
    backends.update(dict.fromkeys(dispatch.ORDER))
    assert dispatch.choose("op", Call(backend=backend)).backend == backend
    backends[backend] = "it is tired"
    with pytest.raises(UnsupportedError, match=f"got {backend}: it is tired$"):
        dispatch.choose("op", Call(backend=backend))
    del backends[backend]
    with pytest.raises(UnsupportedError, match=f"got {backend}: it has no kernel for this operation$"):
        dispatch.choose("op", Call(backend=backend))


def test_a_fault_in_a_backend_is_not_a_refusal(monkeypatch):
    def supports(call):
        raise ZeroDivisionError

    monkeypatch.setattr(dispatch, "probe", lambda backend, device: None)
    monkeypatch.setattr(dispatch, "_module", lambda op, backend: SimpleNamespace(supports=supports))
    with pytest.raises(ZeroDivisionError):
        dispatch.choose("op", Call())


def test_order_and_names():
    assert dispatch.ORDER == ("hopper", "triton", "eager")
    assert dispatch.BACKENDS == ("hopper", "triton", "eager", "reference")
    for name in (None, *dispatch.BACKENDS):
        dispatch.check_name("op", name)


@pytest.mark.parametrize("name", ["Eager", "cuda", "", 3])
def test_unknown_names(name):
    with pytest.raises(ArgumentError) as raised:
        dispatch.check_name("op", name)
    expected = "op: backend: expected None or one of hopper, triton, eager, reference, got "
    assert str(raised.value) == expected + repr(name)


@pytest.fixture
def triton_installed(monkeypatch):
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_probe_without_triton(backend, device, monkeypatch):
    monkeypatch.setattr(dispatch, "_installed", lambda package: package != "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.probe(backend, device) == "Triton is not installed"
    assert dispatch.probe("eager", device) is None
    assert dispatch.probe("reference", device) is None


@pytest.mark.usefixtures("triton_installed")
def test_probe_on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.probe("triton", CPU) is None
    assert dispatch.probe("hopper", CPU) == "it runs on CUDA tensors, not on cpu"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert dispatch.probe("triton", CPU) == "it runs on CUDA tensors, not on cpu"
    assert dispatch.probe("triton", torch.device("meta")) == "it runs on CUDA tensors, not on meta"


@pytest.mark.usefixtures("triton_installed")
@pytest.mark.parametrize(
    ("capability", "reason"),
    [((9, 0), None)] + [((n, 0), "it needs a GPU of compute capability 9.0") for n in (8, 10, 12)],
)
def test_probe_of_the_gpu(capability, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    assert dispatch.probe("hopper", CUDA) == reason
    assert dispatch.probe("triton", CUDA) is None


@pytest.mark.usefixtures("triton_installed")
def test_probe_of_an_amd_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "_capability", dispatch._capability.__wrapped__)
    assert dispatch.probe("hopper", CUDA) == "it needs a GPU of compute capability 9.0"
    assert dispatch.probe("triton", CUDA) is None


@pytest.mark.usefixtures("triton_installed")
def test_probe_of_the_gpu_in_use(monkeypatch):
    """A device without a number is another one whenever another is in use."""
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9 - index, 0))
    for current, reason in ((0, None), (1, "it needs a GPU of compute capability 9.0")):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert dispatch.probe("hopper", torch.device("cuda")) == reason
        assert dispatch.probe("hopper", torch.device("cuda", 0)) is None


def test_the_refusal_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    layout = ExpertLayout.from_counts(torch.tensor([2]), 2)
    x, weight = torch.ones(2, 3), torch.ones(1, 4, 3)
    with pytest.raises(UnsupportedError) as raised:
        grouped_gemm(x, weight, layout, backend="triton")
    expected = "backend: expected a backend that can serve this call, got triton: Triton is not installed"
    assert str(raised.value) == f"grouped_gemm: {expected}"
    assert grouped_gemm(x, weight, layout).tolist() == [[3] * 4] * 2


def test_value_checks_are_asked_for_by_name(monkeypatch):
    monkeypatch.delenv("ANABRANCH_CHECK_VALUES", raising=False)
    assert not dispatch.checks_values()
    monkeypatch.setenv("ANABRANCH_CHECK_VALUES", "1")
    assert dispatch.checks_values()
