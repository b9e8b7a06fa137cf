"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine makes a test slow, not wrong.
settings.register_profile(
    "holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("holdfast")
