"""`healthd baseline`: write this node's hardware to a settings file that the checks enforce, and find later changes.

The worker reads the values one check at a time, each with a deadline. This module builds a file from the worker's
replies. All functions except `read_baseline` are pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthd.agent.scheduler.one_round import close_nvml, send_and_wait
from healthd.agent.settings.config import CheckConfig, Loaded
from healthd.agent.settings.registry import Check, baseline_checks
from healthd.agent.worker.client import Request, WorkerClient
from healthd.agent.worker.requests import BaselineAnswer, Run, RunAnswer, TakeBaseline
from healthd.common.codec import fields_of
from healthd.common.model import Entry, LeftOut, Outcome, RunName
from healthd.common.text import printable, strip_error_class

CHECK_SECONDS = 10.0
GPU_SECONDS = 120.0  # an idle driver takes seconds to open each GPU
INSTANCE_SECONDS = 5.0
INSTANCES_SECONDS = 60.0  # for all instances together, because many mounts hang if their file server is down
SIZE_TOLERANCE = 0.03  # relative tolerance for a size: the memory that a kernel reserves changes with each update
COLUMN = 40


@dataclass(frozen=True, slots=True)
class Present:
    """The node's hardware, and the parts that are left out."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


# --- reading


def read_baseline(loaded: Loaded, checks: Mapping[str, Check], client: WorkerClient) -> Present:
    """Read the values through the worker. The deadlines hold even if checks hang."""
    found: list[Entry | LeftOut] = []
    unanswered: dict[str, str] = {}  # reasons for not reading a resource again, by resource
    for name in baseline_checks(checks):
        resource = "nvml" if checks[name].uses == "nvml" else f"baseline {name}"
        if resource != "nvml":
            close_nvml(client)
        seconds = GPU_SECONDS if resource == "nvml" else CHECK_SECONDS
        request = TakeBaseline(name, loaded.tables.get(RunName(name), {}))
        reply = send_and_wait(client, Request(resource, seconds, request))
        if isinstance(reply.answer, BaselineAnswer):
            found += [*reply.answer.entries, *reply.answer.left_out]
            continue
        why = unanswered.get(resource) or _why(reply.error, seconds)
        if reply.outcome is Outcome.TIMED_OUT:
            unanswered[resource] = why
        found.append(LeftOut(name, f"could not be read: {why}"))
    close_nvml(client)
    entries = [item for item in found if isinstance(item, Entry)]
    left_out = [item for item in found if isinstance(item, LeftOut)]
    broken = list(_broken(entries, checks, client))
    instances = {(omission.check, omission.instance) for omission in broken}
    working = [entry for entry in entries if (entry.check, entry.instance) not in instances]
    return Present(tuple(working), (*left_out, *broken))


def _broken(entries: Iterable[Entry], checks: Mapping[str, Check], client: WorkerClient) -> Iterator[LeftOut]:
    """Yield the instances (mounts) to leave out, because they do not answer or have a problem."""
    tables: dict[RunName, dict[str, Any]] = {}
    for entry in entries:
        if checks[entry.check].per:
            name = RunName(entry.check, entry.instance)
            tables.setdefault(name, {"name": entry.instance})[entry.setting] = entry.value
    seconds_left = INSTANCES_SECONDS
    for (check, instance), table in tables.items():
        if seconds_left <= 0:
            yield LeftOut(check, "not read: other instances took too long", instance=instance, unread=True)
            continue
        run = Run(check, instance, table)
        reply = send_and_wait(client, Request(checks[check].resource(instance), INSTANCE_SECONDS, run))
        seconds_left -= reply.seconds
        findings = reply.answer.findings if isinstance(reply.answer, RunAnswer) else ()
        problems = [finding.message for finding in findings]
        if reply.outcome is not Outcome.COMPLETED:
            problems.append(_why(reply.error, INSTANCE_SECONDS))
        if problems:
            unread = reply.outcome is not Outcome.COMPLETED
            yield LeftOut(check, "; ".join(problems), instance=instance, unread=unread)


def _why(error: str, seconds: float) -> str:
    return strip_error_class(error) or f"no answer within {seconds:g} s"


# --- as a file


