"""Property tests judge results, never speed."""

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
