"""Hopper's launches without its GPU, for tests of how products are tuned."""

import pytest


@pytest.fixture
def hopper_asked(monkeypatch):
    """On a Hopper GPU that is not there: (plan, product) of each launch whose configuration is asked for."""
    from anabranch._backends.triton import device
    from anabranch.ops.grouped_gemm.backends.hopper.plan import Plan

    found, original = [], Plan.launch

    def noted(plan, config, where, product):
        if config is None:
            found.append((plan, product()))
        return original(plan, config, where, product)

    monkeypatch.setattr(Plan, "launch", noted)
    monkeypatch.setattr(device, "capability", lambda _: (9, 0))
    monkeypatch.setattr(device, "num_sms", lambda _: 132)
    monkeypatch.setattr(device, "shared_memory_limit", lambda _: 232_448)
    return found


@pytest.fixture
def hopper_launched(hopper_asked, monkeypatch):
    """The constants of each launch of a product, which launches nothing."""
    from anabranch._backends.triton.prepared import Launch

    found = []

    def note(launch, *tensors):
        if "BN" in launch._constants:
            found.append(launch._constants)

    monkeypatch.setattr(Launch, "__call__", note)
    return found


@pytest.fixture
def hopper_clears(monkeypatch):
    """The pass over rows that are nobody's, in plain PyTorch."""
    from anabranch.ops.grouped_gemm.backends.hopper import unused

    def clear(out, offsets, row_to_slot):
        out[row_to_slot < 0] = 0

    monkeypatch.setattr(unused, "clear", clear)


@pytest.fixture
def store(monkeypatch, tmp_path):
    """Puts a product's configuration into a cache of the test's own."""
    from anabranch.tuning import key, lookup
    from anabranch.tuning.cache import Cache

    place = key.Place("Imaginary", "sm_90", "3.6", "1")
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ANABRANCH_AUTOTUNE", raising=False)
    monkeypatch.setattr(lookup, "_cache", Cache(poll=0))
    monkeypatch.setattr(key, "place", lambda device: place)
    return lambda product, config: Cache().add(place, {str(product.key()): {"config": config}})
