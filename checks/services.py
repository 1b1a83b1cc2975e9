"""Whether required systemd services are active.

Rules: no job runs without slurmd, munge or, on machines with NVLink switches, nvidia-fabricmanager. Meta's study
includes services, and NHC's health checks begin with them. Only units named in the settings are checked. Units that
only a profile names are checked if they are installed. A unit that is changing its state is only a warning, even for a
long time, because systemd itself limits that time. Such a unit has a systemd job, or is starting, stopping or
reloading, for example during a restart or a boot. A unit that waits for a restart after a failure (auto-restart) is not
active. A unit that fails and restarts repeatedly is a warning even while it is up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    Seconds,
    Severity,
    SmallCount,
    is_decimal,
    regex,
)

USES = ""
BASELINE = Baseline(("required", "wanted"), place=70)

UNIT = regex(r"[A-Za-z0-9:_.\\@-]+")
PROPERTIES = ("Id", "ActiveState", "SubState", "LoadState", "Result")
OPTIONAL_PROPERTIES = (
    "Job",
    "NRestarts",
)  # a waiting job, and the number of restarts (only for services, since systemd 235)
ACTIVE = ("active", "reloading", "refreshing")
CHANGING = ("activating", "deactivating", "maintenance")
STOPPED = ("inactive", "failed")


class Config(CheckSettings, frozen=True):
    """required           units that must be active, or the node is degraded: ["slurmd", "munge"]
    wanted             units that should be active; inactive ones only warn
    confirm_seconds    a unit must be inactive for this long before it is reported
    restarts_per_hour  warn at more automatic restarts of one unit than this within an hour
    """

    required: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    confirm_seconds: Seconds = 60.0
    restarts_per_hour: SmallCount = 3


def validate(config: Config) -> str | None:
    for setting, units in (("required", config.required), ("wanted", config.wanted)):
        for unit in units:
            if not UNIT.fullmatch(unit) or unit.startswith("-") or unit.partition(".")[0].endswith("@"):
                return f'{setting}: "{unit}" is not a unit name like "slurmd" or "data.mount"'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    units = list(dict.fromkeys([*config.required, *config.wanted]))
    if not units:
        yield NOT_IN_BASELINE
        return
    seconds = config.timeout_seconds * 0.8
    result = host.run(("systemctl", "show", "-p", ",".join((*PROPERTIES, *OPTIONAL_PROPERTIES)), *units), seconds)
    if result is None and all(_only_guessed(unit, config) for unit in units):
        yield NothingToCheck("no systemd")  # a container, or a file tree for which only a profile expects units
        return
    if result is None:
        raise RuntimeError("cannot query the units in required and wanted: systemctl is missing")
    if result.status != 0:
        raise RuntimeError(f"systemctl: exit status {result.status}: {(result.stderr or result.stdout).strip()[:200]}")
    for unit, properties in zip(units, parse(result.stdout, units), strict=True):
        if properties["LoadState"] == "not-found" and _only_guessed(unit, config):
            continue  # this site does not use the unit, for example munge with auth/slurm
        yield from _judge(unit, properties, unit in config.required, config, past)


def _only_guessed(unit: str, config: Config) -> bool:
    """Return True if a machine type's profile names the unit and no settings file does."""
    settings = (("required", config.required), ("wanted", config.wanted))
    return all(setting in config.guessed for setting, units in settings if unit in units)


def parse(text: str, units: Sequence[str]) -> list[dict[str, str]]:
    """Return each unit's properties, in the order of `units`. systemctl prints an empty line between units.

    Raises ValueError for any other output.
    """
    blocks = [dict(line.partition("=")[::2] for line in block.split("\n")) for block in text.strip().split("\n\n")]
    if len(blocks) != len(units):
        raise ValueError(f"systemctl: {len(blocks)} units reported, {len(units)} requested: {text[:60]!r}")
    for unit, properties in zip(units, blocks, strict=True):
        missing = [name for name in PROPERTIES if not properties.get(name) and name != "Result"]
        if missing or properties["ActiveState"] not in (*ACTIVE, *CHANGING, *STOPPED):
            raise ValueError(
                f"systemctl: no state of {unit}: {' '.join(f'{k}={v}' for k, v in properties.items())[:100]!r}"
            )
    return blocks


