"""Property tests judge results, never speed."""

import gc

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Complete garbage collections of the module's tests look at what these tests make, and at nothing older."""
    gc.collect()
    gc.freeze()
