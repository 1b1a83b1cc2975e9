"""What Hypothesis shall bear in one test: a list in its settings would replace that of the profile (conftest.py)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def also(*checks: HealthCheck) -> list[HealthCheck]:
    """For `suppress_health_check`: what the profile has there, and these."""
    return [*settings.default.suppress_health_check, *checks]
