"""Converts a round of checks into a recording, and a recording into the settings and answers that replay it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from msgspec.structs import replace

import healthd
from healthd.agent.kernel_log.source import RawLine
from healthd.agent.recording.recording import KernelLine, Notes, RecordedRun, Recording, RecordingError, pack, unpack
from healthd.agent.scheduler.one_round import KernelLogReader, RoundResult
from healthd.agent.settings import layers
from healthd.agent.settings.config import CheckConfig, Layer, Loaded, Settings
from healthd.agent.settings.effective import setting_path
from healthd.agent.settings.registry import Check
from healthd.common.codec import ConvertError, dump, fields_of, load
from healthd.common.model import CheckResult, Outcome, RunName
from healthd.host.host import Host


def record(loaded: Loaded, found: RoundResult, notes: Mapping[RunName, Notes]) -> Recording:
    """Return a recording of the round. `notes` contains the queries in each run."""
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
        baseline=tuple(_baseline_rows(loaded)),
    )


def _baseline_rows(loaded: Loaded) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (check, instance, names of the settings that come from the baseline)."""
    for (check, instance), config in loaded.checks.items():
        paths = {f.name: setting_path(check, instance, f.name) for f in fields_of(type(config))}
        names = [name for name, path in paths.items() if loaded.origins.get(path) == loaded.settings.baseline_file]
        if names:
            yield check, instance, tuple(names)


def lower_layers(recording: Recording, settings: Settings, available: Mapping[str, Check]) -> list[Layer]:
    """Return the layers below the recorded node's settings: values from a profile, and the node's baseline.

    With other settings (--config), the same layers are used, unless those settings disable them or name another
    profile.
    """
    found = []
    if settings.profile == "auto":
        guessed = [(check, instance, table.get("guessed", ())) for check, instance, table in recording.checks]
        found.append(Layer("the profile in the recording", _tables(recording, guessed, available), guessed=True))
    else:
        found += layers.layers_without_baseline(settings)
    if settings.baseline_file:
        found.append(Layer("the baseline in the recording", _tables(recording, recording.baseline, available)))
    return found


def _tables(
    recording: Recording, chosen: Iterable[tuple[str, str, Sequence[str]]], available: Mapping[str, Check]
) -> dict[str, Any]:
    """Return the named settings for the named runs, as in a settings file.

    Settings that this version lacks are omitted.
    """
    recorded = {(check, instance): table for check, instance, table in recording.checks}
    tables: dict[str, Any] = {}
    for check, instance, names in chosen:
        if check not in available or not names:
            continue
        own = {f.name for f in fields_of(available[check].config)} - {"name", "guessed"}
        values = {name: value for name, value in recorded[check, instance].items() if name in own and name in names}
        if instance:
            tables.setdefault(check, {})[instance] = values
        else:
            tables.setdefault(check, {}).update(values)
    return tables


def _all_settings(config: CheckConfig) -> dict[str, Any]:
    """Return all settings. Those at their defaults are included, because another version may have different
    defaults.
    """
    return {f.name: dump(getattr(config, f.name)) for f in fields_of(type(config))}


def _with_notes(runs: Iterable[RecordedRun], notes: Mapping[RunName, Notes]) -> Iterator[RecordedRun]:
    """Yield the runs. Only the first run with a given name gets the queries, because later runs repeat them."""
    remaining = dict(notes)
    for run in runs:
        noted = remaining.pop(run.name, Notes({}))
        yield replace(run, unanswered="" if run.answered else noted.unanswered, asked=noted.answers)


def count_answers(recording: Recording) -> tuple[int, list[str]]:
    """Return the number of answers in a recording, and a sentence for each query during which a run hung or died."""
    unanswered = [
        f"{run.check} {run.instance}".rstrip() + f" had no answer to: {run.unanswered}"
        for run in recording.runs
        if run.unanswered
    ]
    return sum(len(answers) for run in recording.runs for answers in run.asked.values()), unanswered


def recorded_settings(recording: Recording, available: Mapping[str, Check]) -> tuple[Loaded, list[CheckResult]]:
    """Return the recorded settings, and a failed result for each check that cannot be replayed here."""
    checks: dict[RunName, CheckConfig] = {}
    lost = []
    for check, instance, table in recording.checks:
        name = RunName(check, instance)
        try:
            checks[name] = _config(check, instance, table, available)
        except ConvertError as error:
            run = recording.find_run(name)
            ended, seconds = (run.ended, run.seconds) if run else (recording.time, 0.0)
            lost.append(CheckResult(check, instance, Outcome.FAILED, ended - seconds, seconds, error=str(error)))
    tables = {name: {**dump(config), "name": name.instance} for name, config in checks.items()}
    return at_that_node(Loaded(Settings(), checks, tables, {}), recording), lost


def _config(check: str, instance: str, table: dict[str, Any], available: Mapping[str, Check]) -> CheckConfig:
    if check not in available:
        raise ConvertError(f'cannot be replayed: this version has no check "{check}"')
    config = load(available[check].config, {**table, "name": instance}, "its recorded settings")
    available[check].check_config(config, "its recorded settings")
    return config


def at_that_node(loaded: Loaded, recording: Recording) -> Loaded:
    """Return these settings for the node in the recording."""
    settings = replace(loaded.settings, node_name=recording.node, root=recording.root)
    return replace(loaded, settings=settings)


def recorded_kernel_log(recording: Recording) -> KernelLogReader | None:
    """Return a function that returns the recorded lines or raises the recorded OSError, or None if no log was read.

    Raises RecordingError.
    """
    if recording.kernel_error is not None:
        error = unpack(recording.kernel_error)
        if not isinstance(error, OSError):
            raise RecordingError("the recording has an invalid kernel log error")
        return lambda: _raise(error)
    if recording.kernel_lines is None:
        return None
    lines = [RawLine(line.time, line.text, line.history) for line in recording.kernel_lines]
    return lambda: lines


def _raise(error: OSError) -> NoReturn:
    raise error