def _judge(
    unit: str, properties: Mapping[str, str], required: bool, config: Config, past: History
) -> Iterator[Finding | Observation]:
    active, sub = properties["ActiveState"], properties["SubState"]
    labels = (("unit", unit),)
    yield Observation("service_active", int(active in ACTIVE), labels=labels)
    if is_decimal(properties.get("NRestarts", "")):
        reading = Observation("service_restarts_total", int(properties["NRestarts"]), ObservationKind.COUNTER, labels)
        yield reading
        restarts = past.growth(reading, 3600.0) or 0.0
        if restarts > config.restarts_per_hour:
            message = f"systemd restarted {unit} {restarts:.0f} times within an hour (it is {active}, {sub})"
            yield _finding(Severity.WARNING, "services/restarting", unit, message, required, config)
    if active in ACTIVE:
        return
    if not sub.startswith("auto-restart") and (properties.get("Job") or active in CHANGING):
        message = f"{unit} is {active} ({sub}) and changing its state"
        yield _finding(Severity.WARNING, "services/changing", unit, message, required, config)
    elif required:
        yield _finding(Severity.DEGRADED, "services/inactive", unit, _state_text(unit, properties), required, config)
    else:
        yield _finding(
            Severity.WARNING, "services/wanted_inactive", unit, _state_text(unit, properties), required, config
        )


def _state_text(unit: str, properties: Mapping[str, str]) -> str:
    if properties["LoadState"] != "loaded":
        return f"{unit} is not active: {properties['LoadState']}"
    result_text = f", {properties['Result']}" if properties.get("Result", "success") not in ("", "success") else ""
    return f"{unit} is {properties['ActiveState']} ({properties['SubState']}{result_text})"


def _finding(severity: Severity, code: str, unit: str, message: str, required: bool, config: Config) -> Finding:
    return Finding(
        severity,
        code,
        unit,
        message,
        confirm_seconds=config.confirm_seconds,
        shared_cause=True,
        expects="required" if required else "wanted",
    )


REQUIRED_UNITS = ("slurmd.service", "munge.service", "nvidia-fabricmanager.service")
WANTED_UNITS = ("nvidia-persistenced.service",)
SYSTEMCTL_SECONDS = 8.0  # less than the worker's deadline


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    """Yield the active units that are usual on GPU nodes or are named in the settings or a profile."""
    named = {"required": config.required, "wanted": config.wanted}
    usual = {"required": REQUIRED_UNITS, "wanted": WANTED_UNITS}
    settings_by_unit = {
        _unit(unit): setting for group in (usual, named) for setting in group for unit in group[setting]
    }
    result = host.run(
        ("systemctl", "show", "-p", ",".join((*PROPERTIES, *OPTIONAL_PROPERTIES)), *settings_by_unit), SYSTEMCTL_SECONDS
    )
    if result is None:
        return
    if result.status != 0:
        raise RuntimeError(f"systemctl: exit status {result.status}: {result.stderr.strip()[:200]}")
    named_units = {_unit(unit) for units in named.values() for unit in units}
    for unit, properties in zip(settings_by_unit, parse(result.stdout, [*settings_by_unit]), strict=True):
        if properties["ActiveState"] in ACTIVE:
            yield Entry("services", settings_by_unit[unit], key=unit)
        elif properties["LoadState"] == "loaded" or unit in named_units:
            state = properties["ActiveState"] if properties["LoadState"] == "loaded" else properties["LoadState"]
            yield LeftOut("services", f"is {state}", settings_by_unit[unit], unit)


def _unit(name: str) -> str:
    return name if "." in name else f"{name}.service"


_TODO = (
    "Run systemctl status UNIT and journalctl -u UNIT -b. If the unit does not belong on this node, correct the "
    "settings."
)

OBSERVATIONS = {
    "service_active": Meaning("1 if the systemd unit is active, else 0.", ("unit",)),
    "service_restarts_total": Meaning("Number of automatic restarts of the unit by systemd (NRestarts).", ("unit",)),
}

EXPLAIN = {
    "services/inactive": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A required unit is not active. It failed, was stopped or masked, or is not installed.",
        "Without slurmd or munge, jobs cannot start or end. Without nvidia-fabricmanager, no CUDA program runs on "
        "machines with NVLink switches.",
        _TODO,
        confirm="confirm_seconds",
        shared=True,
        expects="required",
    ),
    "services/wanted_inactive": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A unit listed in `wanted` is not active.",
        "There is no immediate effect, because the unit is not listed in `required`.",
        f"No action tonight. {_TODO}",
        confirm="confirm_seconds",
        shared=True,
        expects="wanted",
    ),
    "services/changing": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A unit has been starting, stopping or waiting for other units for longer than a restart usually takes.",
        "The unit does not work until it is up. systemd gives up after the unit's own time limit, and the unit then "
        "counts as inactive.",
        "No action tonight. systemctl list-jobs shows what the unit is waiting for. " + _TODO,
        confirm="confirm_seconds",
        shared=True,
    ),
    "services/restarting": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A unit failed and systemd restarted it many times within an hour. Manual restarts do not count.",
        "The unit does not work between two starts, so jobs sometimes fail to start or to authenticate.",
        f"No action tonight. {_TODO}",
        confirm="confirm_seconds",
        shared=True,
        expects="required",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.SERVICES)
ENDS_JOB = {
    "services/inactive": EndsJob.ALWAYS,
    "services/wanted_inactive": EndsJob.NEVER,
    "services/changing": EndsJob.NEVER,
}
