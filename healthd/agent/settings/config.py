"""The settings as msgspec Structs, with their defaults and allowed values, and the files that contain them.

The file is /etc/healthd/healthd.toml; conf/healthd.toml lists every setting at its default. agent/settings/effective.py
makes the effective settings of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import field

from healthd.agent.settings.limits import (
    KERNEL_LOGS,
    AbsolutePath,
    AbsolutePathOrNone,
    Address,
    Addresses,
    ClusterName,
    Few,
    FileOrName,
    KernelLog,
    LinePattern,
    NodeName,
    Nodes,
    PatternNames,
    Percent,
    Times,
    no_absolute_path,
    no_address,
)
from healthd.agent.settings.limits import Period as Period  # checks declare their periods with it
from healthd.agent.settings.limits import Seconds as Seconds
from healthd.common.codec import ConvertError, Rule, load, show
from healthd.common.errors import HealthdError
from healthd.common.model import Explain, Mode, Requeue, RunName, Severity
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.values import Value


class ConfigError(HealthdError):
    """One sentence for the person who wrote the file: file, setting, what is wrong."""


class CheckConfig(Value, frozen=True):
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
    clear_after: Times = 2
    enforce: bool = True
    severity: dict[str, Severity] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()


def only_warns(config: CheckConfig, expects: str) -> bool:
    """Whether these settings cap at WARNING what compares with the setting `expects` ("" = with none)."""
    return not config.enforce or expects in config.guessed or "name" in config.guessed


def severity_with(explain: Explain, config: CheckConfig) -> Severity:
    """The worst that the check makes of such a code under these settings, before the site overrides or caps it."""
    chosen = getattr(config, explain.chosen_by, None)
    return chosen if isinstance(chosen, Severity) else explain.severity


class NvmlConfig(Value, frozen=True):
    """fake: a profile or a scenario file instead of the driver. idle_interval_seconds: the time between rounds of GPU
    checks while nobody else holds the driver (opening it costs seconds a GPU, closing it wipes volatile ECC counts).
    """

    fake: FileOrName = ""
    idle_interval_seconds: Seconds = 3600.0


class KernelPattern(Value, frozen=True):
    """A line of the kernel that means something at this site. pattern: plain text, "*" = any text, from the beginning
    of the message on (agent/kernel_log/rules/site.py)."""

    pattern: LinePattern
    severity: Severity = Severity.WARNING


def _too_severe(pattern: KernelPattern) -> str:
    """A pattern without a fixed beginning also matches a user's text in the middle of a message (audit lines)."""
    if pattern.severity < Severity.DEGRADED or not pattern.pattern.startswith("*"):
        return ""
    return (
        'severity: must be "info" or "warning" for a pattern that begins with "*", which also matches text of users, '
        f'got "{pattern.severity.name.lower()}"'
    )


class KernelLogConfig(Value, frozen=True):
    """source: kmsg, journal, off, or the path of a file or fifo to follow. accept_injected: root's own lines count
    (drills). trust_file: what a followed file says may drain, though users can forge its lines. patterns: lines of the
    site's own, by name, for what no built-in rule reads."""

    source: KernelLog = "kmsg"
    accept_injected: bool = False
    trust_file: bool = False
    patterns: Annotated[dict[str, Annotated[KernelPattern, Rule(_too_severe)]], PatternNames] = field(
        default_factory=dict
    )


class SlurmConfig(Value, frozen=True):
    """command_timeout_seconds: a Slurm command's own deadline. requeue_retry_seconds: how long an unconfirmed requeue
    may still be under way. max_restarts: a job that was restarted so often is held when it is requeued. admin_comment:
    whether a job that a CRITICAL fault hit is told so in its AdminComment. requeue: which jobs such a fault requeues:
    those that the broken part serves, or all on the node. own_faults_per_hour, shared_wait_seconds,
    shared_max_wait_seconds: what a fault that comes and goes meets (agent/slurm/flapping.py)."""

    command_timeout_seconds: Period = 30.0
    requeue_retry_seconds: Seconds = 90.0
    max_restarts: Few = 5
    admin_comment: bool = True
    own_faults_per_hour: Few = 3
    shared_wait_seconds: Seconds = 600.0
    shared_max_wait_seconds: Seconds = 4 * 3600.0
    requeue: Requeue = Requeue.PART


