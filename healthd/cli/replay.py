"""Conversion of a round to its recording, and of a recording to a round with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from msgspec.structs import replace

import healthd
from healthd.agent.kernel_log.source import RawLine
from healthd.agent.recording.recording import KernelLine, Notes, Recording, RecordingError, Run, pack, unpack
from healthd.agent.scheduler.one_round import KernelLog, Look
from healthd.agent.settings import layers
from healthd.agent.settings.config import CheckConfig, Layer, Loaded, Settings
from healthd.agent.settings.effective import place_of
from healthd.agent.settings.registry import Check
from healthd.common.codec import ConvertError, dump, fields_of, load
from healthd.common.model import CheckResult, Outcome, RunName
from healthd.host.host import Host


def record(loaded: Loaded, found: Look, notes: Mapping[RunName, Notes]) -> Recording:
    """Return the recording of a round. `notes`: the queries of each run."""
    settings = loaded.settings
    log = found.kernel_log
    return Recording(
        healthd=healthd.__version__,
        node=found.node_name,
        time=found.time,
        kernel=Host(settings.root).read("/proc/sys/kernel/osrelease") or "",
        boot_id=found.boot_id,
        root=settings.root,
        fake_nvml=bool(settings.nvml.fake),
        checks=tuple((*name, _all_settings(config)) for name, config in loaded.checks.items()),
        runs=tuple(_with_notes(found.runs, notes)),
        kernel_lines=tuple(KernelLine(*line[:3]) for line in log) if isinstance(log, list) else None,
        kernel_error=pack(log) if isinstance(log, OSError) else None,
        baseline=tuple(_of_baseline(loaded)),
    )


def _of_baseline(loaded: Loaded) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (check, instance, the settings from the baseline)."""
    for (check, instance), config in loaded.checks.items():
        places = {f.name: place_of(check, instance, f.name) for f in fields_of(type(config))}
        names = [name for name, place in places.items() if loaded.origins.get(place) == loaded.settings.baseline_file]
        if names:
            yield check, instance, tuple(names)


def below(recording: Recording, settings: Settings, known: Mapping[str, Check]) -> list[Layer]:
    """Return the layers below the recorded node's settings: the values that a profile guessed, and its baseline.

    They are used below other settings too, unless these disable them or name another profile.
    """
    found = []
    if settings.profile == "auto":
        guessed = [(check, instance, table.get("guessed", ())) for check, instance, table in recording.checks]
        found.append(Layer("the profile in the recording", _tables(recording, guessed, known), guessed=True))
    else:
        found += layers.without_baseline(settings)
    if settings.baseline_file:
        found.append(Layer("the baseline in the recording", _tables(recording, recording.baseline, known)))
    return found


def _tables(
    recording: Recording, chosen: Iterable[tuple[str, str, Sequence[str]]], known: Mapping[str, Check]
) -> dict[str, Any]:
    """Return these settings of these runs, as in a settings file. Settings that this version does not have are
    omitted.
    """
    recorded = {(check, instance): table for check, instance, table in recording.checks}
    tables: dict[str, Any] = {}
    for check, instance, names in chosen:
        if check not in known or not names:
            continue
        own = {f.name for f in fields_of(known[check].config)} - {"name", "guessed"}
        values = {name: value for name, value in recorded[check, instance].items() if name in own and name in names}
        if instance:
            tables.setdefault(check, {})[instance] = values
        else:
            tables.setdefault(check, {}).update(values)
    return tables


def _all_settings(config: CheckConfig) -> dict[str, Any]:
    """Return all settings, also those at their default: another version may have other defaults."""
    return {f.name: dump(getattr(config, f.name)) for f in fields_of(type(config))}


def _with_notes(runs: Iterable[Run], notes: Mapping[RunName, Notes]) -> Iterator[Run]:
    """Yield runs with the queries in the first run of each name: those of another run with this name are equal."""
    left = dict(notes)
    for run in runs:
        noted = left.pop(run.name, Notes({}))
        yield replace(run, unanswered="" if run.answered else noted.unanswered, asked=noted.asked)


def told(recording: Recording) -> tuple[int, list[str]]:
    """Return the number of answers in a recording, and a sentence for each query in which a run hung or died."""
    silent = [
        f"{run.check} {run.instance}".rstrip() + f" had no answer to: {run.unanswered}"
        for run in recording.runs
        if run.unanswered
    ]
    return sum(len(answers) for run in recording.runs for answers in run.asked.values()), silent


def settings_of(recording: Recording, known: Mapping[str, Check]) -> tuple[Loaded, list[CheckResult]]:
    """Return the recorded settings, and a failed result for each check that cannot be replayed here."""
    checks: dict[RunName, CheckConfig] = {}
    lost = []
    for check, instance, table in recording.checks:
        name = RunName(check, instance)
        try:
            checks[name] = _config(check, instance, table, known)
        except ConvertError as error:
            run = recording.run_of(name)
            ended, seconds = (run.ended, run.seconds) if run else (recording.time, 0.0)
            lost.append(CheckResult(check, instance, Outcome.FAILED, ended - seconds, seconds, error=str(error)))
    tables = {name: {**dump(config), "name": name.instance} for name, config in checks.items()}
    return at_that_node(Loaded(Settings(), checks, tables, {}), recording), lost


def _config(check: str, instance: str, table: dict[str, Any], known: Mapping[str, Check]) -> CheckConfig:
    if check not in known:
        raise ConvertError(f'cannot be replayed: this version has no check "{check}"')
    config = load(known[check].config, {**table, "name": instance}, "its recorded settings")
    known[check].check_config(config, "its recorded settings")
    return config


def at_that_node(loaded: Loaded, recording: Recording) -> Loaded:
    """Return these settings for the node of the recording."""
    settings = replace(loaded.settings, node_name=recording.node, root=recording.root)
    return replace(loaded, settings=settings)


def kernel_log_of(recording: Recording) -> KernelLog | None:
    """Return a function that returns the recorded lines or raises the recorded OSError; None if no log was read.

    Raises RecordingError.
    """
    if recording.kernel_error is not None:
        error = unpack(recording.kernel_error)
        if not isinstance(error, OSError):
            raise RecordingError("the recording has an invalid error of the kernel log")
        return lambda: _raise(error)
    if recording.kernel_lines is None:
        return None
    lines = [RawLine(line.time, line.text, line.history) for line in recording.kernel_lines]
    return lambda: lines


def _raise(error: OSError) -> NoReturn:
    raise error
