"""The settings as frozen dataclasses, with their defaults and allowed values, and the files that hold them.

The file is /etc/healthd/healthd.toml; conf/healthd.toml lists every setting at its default. settings/settle.py makes
the effective settings of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from healthd import toml
from healthd.convert import ConvertError, show
from healthd.errors import HealthdError
from healthd.model import Mode, RunName, Severity
from healthd.plausible import (
    AbsolutePath,
    AbsolutePathOrNone,
    Address,
    Count,
    FileOrName,
    NodeName,
    Percent,
    at_least,
    no_absolute_path,
    no_address,
)
from healthd.plausible import Period as Period  # checks declare their periods with it
from healthd.plausible import Seconds as Seconds


class ConfigError(HealthdError):
    """One sentence for the person who wrote the file: file, setting, what is wrong."""


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What every check can be told in its table [checks.NAME].

    name              the instance ("/data" in [checks.mount."/data"]), set by the table's name
    interval_seconds  None: the daemon's
    clear_after       completed runs in a row without the finding that end a condition which clears by PASS
    enforce           false caps everything the check finds at WARNING
    severity          another severity for one code: {"gpu_ecc/disabled": "info"}
    guessed           the settings that a profile of the machine's type gave, not a person ("name": the profile gave
                      the whole instance); set when settings are read
    """

    name: str = ""
    enabled: bool = True
    interval_seconds: Period | None = None
    timeout_seconds: Period = 10.0
    clear_after: Annotated[int, at_least(1)] = 2
    enforce: bool = True
    severity: dict[str, Severity] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlConfig:
    """fake: a profile or a scenario file instead of the driver. unheld_interval_seconds: the time between rounds of GPU
    checks while nobody else holds the driver (opening it costs seconds a GPU, closing it wipes volatile ECC counts).
    """

    fake: FileOrName = ""
    unheld_interval_seconds: Seconds = 3600.0


@dataclass(frozen=True, slots=True)
class KernelLogConfig:
    """source: kmsg, journal, off, or a file or fifo to follow. accept_injected: root's own lines count (drills)."""

    source: FileOrName = "kmsg"
    accept_injected: bool = False


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """command_seconds: a Slurm command's own deadline. requeue_again_seconds: how long an unconfirmed requeue may still
    be under way. max_restarts: a job that was restarted so often is held when it is requeued. admin_comment: whether
    a job that a CRITICAL fault hit is told so in its AdminComment."""

    command_seconds: Period = 30.0
    requeue_again_seconds: Seconds = 90.0
    max_restarts: Count = 5
    admin_comment: bool = True


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """How many nodes of a partition healthd may hold drained: a percentage of them, but at least a given number.

    limit_*         for causes that nodes share
    own_hardware_*  for a fault of the node itself
    jitter_seconds  the longest first wait for a shared cause; in a small partition it is shorter (fleet_limit.py)
    """

    limit_percent: Percent = 10.0
    limit_at_least: Count = 2
    own_hardware_limit_percent: Percent = 30.0
    own_hardware_limit_at_least: Count = 5
    jitter_seconds: Seconds = 1800.0


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """listen: ADDRESS:PORT or "off". textfile: a *.prom file for node_exporter's textfile collector; "" = none."""

    listen: Address = "127.0.0.1:9478"
    textfile: FileOrName = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """profile: "auto", "none", a name of conf/profiles or a path. baseline_file: "" = none."""

    mode: Mode = Mode.OBSERVE
    node_name: NodeName = ""
    interval_seconds: Period = 300.0
    round_timeout_seconds: Period = 120.0
    root: AbsolutePath = "/"
    state_dir: AbsolutePath = "/var/lib/healthd"
    runtime_dir: AbsolutePath = "/run/healthd"
    checks_dir: AbsolutePath = "/etc/healthd/checks.d"
    profile: FileOrName = "auto"
    baseline_file: AbsolutePathOrNone = "/etc/healthd/baseline.toml"
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    slurm: SlurmConfig = SlurmConfig()
    fleet: FleetLimits = FleetLimits()
    metrics: MetricsConfig = MetricsConfig()


@dataclass(frozen=True, slots=True)
class Layer:
    """The [checks.*] of one source. `guessed`: it says what such machines usually have, not what this one has."""

    source: str
    checks: Any
    guessed: bool = False


Below = Callable[[Settings], Sequence[Layer]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where each came from: `origins` maps "kernel_log.source" and 'checks.mount."/data".fstype' to the
    file, flag or profile; absent: default.

    checks: the Configs of the enabled checks. tables: their plain tables, for the worker.
    disabled: the Configs of the other checks. profile: the source of the guessed settings, "" = none.
    """

    settings: Settings
    checks: dict[RunName, CheckConfig]
    tables: dict[RunName, dict[str, Any]]
    origins: dict[str, str]
    disabled: dict[RunName, CheckConfig] = field(default_factory=dict)
    profile: str = ""


def read_file(path: str, required: bool) -> dict[str, Any]:
    """The plain table of a TOML file; {} if there is no file and none is required."""
    try:
        with open(path, "rb") as file:
            return parse_toml(file.read(), path)
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: there is no such file") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_toml(text: str | bytes, source: str) -> dict[str, Any]:
    """Raises ConfigError with one sentence that names the source."""
    try:
        return toml.parse(text)
    except ConvertError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from None


def runtime_dir(table: Mapping[str, Any], source: str) -> str:
    """The directory of the socket of a daemon with these settings; other errors in them do not matter here."""
    found = table.get("runtime_dir", Settings().runtime_dir)
    if not isinstance(found, str):
        raise ConfigError(f"{source}: runtime_dir: must be text, is {show(found)}")
    return found


def checks_dir(table: Mapping[str, Any]) -> str:
    """The directory of the site's checks, needed before the table can be judged; "" if that setting is wrong."""
    found = table.get("checks_dir", Settings().checks_dir)
    return found if isinstance(found, str) and not no_absolute_path(found) else ""


def listen_address(text: str, where: str) -> tuple[str, int] | None:
    """("127.0.0.1", 9478) for "127.0.0.1:9478", ("::1", 9478) for "[::1]:9478"; None for "off"."""
    if problem := no_address(text):
        raise ConvertError(f"{where}: {problem}")
    address, _, port = text.rpartition(":")
    return (address.strip("[]"), int(port)) if address else None