class FleetLimits(Value, frozen=True):
    """How many nodes of a partition healthd may hold drained: a percentage of them, but at least a given number.

    limit_*         for causes that nodes share
    own_hardware_*  for a fault of the node itself
    jitter_seconds  the longest first wait for a shared cause; in a small partition it is shorter (fleet_limit.py)
    uncounted_drain_after_seconds  if the drained nodes cannot be counted for so long, and for a random time of up to as
                    long again, a CRITICAL fault of the node's own hardware drains without a count and without a requeue
    """

    limit_percent: Percent = 10.0
    limit_min_nodes: Nodes = 2
    own_hardware_limit_percent: Percent = 30.0
    own_hardware_limit_min_nodes: Nodes = 5
    jitter_seconds: Seconds = 1800.0
    uncounted_drain_after_seconds: Seconds = 900.0


class MetricsConfig(Value, frozen=True):
    """listen: ADDRESS:PORT, several of them, or "off". textfile: a *.prom file for node_exporter's textfile collector;
    "" = none. web_config: a web configuration file of Prometheus' format (TLS); "" = plain HTTP."""

    listen: Address | Addresses = "127.0.0.1:9478"
    textfile: AbsolutePathOrNone = ""
    web_config: AbsolutePathOrNone = ""


class Settings(Value, frozen=True):
    """cluster: "" = as Slurm's settings call it. profile: "auto", "none", a name of conf/profiles or a path.
    baseline_file: "" = none."""

    mode: Mode = Mode.OBSERVE
    node_name: NodeName = ""
    cluster: ClusterName = ""
    interval_seconds: Period = 300.0
    round_timeout_seconds: Period = 120.0
    root: AbsolutePath = "/"
    state_dir: AbsolutePath = STATE_DIR
    runtime_dir: AbsolutePath = RUNTIME_DIR
    checks_dir: AbsolutePath = "/etc/healthd/checks.d"
    profile: FileOrName = "auto"
    baseline_file: AbsolutePathOrNone = "/etc/healthd/baseline.toml"
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    slurm: SlurmConfig = SlurmConfig()
    fleet: FleetLimits = FleetLimits()
    metrics: MetricsConfig = MetricsConfig()


class Layer(NamedTuple):
    """The [checks.*] of one source. `guessed`: it says what such machines usually have, not what this one has."""

    source: str
    checks: Any
    guessed: bool = False


Below = Callable[[Settings], Sequence[Layer]]


class Loaded(Value, frozen=True):
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


def only_observes_kernel_log(loaded: Loaded) -> bool:
    """Whether what the kernel log says is shown and decides nothing: it is followed in a file, where a line break in a
    user's text begins a line of its own. A path that was given as a flag is a drill or a test."""
    kernel_log = loaded.settings.kernel_log
    proven = kernel_log.source in KERNEL_LOGS or kernel_log.trust_file
    return not (proven or loaded.origins.get("kernel_log.source", "").startswith("--"))


def directory(table: Mapping[str, Any], source: str, name: str) -> str:
    """`runtime_dir` or `state_dir` of a daemon with these settings; other errors in them do not matter here."""
    found = table.get(name, getattr(Settings(), name))
    if not isinstance(found, str):
        raise ConfigError(f"{source}: {name}: must be text, got {show(found)}")
    return found


def kernel_log_of(table: Mapping[str, Any], source: str) -> KernelLogConfig:
    """[kernel_log] of a settings file, whatever else is in it. Raises ConfigError."""
    try:
        return load(KernelLogConfig, table.get("kernel_log", {}), "kernel_log")
    except ConvertError as error:
        raise ConfigError(f"{source}: {error}") from None


def checks_dir(table: Mapping[str, Any]) -> str:
    """The directory of the site's checks, needed before the table can be judged; "" if that setting is wrong."""
    found = table.get("checks_dir", Settings().checks_dir)
    return found if isinstance(found, str) and not no_absolute_path(found) else ""


def listen_addresses(listen: str | tuple[str, ...], where: str) -> list[tuple[str, int]]:
    """[("127.0.0.1", 9478)] for "127.0.0.1:9478", [("::1", 9478)] for "[::1]:9478"; none for "off"."""
    found = []
    for text in (listen,) if isinstance(listen, str) else listen:
        if problem := no_address(text):
            raise ConvertError(f"{where}: {problem}")
        address, _, port = text.rpartition(":")
        found += [(address.strip("[]"), int(port))] if address else []
    return found
