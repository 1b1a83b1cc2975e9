"""Check from the settings that each round can end before the next round begins."""

from __future__ import annotations

from healthd.agent.settings.configured import Configured


def max_round_seconds(configured: Configured) -> float:
    """Return the maximum duration of a round with all runs.

    The duration is the sum of the runs' timeouts, but no run begins after round_timeout_seconds.
    """
    timeouts = [config.timeout_seconds for name, config in configured.runs.items() if configured.check(name).has_run]
    return min(sum(timeouts), configured.settings.round_timeout_seconds + max(timeouts, default=0.0))


def warnings(configured: Configured) -> list[str]:
    """Return a sentence for each interval that is shorter than the longest round. Rounds may then start late."""
    settings, max_seconds = configured.settings, max_round_seconds(configured)
    intervals = {"interval_seconds": settings.interval_seconds}
    for name, config in configured.runs.items():
        if config.interval_seconds is not None and configured.check(name).has_run:
            instance = f'."{name.instance}"' if name.instance else ""
            intervals[f"checks.{name.check}{instance}.interval_seconds"] = config.interval_seconds
    return [
        f"{setting}: a round may take {max_seconds:g} s (the sum of its checks' timeouts, at most "
        f"round_timeout_seconds {settings.round_timeout_seconds:g} plus the last check), which is longer than the "
        f"interval of {interval:g} s: rounds may start late"
        for setting, interval in intervals.items()
        if max_seconds > interval
    ]
