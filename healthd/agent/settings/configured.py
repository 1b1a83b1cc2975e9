"""Settings and checks as a single value, which a reload replaces."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping

from msgspec import Struct

from healthd.agent.settings.config import CheckConfig, Loaded, Settings
from healthd.agent.settings.registry import Check
from healthd.common.model import Program, RunName


class Configured(Struct, frozen=True, dict=True):
    """Settings and checks. `checks` contains all checks by name, and `loaded` the enabled ones with their settings."""

    loaded: Loaded
    checks: Mapping[str, Check]

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def runs(self) -> Mapping[RunName, CheckConfig]:
        """The Config of every enabled run."""
        return self.loaded.checks

    def check(self, run: RunName) -> Check:
        return self.checks[run.check]

    @property
    def event_checks(self) -> list[tuple[Check, CheckConfig]]:
        """Checks that evaluate kernel events."""
        every = ((self.checks[name.check], config) for name, config in self.runs.items() if not name.instance)
        return [(check, config) for check, config in every if check.reads_kernel_log]

    @functools.cached_property
    def not_needed_for_resume(self) -> frozenset[RunName]:
        """Runs whose failure does not delay a resume."""
        return frozenset(name for name, config in self.runs.items() if not self.check(name).may_block_resume(config))

    @functools.cached_property
    def before_resume(self) -> dict[RunName, Program]:
        """Programs to run before a drained node is resumed."""
        programs = ((name, self.check(name).declares.before_resume(config)) for name, config in self.runs.items())
        return {name: program for name, program in programs if program is not None}

    @functools.cached_property
    def after_repair(self) -> dict[RunName, Program]:
        """Programs to run after a step of a repair, before the node is resumed."""
        programs = ((name, self.check(name).declares.after_repair(config)) for name, config in self.runs.items())
        return self.before_resume or {name: program for name, program in programs if program is not None}

    @functools.cached_property
    def after_job(self) -> list[Program]:
        """Programs that Slurm's epilog runs after the last job on a node."""
        programs = (self.check(name).declares.after_job(config) for name, config in self.runs.items())
        return [program for program in programs if program is not None]

    @functools.cached_property
    def meanings(self) -> dict[str, str]:
        """Description of each observation's value, for all enabled checks."""
        return {name: text for run in self.runs for name, text in self.check(run).meanings.items()}

    def versions(self, healthd_version: str) -> dict[RunName, tuple[str, str]]:
        """Return a dict that maps each run to its check's version and a checksum of its settings."""
        return {
            name: (
                self.check(name).version or healthd_version,
                f"{zlib.crc32(json.dumps(self.loaded.tables[name], sort_keys=True, default=str).encode()):08x}",
            )
            for name in self.runs
        }

    @property
    def idle_runs(self) -> set[RunName]:
        """Runs that take place only on a node without jobs."""
        return {name for name in self.runs if self.checks[name.check].when}
