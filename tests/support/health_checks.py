"""Hypothesis health checks that one test suppresses in addition to those of the profile (conftest.py)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def also(*checks: HealthCheck) -> list[HealthCheck]:
    """Return `suppress_health_check` for a test: the health checks of the profile and these."""
    return [*settings.default.suppress_health_check, *checks]
