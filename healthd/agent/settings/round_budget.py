"""Whether a round can be over before the next one begins, as far as the settings tell."""

from __future__ import annotations

from healthd.agent.settings.configured import Configured


def longest_round_seconds(configured: Configured) -> float:
    """How long a round of all runs takes at most: the sum of their timeouts, but no run begins after
    round_timeout_seconds."""
    timeouts = [config.timeout_seconds for name, config in configured.runs.items() if configured.check(name).runs]
    return min(sum(timeouts), configured.settings.round_timeout_seconds + max(timeouts, default=0.0))


def warnings(configured: Configured) -> list[str]:
    """A sentence for each interval that is shorter than a round may take: where checks hang, rounds come late."""
    settings, longest = configured.settings, longest_round_seconds(configured)
    intervals = {"interval_seconds": settings.interval_seconds}
    for name, config in configured.runs.items():
        if config.interval_seconds is not None and configured.check(name).runs:
            instance = f'."{name.instance}"' if name.instance else ""
            intervals[f"checks.{name.check}{instance}.interval_seconds"] = config.interval_seconds
    return [
        f"{setting}: a round may take {longest:g} s (the timeouts of its checks, bounded by round_timeout_seconds "
        f"{settings.round_timeout_seconds:g} and its last check), longer than {interval:g} s: rounds then come late"
        for setting, interval in intervals.items()
        if longest > interval
    ]
