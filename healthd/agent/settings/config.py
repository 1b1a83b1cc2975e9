"""Settings as msgspec Structs, with their defaults and allowed values.

The file is /etc/healthd/healthd.toml; conf/healthd.toml lists all settings with defaults. agent/settings/effective.py
computes the effective settings.
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
    FileOrName,
    KernelLog,
    LinePattern,
    MaxConcurrent,
    Mib,
    NodeName,
    Nodes,
    PatternNames,
    Percent,
    ProgramOrNone,
    RepairFirstSteps,
    RepairOrder,
    Retries,
    SmallCount,
    Times,
    absolute_path_problem,
    address_problem,
)
from healthd.agent.settings.limits import Period as Period  # checks use it to declare their periods
from healthd.agent.settings.limits import Seconds as Seconds
from healthd.common.codec import ConvertError, Rule, load, show
from healthd.common.errors import HealthdError
from healthd.common.model import Explain, Mode, RepairMode, RepairStep, Requeue, RunName, Severity
from healthd.common.paths import RUNTIME_DIR, STATE_DIR
from healthd.common.values import Value


class ConfigError(HealthdError):
    """An error in the settings. The message is one sentence with the file, the setting and the problem."""


HOOKS = ("on_drain", "on_resume", "on_repair", "on_repair_failed")


class CheckConfig(Value, frozen=True):
    """The settings that all checks have, in the check's table [checks.NAME].

    name              the instance ("/data" in [checks.mount."/data"]), set by the table's name
    interval_seconds  interval between runs; None for the daemon's interval
    clear_after       number of completed runs in a row without the finding that clear a condition of type PASS
    enforce           false caps every finding of the check at WARNING
    severity          overrides the severity of a code: {"gpu_ecc/disabled": "info"}
    guessed           the settings that come from a profile of the machine's type, not from a person ("name": the whole
                      instance is from the profile); set when settings are read
    """

    name: str = ""
    enabled: bool = True
    interval_seconds: Period | None = None
    timeout_seconds: Period = 10.0
    clear_after: Times = 2
    enforce: bool = True
    severity: dict[str, Severity] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()


def is_capped(config: CheckConfig, expects: str) -> bool:
    """Return True if these settings cap findings that are based on the setting `expects` at WARNING.

    `expects` is "" for findings that are not based on a setting.
    """
    return not config.enforce or expects in config.guessed or "name" in config.guessed


def configured_severity(explain: Explain, config: CheckConfig) -> Severity:
    """Return the code's worst severity under these settings, before the site's overrides or caps."""
    chosen = getattr(config, explain.chosen_by, None)
    return chosen if isinstance(chosen, Severity) else explain.severity


class NvmlConfig(Value, frozen=True):
    """Settings for NVML.

    `fake` is a profile or scenario file to use instead of the driver. `idle_interval_seconds` is the time between
    rounds of GPU checks while no other process has the driver open. Opening the driver takes seconds per GPU, and
    closing it resets volatile ECC counts. `events` also receives GPU events from NVML while a job uses a GPU.
    """

    fake: FileOrName = ""
    idle_interval_seconds: Seconds = 3600.0
    events: bool = False


class KernelPattern(Value, frozen=True):
    """A kernel line that is important at this site.

    `pattern` is plain text in which "*" matches any text. The pattern must match from the beginning of the message
    (agent/kernel_log/rules/site.py).
    """

    pattern: LinePattern
    severity: Severity = Severity.WARNING


def _too_severe(pattern: KernelPattern) -> str:
    """Return the reason why this severity is not allowed for a pattern without a fixed beginning, or "". Such a pattern
    also matches user text inside a message (audit lines).
    """
    if pattern.severity < Severity.DEGRADED or not pattern.pattern.startswith("*"):
        return ""
    return (
        'severity: must be "info" or "warning" for a pattern that begins with "*", because it also matches user text, '
        f'got "{pattern.severity.name.lower()}"'
    )


class KernelLogConfig(Value, frozen=True):
    """Settings for the kernel log.

    `source` is kmsg, journal, off, or the path of a file or FIFO to follow. With `accept_injected`, lines that root
    wrote are accepted (drills). With `trust_file`, lines in a followed file may drain, although users can forge them.
    `patterns` are the site's own lines by name. The patterns apply to lines that no built-in rule matches.
    """

    source: KernelLog = "kmsg"
    accept_injected: bool = False
    trust_file: bool = False
    patterns: Annotated[dict[str, Annotated[KernelPattern, Rule(_too_severe)]], PatternNames] = field(
        default_factory=dict
    )


class SlurmConfig(Value, frozen=True):
    """Settings for Slurm.

    `command_timeout_seconds` is the deadline for a Slurm command. `requeue_retry_seconds` is the time for which an
    unconfirmed requeue may still be in flight. A job that was restarted `max_restarts` times is requeued in the held
    state. With `admin_comment`, a CRITICAL fault is written into the AdminComment of the jobs that it hit. `requeue`
    selects the jobs that such a fault requeues: those on the broken part, or all on the node. `own_faults_per_hour`,
    `shared_wait_seconds` and `shared_max_wait_seconds` are limits for intermittent faults (agent/slurm/flapping.py).
    """

    command_timeout_seconds: Period = 30.0
    requeue_retry_seconds: Seconds = 90.0
    max_restarts: SmallCount = 5
    admin_comment: bool = True
    own_faults_per_hour: SmallCount = 3
    shared_wait_seconds: Seconds = 600.0
    shared_max_wait_seconds: Seconds = 4 * 3600.0
    requeue: Requeue = Requeue.PART


class FleetLimits(Value, frozen=True):
    """Limits on the nodes of a partition that healthd may keep drained: a percentage, but at least a given number.

    limit_*         for causes that several nodes share
    own_hardware_*  for a fault of the node itself
    domain_limit_nodes  for any cause: nodes of one NVLink domain that spans several nodes (GB200 and GB300 NVL72)
    jitter_seconds  longest first wait for a shared cause, which is shorter in a small partition (fleet_limit.py)
    uncounted_drain_after_seconds  how long the drained nodes must be uncountable before a CRITICAL fault of the node's
                                   own hardware drains without a count and without a requeue. A random time of at most
                                   the same length is added
    """

    limit_percent: Percent = 10.0
    limit_min_nodes: Nodes = 2
    own_hardware_limit_percent: Percent = 30.0
    own_hardware_limit_min_nodes: Nodes = 5
    domain_limit_nodes: Nodes = 2
    jitter_seconds: Seconds = 1800.0
    uncounted_drain_after_seconds: Seconds = 900.0


class RepairConfig(Value, frozen=True):
    """Settings for the repair of a drained node.

    `order` lists the steps that this site allows. `first_step` replaces a code's first step. A power cycle cannot be
    one, because it only follows a failed reboot (agent/repair/ladder.py). `stop_services` are the services that may use
    the GPUs on a node without jobs; a reset stops them. At most `max_concurrent` nodes of the cluster are repaired at
    the same time: a number, or a percentage ("2%"). A reset may take `reset_timeout_seconds`, a boot
    `boot_timeout_seconds`, and the checks and the validation after a step `verify_timeout_seconds`.
    `power_cycle_command` switches the machine off and on. `bmc_command` prints the board serial number in the BMC that
    this command uses (`ipmitool fru print 0`).
    """

    mode: RepairMode = RepairMode.OFF
    order: RepairOrder = (RepairStep.GPU_RESET, RepairStep.REBOOT)
    first_step: RepairFirstSteps = field(default_factory=dict)
    stop_services: tuple[str, ...] = (
        "nvidia-persistenced",
        "nvidia-fabricmanager",
        "nvidia-dcgm",
        "dcgm-exporter",
        "nvsm",
    )
    max_concurrent: MaxConcurrent = 1
    reset_timeout_seconds: Period = 300.0
    boot_timeout_seconds: Period = 3600.0
    verify_timeout_seconds: Period = 1800.0
    power_cycle_command: ProgramOrNone = ()
    bmc_command: ProgramOrNone = ("/usr/bin/ipmitool", "fru", "print", "0")


class MetricsConfig(Value, frozen=True):
    """Settings for the metrics.

    `listen` is one ADDRESS:PORT, a list of them, or "off". `textfile` is a *.prom file for node_exporter's textfile
    collector, or "". `web_config` is a web configuration file in Prometheus' format (TLS), or "" for plain HTTP.
    """

    listen: Address | Addresses = "127.0.0.1:9478"
    textfile: AbsolutePathOrNone = ""
    web_config: AbsolutePathOrNone = ""


class HooksConfig(Value, frozen=True):
    """Settings for hooks, which are programs that run after an event.

    `on_*` is an absolute path with arguments, or empty. Each program gets the event as JSON on standard input. A run
    that takes longer than `timeout_seconds` is killed. A failed run is repeated up to `retries` times.
    """

    on_drain: ProgramOrNone = ()
    on_resume: ProgramOrNone = ()
    on_repair: ProgramOrNone = ()
    on_repair_failed: ProgramOrNone = ()
    timeout_seconds: Period = 30.0
    retries: Retries = 3

    @property
    def programs(self) -> dict[str, tuple[str, ...]]:
        """The configured programs by hook."""
        return {name: argv for name in HOOKS if (argv := getattr(self, name))}


class EvidenceConfig(Value, frozen=True):
    """Settings for evidence (docs/evidence.md).

    `bug_report` runs nvidia-bug-report.sh on the idle node, for at most `timeout_seconds`. The journal is saved from
    `journal_before_seconds` before the first fault. `max_files`, `max_mib` and `max_days` limit what is kept.
    """

    enabled: bool = True
    bug_report: bool = True
    timeout_seconds: Period = 900.0
    journal_before_seconds: Seconds = 3600.0
    max_files: Times = 20
    max_mib: Mib = 512
    max_days: Times = 90


class Settings(Value, frozen=True):
    """All settings outside [checks].

    If `cluster` is "", ClusterName in slurm.conf is used. `profile` is "auto", "none", a name in conf/profiles or a
    path. `baseline_file` is "" for no baseline.
    """

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
    repair: RepairConfig = RepairConfig()
    metrics: MetricsConfig = MetricsConfig()
    hooks: HooksConfig = HooksConfig()
    evidence: EvidenceConfig = EvidenceConfig()


class Layer(NamedTuple):
    """[checks.*] from one source. `guessed` is True if it describes typical machines of this type, not this node."""

    source: str
    checks: Any
    guessed: bool = False


LayerLoader = Callable[[Settings], Sequence[Layer]]


class Loaded(Value, frozen=True):
    """Settings and their sources.

    `origins` maps a setting ("kernel_log.source" or 'checks.mount."/data".fstype') to its file, flag or profile.
    Defaults are not listed. `checks` contains the Configs of the enabled checks, `tables` their plain tables for the
    worker, and `disabled` the Configs of the other checks. `profile` is the source of the guessed settings, or "".
    """

    settings: Settings
    checks: dict[RunName, CheckConfig]
    tables: dict[RunName, dict[str, Any]]
    origins: dict[str, str]
    disabled: dict[RunName, CheckConfig] = field(default_factory=dict)
    profile: str = ""


def is_kernel_log_forgeable(loaded: Loaded) -> bool:
    """Return True if kernel log lines are displayed but have no effect, because users can forge them.

    This applies to a followed file, where a line break in a user's text begins a new line. A path given as a flag
    belongs to a drill or a test and is trusted.
    """
    kernel_log = loaded.settings.kernel_log
    is_trusted = kernel_log.source in KERNEL_LOGS or kernel_log.trust_file
    return not (is_trusted or loaded.origins.get("kernel_log.source", "").startswith("--"))


def read_directory(table: Mapping[str, Any], source: str, name: str) -> str:
    """Return `runtime_dir` or `state_dir` for a daemon with these settings. Ignore errors in the other settings."""
    found = table.get(name, getattr(Settings(), name))
    if not isinstance(found, str):
        raise ConfigError(f"{source}: {name}: must be text, got {show(found)}")
    return found


def kernel_log_config(table: Mapping[str, Any], source: str) -> KernelLogConfig:
    """Return [kernel_log] from a settings file, ignoring the rest of the file. Raises ConfigError."""
    try:
        return load(KernelLogConfig, table.get("kernel_log", {}), "kernel_log")
    except ConvertError as error:
        raise ConfigError(f"{source}: {error}") from None


def checks_dir(table: Mapping[str, Any]) -> str:
    """Return the directory of the site's checks, which is needed to validate the table.

    Return "" if that setting is invalid.
    """
    found = table.get("checks_dir", Settings().checks_dir)
    return found if isinstance(found, str) and not absolute_path_problem(found) else ""


def listen_addresses(listen: str | tuple[str, ...], where: str) -> list[tuple[str, int]]:
    """Return [("127.0.0.1", 9478)] for "127.0.0.1:9478", [("::1", 9478)] for "[::1]:9478", and [] for "off"."""
    found = []
    for text in (listen,) if isinstance(listen, str) else listen:
        if problem := address_problem(text):
            raise ConvertError(f"{where}: {problem}")
        address, _, port = text.rpartition(":")
        found += [(address.strip("[]"), int(port))] if address else []
    return found
