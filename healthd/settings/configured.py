"""The settings together with the checks that they are for: one value, which a reload replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from healthd.config import CheckConfig, Loaded, Settings
from healthd.model import RunName
from healthd.settings.registry import Check


@dataclass(frozen=True, slots=True)
class Configured:
    """`checks`: all that were found, by name; `loaded` says which of them run, and how."""

    loaded: Loaded
    checks: Mapping[str, Check]

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def runs(self) -> Mapping[RunName, CheckConfig]:
        """The Config of every run that is enabled."""
        return self.loaded.checks

    def check(self, run: RunName) -> Check:
        return self.checks[run.check]

    @property
    def listeners(self) -> list[tuple[Check, CheckConfig]]:
        """The checks that judge kernel events."""
        every = ((self.checks[name.check], config) for name, config in self.runs.items() if not name.instance)
        return [(check, config) for check, config in every if check.listens]

    @property
    def only_when_idle(self) -> set[RunName]:
        """The runs that look only while no job is on this node."""
        return {name for name in self.runs if self.checks[name.check].when}
