"""Every test that takes a device runs on the CPU and, where there is one, on a GPU."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
