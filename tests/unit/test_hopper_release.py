"""Which releases of Triton the Hopper kernels are used with."""

import builtins
import sys

import pytest

from anabranch._backends.hopper import release

RUN, COMPILED = (f"{major}.{minor}" for major, minor in (release.RUN[0], release.COMPILED[0]))


@pytest.fixture(autouse=True)
def forget():
    release.refusal.cache_clear()
    yield
    release.refusal.cache_clear()


@pytest.mark.parametrize("build", ["", ".0", ".1", ".0+git9844da95", ".0rc1", "rc1"])
def test_what_ran_is_served(build):
    for backend in ("hopper", None):
        assert release.unfit(RUN + build, backend) is None


def test_what_was_only_compiled_is_served_by_name():
    assert release.unfit(f"{COMPILED}.0", "hopper") is None
    assert f"no GPU has run its kernels with Triton {COMPILED}.0" in release.unfit(f"{COMPILED}.0", None)


@pytest.mark.parametrize(
    "version", ["2.9.0", "3.5.1", "3.60.0", "3.10.0", "30.6.0", "4.0.0+git1", "main", "", "3"]
)
def test_what_is_unknown_is_refused(version):
    for backend in ("hopper", None):
        reason = release.unfit(version, backend)
        assert reason.startswith("its kernels are known to work with Triton 3.6, ")
        assert reason.endswith(f"not with {version}")


@pytest.mark.parametrize(("version", "why"), [("3.7.1", "wrong code"), ("3.8.0", "spills")])
def test_what_is_faulty_is_refused(version, why):
    for backend in ("hopper", None):
        assert why in release.unfit(version, backend)


def test_no_release_is_in_two_places():
    named = [*release.RUN, *release.COMPILED, *release.FAULTS]
    assert len(named) == len(set(named))


def without(monkeypatch, missing, error):
    imported = builtins.__import__

    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        if name == missing or (fromlist and f"{name}.{fromlist[0]}" == missing):
            raise error
        return imported(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", importing)
    monkeypatch.delitem(sys.modules, missing, raising=False)


def test_triton_that_cannot_be_imported(monkeypatch):
    without(monkeypatch, "triton", ImportError("libcuda is missing"))
    assert release.refusal("hopper") == "Triton cannot be imported: libcuda is missing"


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError])
def test_gluon_that_lacks_something(monkeypatch, error):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", f"{RUN}.0")
    without(monkeypatch, "anabranch._backends.hopper.gluon", error("no tma"))
    assert release.refusal("hopper") == f"Gluon of Triton {RUN}.0 lacks what its kernels use: no tma"


def test_the_reason_follows_the_release(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert release.refusal(None) == release.FAULTS[3, 7]
