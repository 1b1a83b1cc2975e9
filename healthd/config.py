"""The settings: TOML -> frozen dataclasses. A wrong key, type or unknown check stops the start with one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field

from healthd.model import Severity


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What every check can be told in its table [checks.NAME].

    name              the instance ("/data" in [checks.mount."/data"]), set by the table's name
    interval_seconds  None: the daemon's
    clear_after       completed runs in a row without the finding that end a condition which clears by PASS
    enforce           false caps everything the check finds at WARNING
    severity          another severity for one code: {"gpu_ecc/disabled": "info"}
    """

    name: str = ""
    enabled: bool = True
    interval_seconds: float | None = None
    timeout_seconds: float = 10.0
    clear_after: int = 2
    enforce: bool = True
    severity: dict[str, Severity] = field(default_factory=dict)
