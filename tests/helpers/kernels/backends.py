"""A fixture by which a test has every backend of the host; on a GPU there is one."""

import pytest

from fquant.kernels.dispatch import VARIABLE
from tests.helpers.formats import ISAS


@pytest.fixture(params=["reference", *ISAS])
def backend(request, device, monkeypatch):
    """Force a backend, and return its name."""
    if device.type != "cpu" and request.param != "reference":
        pytest.skip("a backend of the host")
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param