def as_toml(present: Present, checks: Mapping[str, Check], heading: str) -> str:
    """Return the text of the file. An omitted part appears as a comment in its usual place."""
    lines = [*(f"# {line}" for line in heading.splitlines())]
    for check, (settings, _) in baseline_checks(checks).items():
        entries = [entry for entry in present.entries if entry.check == check]
        left_out = [omission for omission in present.left_out if omission.check == check]
        if checks[check].per:
            lines += _named_tables(check, entries, left_out)
        elif entries or left_out:
            lines += _table(checks[check].config, check, settings, entries, left_out)
    return "\n".join(lines) + "\n"


def _table(
    config: type[CheckConfig], check: str, settings: Sequence[str], entries: list[Entry], left_out: list[LeftOut]
) -> Iterator[str]:
    yield ""
    plain = [s for s in settings if _kind(config, s) is not dict]
    if plain:
        yield f"[checks.{check}]"
    yield from (_comment("", omission.why) for omission in left_out if not omission.setting)
    for setting in settings:
        own_entries = [entry for entry in entries if entry.setting == setting]
        comments = [
            _comment(omission.key or setting, omission.why) for omission in left_out if omission.setting == setting
        ]
        if _kind(config, setting) is dict:
            yield f"[checks.{check}.{setting}]"
            yield from (_noted(f"{_text(entry.key)} = {_value(entry.value)}", entry.note) for entry in own_entries)
        elif _kind(config, setting) is tuple and own_entries:
            yield f"{setting} = ["
            yield from (_noted(f"    {_text(entry.key)},", entry.note) for entry in own_entries)
            yield "]"
        else:
            yield from (_noted(f"{setting} = {_value(entry.value)}", entry.note) for entry in own_entries)
        yield from comments


def _named_tables(check: str, entries: list[Entry], left_out: list[LeftOut]) -> Iterator[str]:
    for instance in dict.fromkeys(entry.instance for entry in entries):
        yield ""
        yield f"[checks.{check}.{_text(instance)}]"
        own_entries = (entry for entry in entries if entry.instance == instance)
        yield from (_noted(f"{entry.setting} = {_value(entry.value)}", entry.note) for entry in own_entries)
    if left_out:
        yield ""
    yield from (_comment(f"{check} {omission.instance}".strip(), omission.why) for omission in left_out)


def as_json(present: Present, kept_entries: Iterable[Entry], changes: Iterable[Change]) -> dict[str, Any]:
    """Return the document for `healthd baseline --json` (docs/json.md), without the path of the file."""
    left_out = [
        {name: getattr(omission, name) for name in ("check", "instance", "setting", "key", "why", "unseen")}
        for omission in present.left_out
    ]
    return {
        "entries": list(map(_entry_json, present.entries)),
        "left_out": left_out,
        "kept": list(map(_entry_json, kept_entries)),
        "changes": [change._asdict() for change in changes],
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("check", "instance", "setting", "key", "value", "note")}


def describe_kept(entry: Entry) -> str:
    """Describe a value that stays in the file unchanged, with its setting."""
    return _single_line(f"kept: {_name(_setting_key(entry))} = {_display(_setting_key(entry), entry.value)}")


def describe_left_out(omission: LeftOut) -> str:
    """Describe an omitted part and name its table."""
    table_name = " ".join(
        word for word in (omission.check, omission.instance, omission.key or omission.setting) if word
    )
    return _single_line(f"left out: {table_name}: {omission.why}")


def _kind(config: type[CheckConfig], setting: str) -> type:
    return type(getattr(config(), setting))


def _noted(line: str, note: str) -> str:
    return f"{line.ljust(COLUMN)}# {_single_line(note)}" if note else line


def _comment(subject: str, why: str) -> str:
    return _single_line(f"# left out: {subject}: {why}" if subject else f"# left out: {why}")


