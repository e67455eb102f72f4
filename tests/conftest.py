"""What holds for every test: Hypothesis measures no time, because these tests run on noisy machines."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("millstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millstream")