def _single_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    """Return a TOML string, which is like a JSON string but requires more escapes."""
    whole = text.encode("utf-8", "replace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- changes


class Change(NamedTuple):
    """A change to one setting. `setting` is the name in the file. `was` and `now` are the values, or "" if absent.
    `unknown` is True if the part could not be read.
    """

    setting: str
    was: str
    now: str
    unknown: bool = False


SettingKey = tuple[str, str, str, str]  # check, instance, setting, key


def find_changes(tables: Mapping[str, Any], present: Present, checks: Mapping[str, Check]) -> list[Change]:
    """Return the differences between the present hardware and a baseline's valid [checks] tables, in generated settings
    only.
    """
    previous, current = dict(_flat(tables, checks)), {_setting_key(entry): entry.value for entry in present.entries}
    changes = []
    for key in sorted({*previous, *current}):
        if key not in previous:
            changes.append(Change(_name(key), "", _display(key, current[key])))
        elif key not in current:
            why, unknown = _missing_reason(key, present.left_out)
            changes.append(Change(_name(key), _display(key, previous[key]), why, unknown))
        elif not _is_same(key, previous[key], current[key]):
            changes.append(Change(_name(key), _display(key, previous[key]), _display(key, current[key])))
    return changes


def manual_settings(tables: Mapping[str, Any], checks: Mapping[str, Check]) -> list[Change]:
    """Return the settings that a person added to a baseline. They are lost when the file is written again."""
    return [
        Change(_name(key), _display(key, value), "") for key, value in sorted(_flat(tables, checks, in_baseline=False))
    ]


def _setting_key(entry: Entry) -> SettingKey:
    return entry.check, entry.instance, entry.setting, entry.key


def _flat(
    tables: Mapping[str, Any], checks: Mapping[str, Check], in_baseline: bool = True
) -> Iterator[tuple[SettingKey, Any]]:
    baseline = baseline_checks(checks)
    for check, table in tables.items():
        own = {field.name for field in fields_of(checks[check].config)}
        written = baseline[check].settings if check in baseline else ()
        for key, value in table.items():
            if checks[check].per and key not in own:
                for setting, item in value.items():
                    if (setting in written) == in_baseline and item is not False:
                        yield (check, key, setting, ""), item
            elif (not checks[check].per and key in written) == in_baseline:
                yield from _items(check, key, value)


def _items(check: str, setting: str, value: Any) -> Iterator[tuple[SettingKey, Any]]:
    if isinstance(value, Mapping):
        yield from (((check, "", setting, key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from (((check, "", setting, str(item)), True) for item in value)
    else:
        yield (check, "", setting, ""), value


def _is_same(key: SettingKey, previous: Any, current: Any) -> bool:
    if key[2].endswith("_bytes"):
        return bool(abs(previous - current) <= SIZE_TOLERANCE * previous)
    return bool(previous == current)


def _missing_reason(setting_key: SettingKey, left_out: Iterable[LeftOut]) -> tuple[str, bool]:
    """Return the reason why a part is missing, and True if the part could not be read."""
    check, instance, setting, key = setting_key
    for omission in left_out:
        is_whole_check = not omission.setting and not omission.instance
        is_setting = (omission.check, omission.instance) == (check, instance) and omission.setting in ("", setting)
        if (omission.check == check and is_whole_check) or (is_setting and omission.key in ("", key)):
            return omission.why, omission.unseen
    return "missing", False


class MergedBaseline(NamedTuple):
    """A new baseline.

    `entries` are values that could not be read and stay in the file unchanged. `lost` are unreadable parts that are not
    in the old file either.
    """

    present: Present
    entries: tuple[Entry, ...]
    lost: tuple[LeftOut, ...]


def merge_baseline(tables: Mapping[str, Any], present: Present, checks: Mapping[str, Check]) -> MergedBaseline:
    """Return the present hardware, plus values from the old baseline that could not be read now.

    Without the old values, a baseline that is made while the driver does not answer would accept a node without GPUs.
    """
    present_keys = {_setting_key(entry) for entry in present.entries}
    kept_entries: list[Entry] = []
    for setting_key, value in _flat(tables, checks):
        if setting_key not in present_keys and _missing_reason(setting_key, present.left_out)[1]:
            check, instance, setting, key = setting_key
            kept_entries.append(Entry(check, setting, value, key, instance, "kept: could not be read"))
    omissions = [
        omission
        for omission in present.left_out
        if not any(_missing_reason(_setting_key(entry), [omission])[1] for entry in kept_entries)
    ]
    lost = tuple(omission for omission in omissions if omission.unseen)
    return MergedBaseline(Present((*present.entries, *kept_entries), tuple(omissions)), tuple(kept_entries), lost)


def _display(key: SettingKey, value: Any) -> str:
    return "present" if key[3] and value is True else _value(value)


def _name(setting_key: SettingKey) -> str:
    check, instance, setting, key = setting_key
    path = f'{check}."{instance}".{setting}' if instance else f"{check}.{setting}"
    return f"checks.{path} {key}".strip()
